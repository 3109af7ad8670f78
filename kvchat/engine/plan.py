"""Predict a model's memory before it is loaded, and propose weights and a mode: the best combination that fits.

The model is built on torch's meta device, where tensors have shapes but no memory, and one token runs through it, which
shows the shapes of its K/V and recurrent state. Only the headers of the weight files are read.

In each mode, precision of the weights is given up before the mode is. First comes full mode with all K/V on the device,
then a mode that retrieves, then that mode with smaller budgets. Then comes full mode that for every token reads over
PCIe what does not fit on the device, gigabytes in a long conversation. Streaming, which forgets most of it, is last.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from kvchat import libraries
from kvchat.config import modes
from kvchat.config.modes import MIN_BUDGET
from kvchat.engine.runner import CHUNK
from kvchat.errors import KvchatError, UsageError
from kvchat.kv.attention import PREFILL_WORKSPACE
from kvchat.kv.geometry import GROWTH_HEADROOM, Geometry
from kvchat.kv.memory import available, eight_bit_pages
from kvchat.kv.memory.host_pool import layer_bytes, pool_bytes
from kvchat.kv.modes import build
from kvchat.kv.modes.base import AUTO_BUDGET, ModelTraits
from kvchat.kv.modes.sync_heads import Calibration, default_clusters
from kvchat.kv.prefill import staging_bytes
from kvchat.models import repacking, split
from kvchat.models.description import ModelDescription, describe, quiet
from kvchat.models.hub import Progress
from kvchat.models.probe import observe_shape
from kvchat.models.quantize import quantization
from kvchat.models.recurrent import SNAPSHOTS, RecurrentState, attending_layers
from kvchat.models.support import refuse_unreadable
from kvchat.models.weights import AT_MOST
from kvchat.protocol.figures import MemoryPlan, ModeNeed, Proposal, Snapshot, StoredNeed
from kvchat.protocol.messages import Load
from kvchat.units import size

# Options that a plan depends on; it names those that differ from the default.
GIVEN = ("device", "gpus", "split", "dtype", "host_dtype", "quantize")
LEAST_BUDGET = AUTO_BUDGET["least"]  # the smallest budget to propose
WEIGHTS = ("none", "int8", "nf4")  # 8 bits lose little, 4 bits more


def memory_plan(load: Load, context: int | None, progress: Progress, in_use: Snapshot | None = None) -> MemoryPlan:
    """Plan for a conversation of ``context`` tokens, by default the model's whole context.

    ``in_use`` is the current model, which is unloaded for the planned one.

    Raises:
        ModelError: the model cannot be found or run; UsageError: the device, dtype or a parameter is unknown, or the
            context is not from 1 to the model's.
    """
    if load.split == "heads" and load.gpus > 1:
        raise UsageError(
            "A plan does not cover --split heads.",
            f"split = heads puts about 1/{load.gpus} of weights and K/V on each of {load.gpus} GPUs.",
            "Use --split layers, or --gpus 1.",
        )
    with quiet():
        described = describe(load.model, load.device, load.dtype, progress, load.gpus)
        quantization.check(repacking.choose(load.quantize, described).quantize, described.config, described.device)
        seen = observe(described)
        if in_use is not None:
            seen = seen._replace(system_tokens=in_use.preamble, pins=in_use.pins)
        plan = _taken(load, seen, _context(seen, context), in_use)
    plan = _proposed(plan, load, seen)
    return replace(plan, stored=None if in_use is None else _stored_need(plan, in_use, load, seen))


def fits_beside(load: Load, progress: Progress) -> bool:
    """True if another model's weights fit into the free memory while the current model and its K/V stay loaded.

    Raises:
        KvchatError: it cannot be loaded at all.
    """
    if load.split == "heads" and load.gpus > 1:
        return False  # this process can lead only one group of ranks at a time
    plan = memory_plan(load, 1, progress)
    return plan.on_device(_asked_weights(plan, load)) + plan.workspace <= available.usable(plan.device_free)


# ---- parts -----------------------------------------------------------------------------------------
def _taken(load: Load, seen: Observed, tokens: int, in_use: Snapshot | None) -> MemoryPlan:
    """Return the plan without a proposal: the bytes of each choice, and the free bytes."""
    described, geometry = seen.described, seen.geometry
    weights, by_default = described.by_quantization(), repacking.by_default(described)
    asked = by_default if load.quantize == "auto" else load.quantize
    is_quantized = load.host_dtype == "int8"
    share = eight_bit_pages.share(geometry) if is_quantized else 1.0
    device_given, host_given = _given_back(in_use, described.device)
    given_back = in_use.elsewhere if in_use else {}
    return MemoryPlan(
        model=load.model,
        architecture=described.model_class.__name__,
        device=str(described.device),
        dtype=described.dtype_name,
        context=tokens,
        weights=weights,
        modes={name: mode_need(name, load, seen, tokens, share) for name in modes.mode_names()},
        state=seen.state.nbytes,
        workspace=_workspace(seen, tokens),
        host_pool=pool_bytes(geometry, tokens + 1, seen.traits.context, is_quantized),
        snapshots=SNAPSHOTS * seen.state.nbytes,
        device_free=available.free_bytes(described.device) + device_given,
        host_free=available.host_free() + host_given,
        token_bytes=geometry.token_bytes,
        host_share=share,
        by_default=by_default,
        file_bits=described.weights.layer_bits,
        unpacked=weights["none"] if repacking.needs_full_dequantization(described, asked) else 0,
        packed=described.weights.nbytes if quantization.is_unpacked(described.config, described.device) else 0,
        floor_ms=_floors(described, weights, load.read_bytes_per_s),
        given={name: str(value) for name in GIVEN if (value := getattr(load, name)) != getattr(Load, name)},
        elsewhere=_elsewhere(described, weights, given_back),
        others_free={
            str(device): available.free_bytes(device) + given_back.get(str(device), 0) for device in described.others
        },
    )


def _proposed(plan: MemoryPlan, load: Load, seen: Observed) -> MemoryPlan:
    """Add a proposal; modes that adapt to a small device are planned with the memory that its weights leave."""
    plan = replace(plan, proposal=propose(plan, list(_smaller_budgets(plan, load, seen))))
    beside = plan.proposal.quantize if plan.proposal and load.quantize == "auto" else _asked_weights(plan, load)
    room = available.usable(plan.device_free) - plan.on_device(beside) - plan.state - seen.described.activations(CHUNK)
    limited = {name: mode_need(name, load, seen, plan.context, plan.host_share, room) for name in plan.modes}
    fitting = {name: need for name, need in limited.items() if has_room(plan, beside, need)}
    return replace(plan, beside=beside, modes=plan.modes | fitting)


class Observed(NamedTuple):
    """A model without its weights, and the shapes that one token showed.

    ``system_tokens`` and ``pins`` count the tokens of the current conversation's system prompt and pinned messages, as
    in its ``Snapshot``.
    """

    described: ModelDescription
    state: RecurrentState
    geometry: Geometry
    traits: ModelTraits
    system_tokens: int = 0
    pins: int = 0


def observe(described: ModelDescription) -> Observed:
    """Run one token through a model without weights and return what it shows.

    Raises:
        ModelError: the model cannot be run.
    """
    with refuse_unreadable(described.location.name, "the model"):
        shapes = described.shapes
        state = RecurrentState(shapes.config)
        shape = observe_shape(shapes, state)
        described.check_tensors()
    layers = len(attending_layers(shapes.config))
    on = described.device.type
    geometry = Geometry(layers, *shape, described.dtype, headroom=GROWTH_HEADROOM[on], unified=on == "cpu")
    longest = int(shapes.config.get_text_config(decoder=True).max_position_embeddings)
    heads = any_heads(geometry, shapes.config.model_type)
    traits = ModelTraits(longest, (None,) * layers, calibration=heads)
    return Observed(described, state, geometry, traits)


def any_heads(geometry: Geometry, architecture: str) -> Calibration:
    """Return placeholder heads, as many as measuring the model will find by default, because memory depends on that.

    The real heads are found with the weights, which may not be downloaded yet.
    """
    heads, layers = range(geometry.kv_heads), geometry.layers
    clusters = default_clusters(geometry.kv_heads, architecture)
    alike = tuple(tuple(float((a - b) % clusters == 0) for b in heads) for a in heads)
    return Calibration("", "", clusters, (alike,) * layers, ((0.0,) * geometry.kv_heads,) * layers)


def _context(seen: Observed, asked: int | None) -> int:
    """Return the number of tokens to plan for, by default the model's context."""
    longest = seen.traits.context
    if asked is None or 0 < asked <= longest:
        return asked or longest
    name = seen.described.location.name
    raise UsageError(
        f"A context of {asked:,} tokens is not valid.",
        f"{name} was made for 1 to {longest:,}.",
        "Use a context in that range.",
    )


def _stored_need(plan: MemoryPlan, in_use: Snapshot, load: Load, seen: Observed) -> StoredNeed:
    """Return the memory that the current conversation needs with the planned model, and the room for it."""
    # A loaded model, too, reserves the margin from the memory that its weights leave.
    room = available.usable(plan.device_free - plan.on_device(_asked_weights(plan, load)) - plan.state)
    read = mode_need(in_use.mode, load, seen, in_use.device_room - 1, plan.host_share, room).device_bytes
    pool = seen.geometry.layers * layer_bytes(seen.geometry, in_use.exact_room, in_use.rounded_room)
    rooms = in_use.device_room, in_use.exact_room + in_use.rounded_room
    return StoredNeed(in_use.mode, in_use.total, read, pool, *rooms)


def _given_back(in_use: Snapshot | None, device: torch.device) -> tuple[int, int]:
    """Return the bytes that the current model holds on ``device`` and in RAM; on a CPU both are all of it."""
    if in_use is None:
        return 0, 0
    computed_with = in_use.weight_bytes - sum(in_use.elsewhere.values()) + in_use.kv_device_bytes
    if in_use.torch_allocated is None:
        held = computed_with + in_use.kv_host_bytes
        return (held if device.type == "cpu" else 0), held
    return (in_use.kv_host_bytes if device.type == "cpu" else computed_with), in_use.kv_host_bytes


def _elsewhere(
    described: ModelDescription, choices: Iterable[str], given_back: dict[str, int]
) -> dict[str, dict[str, int]]:
    """Return, by quantization, the bytes of the weights on each GPU other than the first."""
    names = [str(device) for device in described.others]
    return {
        name: dict(zip(names, split.shares(described, name, given_back).others, strict=True))
        for name in choices
        if names
    }


def _floors(described: ModelDescription, choices: Iterable[str], rate: float | None) -> dict[str, float]:
    """Return, by quantization, the milliseconds to read a token's weights; {} without a ``rate`` or with experts."""
    read = {name: described.weights.read_bytes(name, described.dtype_name, described.place) for name in choices}
    return {name: 1000 * nbytes / rate for name, nbytes in read.items() if nbytes and rate}


def _asked_weights(plan: MemoryPlan, load: Load) -> str:
    """Return the quantization that ``load`` asks for, or the largest weights if their format is unknown."""
    quantize = plan.by_default if load.quantize == "auto" else load.quantize
    return quantize if quantize in plan.weights else max(plan.weights, key=plan.weights.__getitem__)


def _smaller_budgets(plan: MemoryPlan, load: Load, seen: Observed) -> Iterator[ModeNeed]:
    """Yield the retrieving mode with half the current budget, half of that and so on, down to ``LEAST_BUDGET``."""
    budget = plan.modes[modes.COMPARED].params.get("budget", 0) // 2
    while budget >= LEAST_BUDGET:
        yield mode_need(modes.COMPARED, load, seen, plan.context, plan.host_share, changes={"budget": budget})
        budget //= 2


def mode_need(
    name: str,
    load: Load,
    seen: Observed,
    tokens: int,
    host_share: float = 1.0,
    room: int | None = None,
    changes: modes.Params | None = None,
) -> ModeNeed:
    """Return a mode's memory, without the rotations that only a loaded model knows; ``host_share`` as in MemoryPlan.

    ``room`` is the device memory left for K/V, for modes that adapt to it; None if it is not limited.
    ``changes`` are parameters that replace the current ones.
    """
    geometry = seen.geometry
    try:
        mode = build(
            modes.effective_params(name, load.mode_params, load.given, changes),
            geometry,
            seen.traits,
            seen.system_tokens,
        )
        mode.pin(range(mode.sink, mode.sink + min(seen.pins, tokens)))
        if room is not None:
            mode.limit(geometry.grown(tokens + 1), room)
        needed = mode.plan(geometry.grown(tokens + 1)).device_bytes(geometry)
        resident = getattr(mode, "resident", None)
        budget = getattr(mode, "budget", getattr(mode.parameters, "budget", None))
        chosen = {"budget": budget, "sink": mode.sink, "window": mode.window}
        params = {name: value for name, value in (chosen | {"resident": resident}).items() if value}
        spilled = tokens - resident if resident and not geometry.unified else 0
        return ModeNeed(needed, params, link_bytes=int(max(0, spilled) * geometry.token_bytes * host_share))
    except KvchatError as error:
        return ModeNeed(0, {}, str(error))


def _workspace(seen: Observed, tokens: int) -> int:
    """Return the approximate bytes of a prefill chunk: its activations, and on a GPU a layer's K/V."""
    staged = staging_bytes(seen.geometry, max(0, tokens - CHUNK), CHUNK) + PREFILL_WORKSPACE
    return seen.described.activations(CHUNK) + (staged if seen.described.device.type == "cuda" else 0)


def propose(plan: MemoryPlan, smaller: Sequence[ModeNeed] = ()) -> Proposal | None:
    """Return the first combination that fits, or None. The modes of ``plan`` are planned without a memory limit.

    ``smaller`` are the needs of the retrieving mode with smaller budgets than the current one, largest first.
    """
    weights = [name for name in dict.fromkeys((plan.by_default, *WEIGHTS, *plan.weights)) if name in plan.weights]
    full = plan.modes[modes.REFERENCE]
    choices = [  # modes and their needs, best first, and whether the K/V that do not fit are read from RAM
        (modes.REFERENCE, full, False),
        *((modes.COMPARED, need, False) for need in (plan.modes[modes.COMPARED], *smaller)),
        (modes.REFERENCE, full, True),
        (modes.HOLDS_LEAST, plan.modes[modes.HOLDS_LEAST], False),
    ]
    for mode, need, spills in choices:
        for quantize in weights:
            if not need.refusal and _fits(plan, quantize, need, spills):
                lacks = libraries.lacking(quantize, plan.device)
                command = libraries.extra(libraries.EXTRA_OF[quantize]) if lacks else ""
                lost = tuple(_lost(plan, quantize, mode, need, spills))
                return Proposal(quantize, mode, need.params.get("budget"), lost, command)
    return None


def has_room(plan: MemoryPlan, quantize: str, need: ModeNeed) -> bool:
    """True if the device has room for its part of the model and the K/V, and for the usual margin."""
    return _beside_kv(plan, quantize) + need.device_bytes <= available.usable(plan.device_free)


def _fits(plan: MemoryPlan, quantize: str, need: ModeNeed, spills: bool) -> bool:
    read = replace(need, device_bytes=MIN_BUDGET * plan.token_bytes) if spills else need
    on_host = plan.host_pool + plan.snapshots
    if plan.device == "cpu":
        everything = _beside_kv(plan, quantize) + read.device_bytes + on_host
        return not spills and everything <= available.usable(plan.host_free)
    return has_room(plan, quantize, read) and on_host <= available.usable(plan.host_free)


def _beside_kv(plan: MemoryPlan, quantize: str) -> int:
    """Return the bytes on the device besides the K/V that are read."""
    return plan.on_device(quantize) + plan.state + plan.workspace


def _lost(plan: MemoryPlan, quantize: str, mode: str, need: ModeNeed, spills: bool) -> Iterator[str]:
    """Yield what a combination gives up, as messages."""
    if bits := quantization.BITS.get(quantize):
        if plan.file_bits == 0 or plan.file_bits > AT_MOST.get(quantize, 0):
            instead = f"the file's {plan.file_bits:.1f}" if plan.file_bits else plan.dtype
            yield f"precision of the weights: {bits} bits instead of {instead}"
        elif plan.packed:  # their quantization steps differ
            yield f"precision of the weights: the files' {plan.file_bits:.1f} bits are requantized to {bits}"
    if plan.given.get("host_dtype") == "int8":
        yield f"precision of the K/V: full pages are stored in 8 bits instead of {plan.dtype}, nearly exact"
    link = need.link_bytes  # set if the user chose how much stays on the device: the rest is read from RAM
    if spills:  # everything that does not fit on the device, at the end of the context
        room = available.usable(plan.device_free) - _beside_kv(plan, quantize)
        link = int(max(0, plan.context * plan.token_bytes - room) * plan.host_share)
    if link:
        yield f"speed: at the end {size(link)} are streamed from RAM for every token"
    if lost := modes.registered()[mode].tradeoff:
        yield lost
    if budget := need.params.get("budget"):
        effective = plan.modes[mode].params["budget"]
        less = f"; the budget now is {effective:,}" if budget < effective else ""
        yield f"reading more than {budget:,} tokens per head and token{less}"
