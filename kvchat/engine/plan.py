"""Predicts a model's memory before it is loaded, and proposes weights and a mode: the first that fit, the best first.

The model is built on torch's meta device, where tensors have shapes and no memory, and one token runs through it: so
the shapes of its K/V and of its state are observed as the probe does. Of the weight files the headers are read.

In each mode bits of the weights are given up before the mode is. First all K/V is read, then what a mode retrieves,
then less of that: none of these reads over the link. Then full mode does, and reads for every token what has no room on
the device, gigabytes in a long conversation; last comes a window alone, which forgets most of what was said.
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
from kvchat.models.support import explained
from kvchat.models.weights import AT_MOST
from kvchat.protocol.figures import MemoryPlan, ModeNeed, Proposal, Snapshot, StoredNeed
from kvchat.protocol.messages import Load
from kvchat.units import size

# Options that a plan depends on; it names those that are not the default.
GIVEN = ("device", "gpus", "split", "dtype", "host_dtype", "quantize")
LEAST_BUDGET = AUTO_BUDGET["least"]  # what no smaller budget is proposed than
WEIGHTS = ("none", "int8", "nf4")  # 8 bits give up little, 4 bits more


def memory_plan(load: Load, context: int | None, progress: Progress, in_use: Snapshot | None = None) -> MemoryPlan:
    """Plan for a conversation of ``context`` tokens, by default as long as the model allows.

    ``in_use`` is what a model takes now that is unloaded for the planned one.

    Raises:
        ModelError: the model cannot be found or run; UsageError: an unknown device, dtype or parameter, or a context
            that the model does not have.
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
        made = _taken(load, seen, _context(seen, context), in_use)
    made = _proposed(made, load, seen)
    return replace(made, stored=None if in_use is None else _stored_need(made, in_use, load, seen))


def fits_beside(load: Load, progress: Progress) -> bool:
    """True if another model's weights fit the free memory, beside the model in use and its K/V.

    Raises:
        KvchatError: it cannot be loaded at all.
    """
    if load.split == "heads" and load.gpus > 1:
        return False  # this process leads one group of them at a time
    made = memory_plan(load, 1, progress)
    return made.on_device(_asked_weights(made, load)) + made.workspace <= available.usable(made.device_free)


# ---- parts -----------------------------------------------------------------------------------------
def _taken(load: Load, seen: Observed, tokens: int, in_use: Snapshot | None) -> MemoryPlan:
    """The plan before anything is proposed: the bytes of each choice, and those that are free."""
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


def _proposed(made: MemoryPlan, load: Load, seen: Observed) -> MemoryPlan:
    """A plan with its proposal; modes that take less where the device is short are planned in the room beside it."""
    made = replace(made, proposal=propose(made, list(_smaller_budgets(made, load, seen))))
    beside = made.proposal.quantize if made.proposal and load.quantize == "auto" else _asked_weights(made, load)
    room = available.usable(made.device_free) - made.on_device(beside) - made.state - seen.described.activations(CHUNK)
    limited = {name: mode_need(name, load, seen, made.context, made.host_share, room) for name in made.modes}
    fitting = {name: need for name, need in limited.items() if has_room(made, beside, need)}
    return replace(made, beside=beside, modes=made.modes | fitting)


class Observed(NamedTuple):
    """A model without memory for its weights, and what one token showed of it.

    ``system_tokens`` and ``pins`` are the tokens that the conversation in use has of its system prompt and of pinned
    messages, as in its ``Snapshot``.
    """

    described: ModelDescription
    state: RecurrentState
    geometry: Geometry
    traits: ModelTraits
    system_tokens: int = 0
    pins: int = 0


def observe(described: ModelDescription) -> Observed:
    """What one token shows of a model.

    Raises:
        ModelError: it cannot be run.
    """
    with explained(described.location.name, "the model"):
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
    """Some heads to represent as many others as measuring them will find by default, which is what memory depends on.

    The heads that were measured are found by the weights, which need not be here yet.
    """
    heads, layers = range(geometry.kv_heads), geometry.layers
    clusters = default_clusters(geometry.kv_heads, architecture)
    alike = tuple(tuple(float((a - b) % clusters == 0) for b in heads) for a in heads)
    return Calibration("", "", clusters, (alike,) * layers, ((0.0,) * geometry.kv_heads,) * layers)


def _context(seen: Observed, asked: int | None) -> int:
    """The tokens to plan for, by default as many as the model reads."""
    longest = seen.traits.context
    if asked is None or 0 < asked <= longest:
        return asked or longest
    name = seen.described.location.name
    raise UsageError(
        f"A context of {asked:,} tokens is not valid.",
        f"{name} was made for 1 to {longest:,}.",
        "Use a context in that range.",
    )


def _stored_need(made: MemoryPlan, in_use: Snapshot, load: Load, seen: Observed) -> StoredNeed:
    """The need of the conversation that is stored now, with the room that there is for it."""
    # As a loaded model does, which leaves the margin of what its weights left.
    room = available.usable(made.device_free - made.on_device(_asked_weights(made, load)) - made.state)
    read = mode_need(in_use.mode, load, seen, in_use.device_room - 1, made.host_share, room).device_bytes
    pool = seen.geometry.layers * layer_bytes(seen.geometry, in_use.exact_room, in_use.rounded_room)
    rooms = in_use.device_room, in_use.exact_room + in_use.rounded_room
    return StoredNeed(in_use.mode, in_use.total, read, pool, *rooms)


def _given_back(in_use: Snapshot | None, device: torch.device) -> tuple[int, int]:
    """Bytes that the model in use holds on ``device`` and on the host; on a CPU both are all of it."""
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
    """By quantization the bytes of the weights on each GPU beside the device."""
    names = [str(device) for device in described.others]
    return {
        name: dict(zip(names, split.shares(described, name, given_back).others, strict=True))
        for name in choices
        if names
    }


def _floors(described: ModelDescription, choices: Iterable[str], rate: float | None) -> dict[str, float]:
    """Milliseconds to read the weights of one token by quantization; nothing without a ``rate`` or with experts."""
    read = {name: described.weights.read_bytes(name, described.dtype_name, described.place) for name in choices}
    return {name: 1000 * nbytes / rate for name, nbytes in read.items() if nbytes and rate}


def _asked_weights(made: MemoryPlan, load: Load) -> str:
    """The weights as ``load`` asks for them; the largest where it is not known how they are kept."""
    quantize = made.by_default if load.quantize == "auto" else load.quantize
    return quantize if quantize in made.weights else max(made.weights, key=made.weights.__getitem__)


def _smaller_budgets(made: MemoryPlan, load: Load, seen: Observed) -> Iterator[ModeNeed]:
    """The retrieving mode with half the budget in force, half of that and so on, to what kvchat chooses at least."""
    budget = made.modes[modes.COMPARED].params.get("budget", 0) // 2
    while budget >= LEAST_BUDGET:
        yield mode_need(modes.COMPARED, load, seen, made.context, made.host_share, changes={"budget": budget})
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
    """Without the rotations that only a loaded model tells; ``host_share`` as in ``MemoryPlan``.

    ``room`` is what the device leaves for K/V, for modes that take less where it is short; None where it is not.
    ``changes`` are parameters that replace those in force.
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
    """Approximate bytes of one prefill forward: its activations, and on a GPU a layer's K/V."""
    staged = staging_bytes(seen.geometry, max(0, tokens - CHUNK), CHUNK) + PREFILL_WORKSPACE
    return seen.described.activations(CHUNK) + (staged if seen.described.device.type == "cuda" else 0)


def propose(made: MemoryPlan, smaller: Sequence[ModeNeed] = ()) -> Proposal | None:
    """The first combination that fits, None where none does. The modes of ``made`` have all that they want.

    ``smaller`` is what the mode that retrieves needs with smaller budgets than the one in force, the largest first.
    """
    weights = [name for name in dict.fromkeys((made.by_default, *WEIGHTS, *made.weights)) if name in made.weights]
    full = made.modes[modes.REFERENCE]
    ways = [  # modes and what they need, the best first, and whether what has no room is read over the link
        (modes.REFERENCE, full, False),
        *((modes.COMPARED, need, False) for need in (made.modes[modes.COMPARED], *smaller)),
        (modes.REFERENCE, full, True),
        (modes.HOLDS_LEAST, made.modes[modes.HOLDS_LEAST], False),
    ]
    for mode, need, spills in ways:
        for quantize in weights:
            if not need.refusal and _fits(made, quantize, need, spills):
                lacks = libraries.lacking(quantize, made.device)
                command = libraries.extra(libraries.EXTRA_OF[quantize]) if lacks else ""
                lost = tuple(_lost(made, quantize, mode, need, spills))
                return Proposal(quantize, mode, need.params.get("budget"), lost, command)
    return None


def has_room(made: MemoryPlan, quantize: str, need: ModeNeed) -> bool:
    """True if what the device holds fits it, with the margin that is always left."""
    return _beside_kv(made, quantize) + need.device_bytes <= available.usable(made.device_free)


def _fits(made: MemoryPlan, quantize: str, need: ModeNeed, spills: bool) -> bool:
    read = replace(need, device_bytes=MIN_BUDGET * made.token_bytes) if spills else need
    on_host = made.host_pool + made.snapshots
    if made.device == "cpu":
        everything = _beside_kv(made, quantize) + read.device_bytes + on_host
        return not spills and everything <= available.usable(made.host_free)
    return has_room(made, quantize, read) and on_host <= available.usable(made.host_free)


def _beside_kv(made: MemoryPlan, quantize: str) -> int:
    """Bytes on the device beside the K/V that are read."""
    return made.on_device(quantize) + made.state + made.workspace


def _lost(made: MemoryPlan, quantize: str, mode: str, need: ModeNeed, spills: bool) -> Iterator[str]:
    """What a combination gives up."""
    if bits := quantization.BITS.get(quantize):
        if made.file_bits == 0 or made.file_bits > AT_MOST.get(quantize, 0):
            instead = f"the file's {made.file_bits:.1f}" if made.file_bits else made.dtype
            yield f"precision of the weights: {bits} bits instead of {instead}"
        elif made.packed:  # in other steps than these
            yield f"precision of the weights: the files' {made.file_bits:.1f} bits are requantized to {bits}"
    if made.given.get("host_dtype") == "int8":
        yield f"precision of the K/V: full pages are stored in 8 bits instead of {made.dtype}, nearly exact"
    link = need.link_bytes  # of who chose how much stays on the device: the rest is read over the link
    if spills:  # all that does not fit the device, at the end
        room = available.usable(made.device_free) - _beside_kv(made, quantize)
        link = int(max(0, made.context * made.token_bytes - room) * made.host_share)
    if link:
        yield f"speed: at the end {size(link)} are streamed from RAM for every token"
    if lost := modes.registered()[mode].tradeoff:
        yield lost
    if budget := need.params.get("budget"):
        effective = made.modes[mode].params["budget"]
        less = f"; the budget now is {effective:,}" if budget < effective else ""
        yield f"reading more than {budget:,} tokens per head and token{less}"
