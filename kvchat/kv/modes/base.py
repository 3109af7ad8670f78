"""The base of all modes: a mode decides which stored tokens attention reads, and fetches them.

A mode owns no state that must survive a switch: the host pool has every token, and a new mode fills its slots from it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from kvchat.config.modes import BudgetParameters, ModeParameters, registered
from kvchat.errors import UsageError
from kvchat.kv.attention import AttentionSpec, Weights
from kvchat.kv.geometry import Geometry
from kvchat.kv.memory.device_slots import EMPTY, DeviceSlots, Layout
from kvchat.kv.modes.drafting import Drafter
from kvchat.kv.modes.sync_heads import Calibration, TokenChoice
from kvchat.kv.rope import Rotation
from kvchat.kv.state import KVState

AUTO_BUDGET = {"context_share": 32, "least": 256, "most": 2048}  # the default budget in tokens
Level = Literal["SR", "WR", "FR", "RR"]  # levels of entropy-guided recovery (ASR-KF-EGR, section 3.6)
LEVELS: tuple[Level, ...] = ("SR", "WR", "FR", "RR")
WIDER: dict[Level, int] = {"WR": 2, "FR": 4}  # factor on the budget for RECENT tokens, in modes with a budget
RECENT = 64  # WR restores tokens frozen in the last 64 steps; FR freezes nothing for 64 steps


@dataclass(frozen=True)
class ModelTraits:
    """Properties of the model that modes use, besides its geometry.

    ``rotations`` has one entry per layer, None if its keys are not rotated. ``realign_refusal`` says why sinks cannot
    be realigned; None if they can. ``calibration`` is None until the model's heads are measured, and ``choice`` until
    the number of tokens that its attention needs is measured.
    """

    context: int
    rotations: tuple[Rotation | None, ...]
    realign_refusal: str | None = None
    calibration: Calibration | None = None
    choice: TokenChoice | None = None


class ContextPolicy:
    """What happens at the end of the model's context. By default the conversation ends there.

    A policy that is not ``is_final`` continues: it moves positions, and limits what a prompt reads.
    """

    is_final: ClassVar[bool] = True

    def base_of(self, position: int) -> int:
        """Return the offset subtracted from a position before its query and key are rotated; 0 within the context."""
        return 0

    def model_position(self, position: Tensor) -> Tensor:
        """Return the position (0-d int64) that the model uses for a step's token: ``position`` minus its base."""
        return position

    def unbased(self, layer: int, keys: Tensor) -> Tensor:
        """Return the layer's stored ``keys [H, n, d_k]`` of the first n tokens, moved back to their own positions."""
        return keys

    def prompt_tokens(self, total: int) -> int:
        """Return how many prompt tokens one forward may take at most after ``total`` stored ones."""
        return sys.maxsize

    def limits_prompt(self, tokens: int) -> bool:
        """Return whether a prompt's forward that ends with token number ``tokens`` reads only part of the tokens."""
        return False

    def begin_prompt(self, tokens: int) -> int:
        """Begin a prompt's forward up to token number ``tokens``; return the first token after the sinks that it reads.

        If the forward is limited, the slots were already filled for its first token.
        """
        return 0

    def limited(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values that a limited forward reads in a layer, ``[H, n, d]`` each, new tokens last.

        ``keys`` and ``values`` are the layer's, from the token that ``begin_prompt`` returned.
        """
        return keys, values


@dataclass(frozen=True)
class Plan:
    """The device memory that a mode needs for a given capacity.

    ``layouts`` describes its slots, which together cover every layer; ``state_bytes`` is the size of its other state.
    """

    layouts: Sequence[Layout]
    state_bytes: int = 0

    def device_bytes(self, geometry: Geometry) -> int:
        return sum(layout.nbytes(geometry) for layout in self.layouts) + self.state_bytes

    def moved_bytes(self, geometry: Geometry, tokens: int) -> int:
        """Return the most bytes that filling the slots copies to the device if ``tokens`` are stored."""
        copied = (layout for layout in self.layouts if not layout.in_place)
        return sum(layout.kv_bytes(geometry, min(tokens, layout.slots(geometry.page))) for layout in copied)


class TokenState(Enum):
    """Where a stored token is, as seen from the next step."""

    SINK = "sink"
    WINDOW = "window"
    RESIDENT = "on the device"
    RECALLED = "recalled just now"
    ON_HOST = "in RAM"
    FROZEN = "frozen"
    UNREACHABLE = "out of reach"
    PINNED = "pinned"


@dataclass(frozen=True)
class ModeReport:
    """A mode's parameters, metrics and warnings for the user interface.

    Attributes:
        params: the current parameters, with the values chosen for ``auto``.
        stats: metrics that only this mode has, in order.
        absent: the state of tokens that are not on the device. A token outside sinks and window counts as on the device
            if at least ``resident_share`` of all (layer, KV head) pairs read it.
        on_host: number of tokens, from the first on, that are read but only in RAM.
        correctable: number of heads that a step can correct.
        cosine: mean cosine of their queries to the last token's, summed over the steps since the mode was entered.
        badges: current warnings, each with its reason after a colon.
    """

    params: dict[str, Any]
    stats: dict[str, Any] = field(default_factory=dict)
    absent: TokenState = TokenState.ON_HOST
    resident_share: float = 1e-9
    on_host: int = 0
    correctable: int = 0
    cosine: float = 0.0
    badges: tuple[str, ...] = ()


@dataclass(frozen=True)
class Step:
    """The next step. Steps of the same ``kind`` run the same operations on the same shapes.

    An ``exact`` step reads all earlier tokens.
    """

    kind: tuple[int, ...] = ()
    exact: bool = True


class Mode:
    """Base of all modes: keeps the sinks and the window; a subclass decides what is read between them.

    ===================  =============================================  ==========================================
    when                 member                                         duty
    ===================  =============================================  ==========================================
    before entering      ``pin(positions)``                             note the tokens that are always read
    ... then             ``plan(capacity)``                             declare slots and bytes
    ... and on growing   ``limit(capacity, free, held)``                plan for less memory if it does not fit
    on entering          ``attach(state)``                              allocate state besides the slots
    in a prefill         ``prefilled(layer, start, keys, values)``      process a layer's new tokens
    ... beyond context   ``context_policy``                             continue beyond the model's context, or not
    after a prefill      ``fill(fresh)``                                copy to the slots what the next token reads
    before a step        ``prepare_step()``                             grow; return the kind of the step
    in a step            ``forward_begin(position)``                    assign slots to the new token
    ... one layer ahead  ``estimated(layer, query)``                    choose with an estimate of the layer's query
    ... in each layer    ``attention_begin(layer, query, key)``         correct; say if weights are needed
    ... in each layer    ``attention_end(layer, query, weights, spec)`` score, select, recall
    in a step            ``forward_end(position)``                      finish the step
    on an alarm          ``recover(level)``                             read more for a while
    for the interface    ``report()``                                   parameters, metrics, token states, warnings
    for CUDA graphs      ``graph_buffers()``                            return the state besides the slots
    ===================  =============================================  ==========================================

    Everything from ``forward_begin`` to ``forward_end`` may become part of a CUDA graph: use tensors of fixed shape,
    change state in place (``graph_buffers``), and read nothing back.

    Attributes:
        recovery_levels: levels of recovery that have an effect in this mode.
        widens: WR and FR re-enter the mode with a larger budget instead of calling ``recover``.
        chooses_by_head: each KV head chooses independently, so the heads can be split over processes.
        sink, window: number of first and most recent tokens that are always read.
        needs_calibration: the model's heads must be measured first; until then the mode may hold and read everything.
        choice: measured values for parameters that were not given.
        wants_choice: no parameter was given, so the number of tokens that attention needs may be measured.
        system_tokens: number of tokens of the system prompt.
        pinned: how many of these are always read: all or none.
        extra_sinks: pinned tokens that are sinks beyond the budget.
        context_policy: what happens at the end of the model's context; in most modes the conversation ends.
        pins: ascending positions of pinned messages' tokens that need slots, without sinks.
        drafter: proposes tokens that one exact forward verifies; only in a mode that reads everything.
    """

    recovery_levels: ClassVar[tuple[Level, ...]] = ("RR",)
    widens: ClassVar[bool] = False
    chooses_by_head: ClassVar[bool] = False
    sink: int = 0
    window: int = 0
    needs_calibration: bool = False
    choice: TokenChoice | None = None
    wants_choice: bool = False
    extra_sinks: int = 0
    context_policy: ContextPolicy = ContextPolicy()
    pins: tuple[int, ...] = ()
    drafter: Drafter | None = None

    def __init__(
        self, parameters: ModeParameters, geometry: Geometry, traits: ModelTraits, system_tokens: int = 0
    ) -> None:
        self.parameters = parameters
        self.geometry = geometry
        self.traits = traits
        self.system_tokens = system_tokens
        self.pinned = system_tokens if parameters.pin_system else 0
        self._set_up()

    def _set_up(self) -> None:
        """Derive the mode's constants from ``parameters``, ``geometry`` and ``traits``.

        Raises:
            UsageError: parameters contradict each other; DoesNotFitError: the model cannot run in this mode.
        """

    @property
    def name(self) -> str:
        return self.parameters.name

    @property
    def slots(self) -> DeviceSlots:
        """The slots of all layers, or of the layers that choose."""
        return self.state.slots[-1]

    @property
    def wants_ahead(self) -> bool:
        """True if layers should call ``estimated``."""
        return False

    def _pin_to_sinks(self) -> None:
        """Make the pinned tokens sinks beyond the budget; call this once ``sink`` is set."""
        self.extra_sinks = max(0, self.pinned - self.sink)
        self.sink += self.extra_sinks

    def pin(self, positions: Sequence[int]) -> None:
        """Plan to read the stored tokens at ``positions`` (ascending) in every step, beyond the budget.

        Slots allocated for other ``pins`` are allocated again. A mode that reads everything needs none.
        """
        self.pins = tuple(position for position in positions if position >= self.sink)

    def _is_pinned(self, positions: Tensor) -> Tensor:
        """Return which ``positions`` (or EMPTY, in any shape) are in ``pins``, without reading anything back."""
        return self.pin_mask[positions.clamp(max=len(self.pin_mask) - 1).long()]

    def plan(self, capacity: int) -> Plan:
        """Return the slots and bytes for at most ``capacity`` stored tokens."""
        raise NotImplementedError

    def limit(self, capacity: int, free: int, held: int = 0) -> None:
        """Plan for at most ``free`` bytes, if the mode can; existing slots must keep their room for ``held`` tokens."""

    def attach(self, state: KVState) -> None:
        """Take over newly allocated, empty slots."""
        self.state = state
        # One extra entry, False, for EMPTY and all later positions.
        self.pin_mask = torch.zeros(self.pins[-1] + 2 if self.pins else 1, dtype=torch.bool, device=state.device)
        self.pin_mask[torch.tensor(self.pins, dtype=torch.int64, device=state.device)] = True

    def fill(self, fresh: bool) -> None:
        """Copy the tokens that the next token reads to the slots.

        Called after entering the mode, after a prefill, after a truncation, and after an interrupted step, which this
        undoes. If ``fresh``, all stored tokens may be read again, even those that the mode had dropped for good.
        """
        for slots in filter(lambda slots: slots.n and not slots.layout.listed, self.state.slots):
            # One less than the window, because the next token takes the slot of the oldest.
            self.state.transfer.load_table(slots, self._wanted_table(slots, slots.layout.window - 1))

    def prefilled(self, layer: int, start: int, keys: Tensor, values: Tensor) -> None:
        """Process a layer's new tokens, from position ``start`` on.

        ``keys`` and ``values [H, n, d]``, on the device, are those of all tokens. If ``context_policy`` limits the
        prompt, they begin with the token that ``begin_prompt`` returned.
        """

    def prepare_step(self) -> Step:
        """Make room for a step's token in the mode's state, outside the graph; avoid waiting for the device."""
        return Step()

    def guess(self, begins: bool) -> None:
        """Read less from the next step on, because its token is only a guess; if not ``begins``, return to normal."""

    @property
    def drafts_failed(self) -> bool:
        """True if drafts are off until the mode is re-entered."""
        return bool(self.drafter and self.drafter.failed)

    def graph_buffers(self) -> list[Tensor]:
        """Return the mode's tensors on the device that persist between steps, without the slots."""
        return [self.pin_mask] if self.pins else []

    def forward_begin(self, position: Tensor) -> None:
        """Assign slots to the new token at ``position`` (0-d int64)."""
        for slots in self.state.slots:
            self.state.ops.assign(slots, position)

    def estimated(self, layer: int, query: Tensor) -> None:
        """Act before layer - 1 runs, given the estimated ``query [H_q, d_k]`` of this layer."""

    def attention_begin(self, layer: int, query: Tensor, key: Tensor) -> bool:
        """Act before the layer's attention, given the new token's ``query [H_q, d_k]`` and ``key [H, d_k]``.

        Returns:
            True if ``attention_end`` needs the weights.
        """
        return False

    def attention_end(self, layer: int, query: Tensor, weights: list[Weights], spec: AttentionSpec) -> None:
        """Act after the layer's attention, given its weights over each of its slots if they were requested."""

    def forward_end(self, position: Tensor) -> None:
        """Act after the last layer."""

    def recover(self, level: Level) -> None:
        """Between two steps, read more for a while, because the text may have gone wrong; ``level``: SR, WR or FR."""

    def report(self) -> ModeReport:
        """Return current parameters, metrics, token states and warnings; may wait for the device."""
        return ModeReport(self.parameters.model_dump())

    def _wanted_table(self, slots: DeviceSlots, recent: int) -> Tensor:
        """Return the table with sinks, pinned messages and the last ``recent`` tokens before the next one."""
        total, sink = self.state.total, slots.layout.sink
        table = torch.full_like(slots.table, EMPTY)
        first = min(total, max(sink, total - recent))
        for low, high in ((0, min(sink, total)), (first, total)):
            positions = torch.arange(low, high, device=table.device)
            table[..., slots.slot_of(positions)] = positions.to(torch.int32)
        if slots.layout.pinned:
            recents = table[..., slots.ring :]
            recents.masked_fill_(self._is_pinned(recents), EMPTY)
            table[..., slots.ring - len(self.pins) : slots.ring] = torch.tensor(self.pins, device=table.device)
        return table

    def _open_pages(self, slots: DeviceSlots, layers: slice, last: Tensor) -> None:
        """Let attention read the page slots up to token ``last``, without sinks and pins, which have other slots.

        ``layers`` are counted from the first layer of ``slots``.
        """
        self.state.ops.open_pages(slots, layers, self.sink, last)
        if self.pins:
            opened = slots.table[layers, :, : slots.offset]
            opened.masked_fill_(self._is_pinned(opened), EMPTY)


def everything(geometry: Geometry, layers: int, capacity: int, in_slots: bool = False) -> Layout:
    """Return the layout with all tokens of the first ``layers``; in unified memory, without slots.

    With ``in_slots``, a mode that will soon need other slots in unified memory reserves memory for them at once.
    """
    in_place = geometry.unified and not in_slots
    return Layout(0, layers, sink=0, window=0 if in_place else capacity, spills=in_place)


def budget_of(parameters: BudgetParameters, context: int) -> int:
    """Return the budget in tokens: as given, otherwise a 32nd of the context, from 256 to 2,048."""
    if parameters.budget is not None:
        return parameters.budget
    return min(AUTO_BUDGET["most"], max(AUTO_BUDGET["least"], context // AUTO_BUDGET["context_share"]))


def refuse_small_budget(name: str, budget: int, sink: int, window: int, more: str = "") -> None:
    """Refuse a budget that cannot hold sinks and window."""
    if sink + window > budget:
        given = " or ".join(part for part in ("sink", "window") if part in registered()[name].model_fields)
        raise UsageError(
            f"The {name} budget is too small.",
            f"budget = {budget} tokens is smaller than sink + window = {sink} + {window} = {sink + window}{more}.",
            f"Use a budget of at least {sink + window}{given and f', or a smaller {given}'}.",
        )
