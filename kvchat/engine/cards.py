"""Compute the time per token on a GPU that is not installed, from its data sheet; nothing here is measured.

The formulas are auto's (``kvchat.kv.auto``): bytes read from GPU memory and over PCIe, divided by ``REACHED`` of the
data sheet's rates. They exclude what a step costs besides its bytes (kernel launches, choosing tokens, waiting):
``MEASURED`` says how many times longer each setup took where it was measured.

A round of drafts costs its drafts, each of which reads what is on the device, and one step that reads everything for
all of them (Leviathan et al., arXiv:2211.17192, section 3.3, with this step's costs).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from kvchat.config import modes
from kvchat.config.modes import COMPARED, HOLDS_LEAST, REFERENCE, FreezeParameters, SyncParameters
from kvchat.engine.plan import Observed, observe
from kvchat.engine.runner import CHUNK
from kvchat.errors import DoesNotFitError, ModelError, UsageError, resolve
from kvchat.kv import auto
from kvchat.kv.auto import Conversation, Machine, Setup
from kvchat.kv.geometry import GROWTH_HEADROOM
from kvchat.kv.memory import available
from kvchat.kv.modes.drafting import LENGTHS
from kvchat.models.description import describe, quiet
from kvchat.models.hub import Progress
from kvchat.models.weights import Place
from kvchat.protocol.messages import Load
from kvchat.units import size

CONTEXTS = (8192, 32_768, 131_072)
MODES = (FreezeParameters.name, SyncParameters.name, COMPARED, HOLDS_LEAST)
DTYPE = "bfloat16"
DRAFTED = ", draft=window"
# Reached share of a data sheet's rates: an H200 read 4,265 of 4,800 GB/s and copied 54.5 of 63.0 from pinned memory.
REACHED = 0.87
# Measured time divided by computed time on that H200: an 8B model in bfloat16 after 32,768 tokens, budget 2,080, of
# which a quarter was new at each step. Full mode that read from RAM staged nothing then, and took 1.09 times the sum of
# both reads.
MEASURED = {
    REFERENCE: 1.29,
    FreezeParameters.name: 1.68,
    SyncParameters.name: 1.37,
    COMPARED: 1.60,
    HOLDS_LEAST: 1.31,
}
# Share of drafts from a window that full also samples: SmolLM2 over 105 tokens of a book after 3,000, reading 512:
# 0.857 greedy and 0.866 at temperature 0.8; measured once.
ACCEPTED = 0.86
ROW = 0.02  # added cost of one more row in a forward pass, as a share of reading the weights; assumed, not measured
HOST_FREE = 2**50  # bytes, more than any model needs
ON_LINK = ", cpu=0"


class Card(NamedTuple):
    """A data sheet: memory in GiB, memory and PCIe bandwidth in GB/s, compute capability.

    ``ram`` is the assumed bandwidth of RAM in GB/s, which the CPU and PCIe share: two channels of DDR4-3200, DDR5-4800
    or DDR5-5600, or eight of DDR5-4800. The CPU is assumed to read all that PCIe leaves: one core of an AMD EPYC
    attends to 10.4 GB/s of an 8B model's K/V (measured once, by processor time).
    """

    memory: float
    read: float
    link: float
    capability: tuple[int, int]
    ram: float


CARDS = {
    "RTX 3060": Card(12, 360, 31.5, (8, 6), 51.2),
    "RTX 4060 laptop": Card(8, 256, 15.8, (8, 9), 76.8),
    "RTX 4090": Card(24, 1008, 31.5, (8, 9), 89.6),
    "H100": Card(80, 3350, 63.0, (9, 0), 307.2),
}


@dataclass(frozen=True)
class CardCosts:
    """Milliseconds per token, by setup and stored tokens, or None if it does not fit; ``weights`` are in bytes.

    ``floor_ms`` is the time to read the weights. ``measured`` are the setups' factors in ``MEASURED``.
    """

    card: str
    model: str
    dtype: str
    quantize: str
    weights: int
    floor_ms: float
    computed_ms: dict[str, dict[int, float | None]]
    measured: dict[str, float]


def card_costs(load: Load, name: str, contexts: Sequence[int], progress: Progress) -> list[CardCosts]:
    """Return the time per token in each mode on a card after each of ``contexts`` tokens, with enough RAM for them.

    There is one result for each quantization of the weights that leaves room for K/V, largest first.

    Raises:
        UsageError: the card, dtype or a parameter is unknown; ModelError: the model cannot be found or run, or has
            experts; DoesNotFitError: its weights leave no room.
    """
    name = resolve(name, CARDS, "card")
    if load.gpus > 1:
        raise UsageError("Times are computed for one card only.", "", "Omit --gpus.")
    card = CARDS[name]
    with quiet():
        described = describe(load.model, "cpu", DTYPE if load.dtype == "auto" else load.dtype, progress)
        seen = observe(described)
    seen = seen._replace(geometry=replace(seen.geometry, headroom=GROWTH_HEADROOM["cuda"], unified=False))
    place, dtype = Place("cuda", card.capability), described.dtype_name
    contexts = [tokens for tokens in contexts if tokens <= seen.traits.context] or [seen.traits.context]
    found = []
    for quantize, weights in described.weights.by_quantization(dtype, place).items():
        read = described.weights.read_bytes(quantize, dtype, place)
        if read is None:
            raise ModelError(
                f"{load.model} is a mixture of experts.",
                "Its time depends on the experts that each token reads, so it cannot be computed.",
                "Use a model without experts.",
            )
        free = available.usable(int(card.memory * 2**30)) - weights - described.activations(CHUNK)
        to_device = REACHED * card.link * 1e9
        cpu = max(0.0, REACHED * card.ram * 1e9 - to_device)
        machine = Machine(REACHED * card.read * 1e9, to_device, read, free, HOST_FREE, cpu=cpu)
        computed = computed_ms(load, machine, seen, contexts)
        if any(ms is not None for mode in MODES for ms in computed[mode].values()):
            floor = 1000 * read / machine.read
            found.append(CardCosts(name, load.model, dtype, quantize, weights, floor, computed, MEASURED))
    if not found:
        raise DoesNotFitError(
            f"The weights of {load.model} leave no room for K/V.",
            f"The {name} has {size(card.memory * 2**30)}.",
            "Use a smaller model.",
        )
    return sorted(found, key=lambda costs: -costs.weights)


def computed_ms(
    load: Load, machine: Machine, seen: Observed, contexts: Sequence[int]
) -> dict[str, dict[int, float | None]]:
    """Return ``CardCosts.computed_ms`` for a ``machine``."""
    rows: dict[str, dict[int, float | None]] = {}
    for tokens in contexts:
        for setup in _setups(load, machine, seen, tokens):
            name = f"{setup.parameters.name}{setup.suffix}"
            rows.setdefault(name, {})[tokens] = None if setup.lacks else 1000 * setup.seconds
            if setup.saved_seconds:
                alone = setup.seconds + setup.saved_seconds
                rows.setdefault(f"{name}{ON_LINK}", {})[tokens] = None if setup.lacks else 1000 * alone
            if setup.over_link:
                drafted = seconds_with_drafts(setup, machine.weights / machine.read)
                rows.setdefault(f"{name}{DRAFTED}", {})[tokens] = None if setup.lacks else 1000 * drafted
    return rows


def seconds_with_drafts(setup: Setup, weights_s: float, accepted: float = ACCEPTED) -> float:
    """Return the time per token with K/V in RAM and drafts that read only the device, in rounds of the best length.

    ``weights_s`` is the time to read the weights, ``accepted`` the probability that a draft is accepted if those before
    it were. A verification reads everything over PCIe and nothing on the CPU.
    """
    whole = setup.seconds + setup.saved_seconds
    draft = whole - setup.link_seconds + ROW * weights_s
    return min((whole + n * draft) * (1 - accepted) / (1 - accepted ** (n + 1)) for n in LENGTHS)


def _setups(load: Load, machine: Machine, seen: Observed, tokens: int) -> Iterator[Setup]:
    """Yield full mode in all setups, then the other modes with their budgets."""
    conversation, model = Conversation(tokens), (seen.geometry, seen.traits)

    def merged(mode: str, changes: modes.Params) -> modes.ModeParameters:
        return modes.effective_params(mode, load.mode_params, load.given, changes)

    for setup in auto.setups(machine, *model, conversation, merged):
        if setup.parameters.name == REFERENCE and (setup.over_link or not setup.quantizes):
            # 8-bit pages save nothing while everything fits on the device.
            yield setup
    for mode in MODES:
        yield auto.Costs(machine, *model, conversation).setup(merged(mode, {}), conversation.quantizes)
