"""What a mode is: the policy that decides which stored tokens attention reads and when they are fetched.

A mode owns nothing that must survive a switch: the host pool holds every token, and a new mode builds its slots from
it. The base class keeps the sinks and the window; a mode says what lies between. ``forward_begin``,
``attention_begin``, ``attention_end`` and ``forward_end`` may become part of a CUDA graph: tensors of fixed shape,
state changed in place, nothing read back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from kvchat.config.modes import BudgetParameters, ModeParameters
from kvchat.errors import UsageError
from kvchat.kv.attention import Weights
from kvchat.kv.attention_spec import AttentionSpec
from kvchat.kv.geometry import Geometry
from kvchat.kv.memory.device_slots import EMPTY, DeviceSlots, Layout
from kvchat.kv.modes.recovery_levels import Level
from kvchat.kv.modes.sync_heads import Calibration
from kvchat.kv.rope import Rotation

if TYPE_CHECKING:
    from kvchat.kv.manager import Store


@dataclass(frozen=True)
class ModelTraits:
    """What a mode may need to know of the model beside its geometry.

    ``rotations`` has one entry per layer, None where keys are not rotated; ``realign_refusal`` says why sinks cannot be
    re-aligned, None where they can; ``calibration`` is None until the model's heads were measured.
    """

    context: int
    rotations: tuple[Rotation | None, ...]
    realign_refusal: str | None = None
    calibration: Calibration | None = None


class Mode:
    """Base of all modes. ``preamble`` is the number of tokens of the system prompt.

    ``recoveries`` are the levels of recovery that change something in this mode; a mode that ``widens`` has WR and FR
    done by entering it with a larger budget for a while, any other by ``recover``.
    """

    name: ClassVar[str]
    recoveries: ClassVar[tuple[Level, ...]] = ("RR",)
    widens: ClassVar[bool] = False
    sink: int = 0
    window: int = 0

    def __init__(self, parameters: ModeParameters, geometry: Geometry, traits: ModelTraits, preamble: int = 0) -> None:
        self.parameters = parameters
        self.geometry = geometry
        self.traits = traits
        self.preamble = preamble

    def layouts(self, capacity: int) -> list[Layout]:
        """The slots wanted for a store of at most ``capacity`` tokens; together they cover every layer."""
        raise NotImplementedError

    def nbytes(self, capacity: int) -> int:
        """Device bytes of the slots and of what else the mode keeps there."""
        return sum(layout.nbytes(self.geometry) for layout in self.layouts(capacity))

    def moved_bytes(self, tokens: int) -> int:
        """Bytes that entering the mode copies to the device when ``tokens`` are stored, at most."""
        g = self.geometry
        slots = sum(
            (layout.last - layout.first) * layout.width(g) * min(tokens, layout.slots(g.page))
            for layout in self.layouts(g.grown(tokens))
        )
        return slots * 2 * g.row_bytes

    def attach(self, store: Store) -> None:
        """Take possession of freshly built, empty slots."""
        self.store = store

    def fill(self, num_reachable: int) -> None:
        """Bring to the device what the next token attends to; ``num_reachable`` tokens could be read before.

        Called after entering the mode, after a prefill, after growing and after truncating.
        """
        for slots in self.store.slots:
            # One less than the window: the next token takes the slot of the oldest.
            self.store.transfer.load_table(slots, self.wanted(slots, slots.layout.window - 1))

    def prefilled(self, layer: int, start: int, keys: Tensor) -> None:
        """A prefill brings the layer's tokens from ``start`` on; ``keys [H, n, d_k]`` of all tokens, on the device."""

    def wanted(self, slots: DeviceSlots, recent: int) -> Tensor:
        """The table that holds the sinks and the last ``recent`` tokens before the next one."""
        total, sink = self.store.total, slots.layout.sink
        table = torch.full_like(slots.table, EMPTY)
        first = min(total, max(sink, total - recent))
        for low, high in ((0, min(sink, total)), (first, total)):
            positions = torch.arange(low, high, device=table.device)
            table[..., slots.slot_of(positions)] = positions.to(torch.int32)
        return table

    def advance(self) -> None:
        """A step begins: room for its token in what the mode keeps, and counters on the host. Not part of a graph."""

    def forward_begin(self, position: Tensor) -> None:
        """Before the first layer: the new token gets its slots."""
        for slots in self.store.slots:
            slots.assign(position)

    def attention_begin(self, layer: int, query: Tensor, key: Tensor, spec: AttentionSpec) -> None:
        """Before the layer's attention; ``query [H_q, d_k]`` and ``key [H, d_k]`` of the new token."""

    def needs_weights(self, layer: int) -> bool:
        """Does ``attention_end`` want the weights of the layer's attention?"""
        return False

    def attention_end(self, layer: int, query: Tensor, weights: list[Weights], spec: AttentionSpec) -> None:
        """After the layer's attention, with its weights over each of its slots."""

    def forward_end(self, position: Tensor) -> None:
        """After the last layer."""

    def wants_resize(self) -> bool:
        """Asked before each step: has the number of slots wanted changed, so that ``layouts`` is to be asked anew?"""
        return False

    def recover(self, level: Level) -> None:
        """Between two steps: read more again, because the text may have gone wrong; ``level`` is SR, WR or FR."""

    def num_reachable(self) -> int:
        """Stored tokens that the next one may read or have recalled."""
        return self.store.total

    @property
    def device_bytes(self) -> int:
        """Device bytes the mode itself keeps, beside the slots."""
        return 0

    def effective_params(self) -> dict[str, Any]:
        """The parameters with what was chosen for ``auto``."""
        return self.parameters.model_dump()

    def buffers(self) -> list[Tensor]:
        """What the mode's part of a step reads or changes and keeps from step to step, beside the slots."""
        return []

    def is_exact(self, tokens: int) -> bool:
        """Does a token decoded as number ``tokens`` of the store read everything before it?"""
        return True

    @property
    def limited_by_context(self) -> bool:
        """Are positions limited by the model's context? A mode that re-aligns sinks goes on beyond it."""
        return True

    def phase(self) -> tuple[int, ...]:
        """Which of its kinds of step the one at hand is; steps of a kind run the same operations on the same shapes."""
        return ()

    @property
    def needs_calibration(self) -> bool:
        """Does it wait for the model's heads to be measured? Until then it may hold and read everything."""
        return False

    def reach(self) -> str:
        """A token off the device is ``H`` (on the host, may return by itself) or ``X`` (out of reach)."""
        return "H"

    def letter(self, share: float) -> str:
        """What the ribbon shows for tokens of which a ``share`` was read and which are neither sinks nor recent."""
        return "D" if share > 0 else self.reach()

    def stats(self) -> dict[str, Any]:
        """Numbers only this mode has, for the screen."""
        return {}


def budget_of(parameters: BudgetParameters, context: int) -> int:
    """The budget in tokens: as given, else a 32nd of the context between 256 and 2,048."""
    if parameters.budget is not None:
        return parameters.budget
    return min(2048, max(256, context // 32))


def refuse_small_budget(name: str, budget: int, sink: int, window: int, more: str = "") -> None:
    """Refuse a budget that cannot hold sinks and window.

    Raises:
        UsageError: with the numbers.
    """
    if sink + window > budget:
        raise UsageError(
            f"The {name} budget is too small.",
            f"budget = {budget} tokens is smaller than sink + window = {sink} + {window} = {sink + window}{more}.",
            f"Give a budget of at least {sink + window}, or less sink or window.",
        )
