"""Freeze timers: how often each token was found irrelevant, and how long it stays frozen (ASR-KF-EGR, Eq. 3).

Everything is a tensor by position or by slot, of fixed shape within a step, and nothing is read back. On a CPU one pass
that numba compiles takes the place of many operations. ``Scores`` gathers how relevant each token is (Eq. 2).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from kvchat.config.modes import FreezeParameters
from kvchat.kv.attention import AttentionSpec, Weights
from kvchat.kv.geometry import GROWTH_HEADROOM, grown
from kvchat.kv.memory.device_slots import EMPTY
from kvchat.kv.ops import cpu_ops

# Least score of a token that the budget keeps frozen: its urgency must grow even if it scored 0.
MIN_RETURN_SCORE = 0.01
HOT_SCORE = 1e9  # above all others, until the token is scored
RETRIEVED = 32  # times tau: the mean score of a token that one head retrieves and the others ignore
FOREVER = 2**30  # steps
FOLLOWING = 16  # tokens kept from each retrieved one on


@dataclass(frozen=True)
class Rule:
    """The constants of a profile.

    ``sink`` first tokens and, if ``protects``, the chat's control tokens are never frozen; the least relevant freeze
    only while more than ``floor`` are read; the first freezes are spread over ``stagger`` steps; with ``same_step`` a
    timer falls in the step that sets it; ``recalls`` lets a query wake pages and what follows a retrieved token, and
    halves the flags of what is relevant.
    """

    sink: int
    floor: int
    stagger: int
    protects: bool
    same_step: bool
    recalls: bool


RULES = {
    "default": Rule(sink=4, floor=400, stagger=64, protects=True, same_step=False, recalls=True),
    "paper": Rule(sink=0, floor=0, stagger=1, protects=False, same_step=True, recalls=False),
}


def rule_of(parameters: FreezeParameters) -> Rule:
    """The constants of the profile, with the floor that is given."""
    rule = RULES[parameters.profile]
    return rule if parameters.floor is None else replace(rule, floor=parameters.floor)


def state_bytes(capacity: int) -> int:
    """Bytes of the state of ``capacity`` tokens: three int32, a float32 and a bool each, twice, an int64; counters."""
    return 42 * (capacity + 1) + 16


class Timers:
    """State of the tokens by position: tensors ``[capacity + 1]``; the last entry is a dummy.

    ``detections`` begins at minus the token's offset, which staggers the first freezes; ``timer`` is the number of
    steps to stay away, 0 or less where the budget keeps a token away; ``since`` the position at which it left;
    ``score`` its last one; ``index`` its position. ``hold`` (0-d) is the number of steps in which nothing may freeze.
    """

    detections: Tensor
    timer: Tensor
    since: Tensor
    score: Tensor
    frozen: Tensor

    def __init__(
        self,
        parameters: FreezeParameters,
        device: torch.device,
        headroom: int = GROWTH_HEADROOM["cpu"],
        rule: Rule | None = None,
    ) -> None:
        self.parameters = parameters
        self.rule = rule or rule_of(parameters)
        self.budget = parameters.budget
        self.retrieved_above = RETRIEVED * parameters.tau
        self._pin_mask: Tensor | None = None
        self.device = device
        self.headroom = headroom
        self.hold = torch.zeros((), dtype=torch.int32, device=device)
        self.capacity = 0
        self._saved_at = -1
        self._prompt_end, self._at_prompt_end = 0, list[Tensor]()
        self._allocate(grown(0, headroom))

    def buffers(self) -> list[Tensor]:
        return [*self.states(), *self._saved, self.index]

    def states(self) -> list[Tensor]:
        """The tensors that a step changes."""
        return [self.detections, self.timer, self.since, self.score, self.frozen, self.hold]

    def save(self, step: int) -> None:
        """Save the states before a step, which may fail after it changed some of them."""
        for kept, state in zip(self._saved, self.states(), strict=True):
            kept.copy_(state)
        self._saved_at = step

    def undo(self, step: int) -> None:
        """Undo what the step changed, if its states were saved."""
        if self._saved_at == step:
            for kept, state in zip(self._saved, self.states(), strict=True):
                state.copy_(kept)
        self._saved_at = -1

    def reserve(self, tokens: int) -> None:
        if tokens > self.capacity:
            self._allocate(grown(tokens, self.headroom))

    def truncate(self, tokens: int) -> None:
        """Forget the tokens from position ``tokens`` on; wake those in the window before it."""
        self.detections[tokens:] = self._first_counts(self.capacity + 1)[tokens:]
        self.frozen[max(0, tokens - self.parameters.K) :] = False
        self.score[tokens:] = 0
        if tokens < self._prompt_end - 1:
            self._prompt_end = 0

    def begin_answer(self, tokens: int, is_new: bool) -> None:
        """Save the states at the end of a prompt that ``is_new``: 17 bytes on the host for each of ``tokens``.

        If only its last token was read again, because its answer is regenerated, restore them instead.
        """
        states = [state.view(-1)[:tokens] for state in self.states()]
        if is_new:
            self._prompt_end, self._at_prompt_end = tokens, [state.to("cpu", copy=True) for state in states]
        elif 0 < tokens == self._prompt_end:
            for kept, state in zip(self._at_prompt_end, states, strict=True):
                state.copy_(kept)

    def pin(self, tokens: Tensor | None, budget: int | None) -> None:
        """Never freeze the tokens of a mask, whose last entry, False, stands for all later ones; set the ``budget``."""
        self._pin_mask, self.budget = tokens, budget

    def num_awake(self, total: int) -> int:
        """Number of the ``total`` tokens that the next one reads; waits for the device."""
        return total - int(self.frozen[:total].sum())

    def observe(self, position: Tensor, table: Tensor, score: Tensor, control: Tensor, hot: Tensor | None) -> None:
        """Update ``frozen`` for the next step: the tokens in ``table [n]`` scored ``score [n]`` in this one.

        ``position`` (0-d) is that of the newest token, ``hot [capacity + 1]`` the tokens of its hot pages.
        """
        counts, away, retrieved = self._flag(position, table, score, control)
        if self.rule.floor:
            away = torch.where(self._above_floor(away > 0, score, (table != EMPTY).sum()), away, 0)
        self.hold.sub_(1).clamp_(min=0)
        waiting = self._store_step(position, table, score, counts, away)
        if hot is not None:
            self.thaw_hot(self._with_followers(table, retrieved, position, hot))
        if self.budget is not None:
            self.limit(position + 1, control, waiting)

    def list_awake(self, total: int, table: Tensor) -> int:
        """Fill ``table [n]`` with those of ``total`` tokens that are not frozen, in order; return how many are new.

        Waits for the device.
        """
        tokens = (~self.frozen[:total]).nonzero().flatten()
        new = len(tokens) - int((table != EMPTY).sum())
        table.fill_(EMPTY)
        table[: len(tokens)] = tokens.to(torch.int32)
        return new

    def num_awake_in_slots(self, table: Tensor, held: Tensor) -> int:
        """Number of tokens that are not frozen and have K/V in the slots; waits for the device."""
        there = torch.where(table == EMPTY, held, table)
        return int(((there != EMPTY) & ~self.frozen[there.long()]).sum())

    def reopen(self, table: Tensor, held: Tensor) -> Tensor:
        """Open in ``table [n]`` the slots of ``held [n]`` whose tokens are not frozen any more; return how many."""
        reopened = (table == EMPTY) & (held != EMPTY) & ~self.frozen[held.long()]
        table.copy_(torch.where(reopened, held, table))
        return reopened.sum()

    def missing(self, position: Tensor, table: Tensor, most: int) -> tuple[Tensor, Tensor]:
        """Up to ``most`` tokens before ``position`` that are neither frozen nor in ``table [n]``, most relevant first.

        Returns:
            Positions, int64 ``[m]``, and a mask ``[m]`` of those that are valid.
        """
        missing = ~self.frozen & (self.index < position)
        missing = missing.index_fill(0, self._index(table), False)
        score, positions = torch.where(missing, self.score, -1.0).topk(min(most, len(table), len(missing)))
        return positions, score >= 0

    def slots_to_reuse(self, table: Tensor, held: Tensor, number: int) -> Tensor:
        """``number`` empty slots of ``table [n]``, int64, first those whose tokens stay frozen longest."""
        away = torch.where(held == EMPTY, FOREVER, self.timer[held.long()].clamp(min=0))
        return away.masked_fill(table != EMPTY, -1).topk(number).indices

    def note_held(self, table: Tensor, held: Tensor, keeps: bool) -> None:
        """Note in ``held [n]`` that slots still have the tokens of ``table [n]`` once these freeze, if it ``keeps``."""
        held.copy_(torch.where(table == EMPTY, held, table) if keeps else torch.full_like(held, EMPTY))

    def drop_frozen(self, table: Tensor) -> None:
        """Remove frozen tokens from ``table [n]``."""
        table.masked_fill_((table != EMPTY) & self.frozen[table.long()], EMPTY)

    def _flag(self, position: Tensor, table: Tensor, score: Tensor, control: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """For each token in ``table [n]``: its flags, the steps to stay frozen (0: none), whether it is retrieved."""
        p, index = self.parameters, self._index(table)
        may = (table != EMPTY) & self._may_freeze(index, position + 1, control)
        low = may & (score < p.tau)
        before = self.detections[index]
        counts = before + low.to(torch.int32)
        if self.rule.recalls:  # half of them for a token that is relevant again
            counts = torch.where((score > p.tau) & (before > 0), before // 2, counts)
        away = (counts.clamp(min=0).double().sqrt() / p.k).floor().to(torch.int32)  # Eq. 3: floor(sqrt(c) / k) steps
        # With same_step a timer of 1 runs out in the step that sets it: the token does not leave at all.
        away = (away - int(self.rule.same_step)).clamp(min=0)
        return counts, torch.where(low & (self.hold == 0), away, 0), may & (score > self.retrieved_above)

    def _store_step(self, position: Tensor, table: Tensor, score: Tensor, counts: Tensor, away: Tensor) -> Tensor:
        """Store a step's results for the tokens in ``table [n]``; return which timers ran out, ``[capacity + 1]``."""
        index, leaves = self._index(table), away > 0
        self.timer -= 1
        for state, value in ((self.timer, away), (self.since, position.to(torch.int32))):
            state[index] = torch.where(leaves, value, state[index])
        self.detections[index], self.score[index], self.frozen[index] = counts, score, leaves
        waiting = self.frozen & (self.timer <= 0)
        self.frozen &= ~waiting
        return waiting

    def _index(self, table: Tensor) -> Tensor:
        """The index into the state for each slot of ``table [n]``; empty slots get the dummy entry."""
        return torch.where(table != EMPTY, table, self.capacity).long()

    def thaw_hot(self, tokens: Tensor) -> None:
        """Unfreeze the tokens of a mask ``[capacity + 1]`` and reset their flags."""
        self.frozen &= ~tokens
        self.detections.masked_fill_(tokens, 0)
        self.score.masked_fill_(tokens, HOT_SCORE)

    def _with_followers(self, table: Tensor, retrieved: Tensor, position: Tensor, hot: Tensor) -> Tensor:
        """The mask ``hot`` plus the ``FOLLOWING`` tokens from each ``retrieved [n]`` token on, up to ``position``."""
        before = torch.zeros_like(self.index).index_put_((self._index(table),), retrieved.long()).cumsum(0)
        near = before > torch.nn.functional.pad(before[:-FOLLOWING], (FOLLOWING, 0))
        return hot | (near & (self.index <= position))

    def limit(self, total: Tensor, control: Tensor, waiting: Tensor) -> None:
        """Freeze the least relevant tokens until the next token reads ``budget`` tokens, itself included.

        ``total`` (0-d) tokens are stored. Tokens ``waiting [capacity + 1]``, whose timer ran out, grow more urgent.
        """
        assert self.budget is not None
        awake = ~self.frozen & (self.index < total)
        may = awake & self._may_freeze(self.index, total, control)
        over = awake.sum() - (self.budget - 1)
        urgent = torch.where(waiting, self.score.clamp(min=MIN_RETURN_SCORE) * (1 - self.timer), self.score)
        order = torch.where(may, urgent, torch.inf).argsort(stable=True)
        rank = torch.empty_like(order).scatter_(0, order, self.index)
        out = may & (rank < over)
        self.frozen |= out
        self.timer.masked_fill_(out & ~waiting, 1)

    def wake(self, tokens: Tensor) -> None:
        """Read the tokens of a mask ``[total]`` again."""
        self.frozen[: len(tokens)] &= ~tokens

    def _above_floor(self, leaves: Tensor, score: Tensor, awake: Tensor) -> Tensor:
        """Of ``leaves [n]`` the least relevant, so many that ``floor`` of the ``awake`` (0-d) tokens are still read."""
        order = torch.where(leaves, score, torch.inf).argsort(stable=True)
        rank = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        return leaves & (rank < awake - self.rule.floor)

    def _may_freeze(self, index: Tensor, total: Tensor, control: Tensor) -> Tensor:
        """Which tokens at positions ``index`` may freeze: no sinks, none in the window, none pinned or protected."""
        may = (index >= self.rule.sink) & (index < total - self.parameters.K)
        if self._pin_mask is not None:
            may &= ~self._pin_mask[index.clamp(max=len(self._pin_mask) - 1)]
        return may & ~control[index.clamp(max=len(control) - 1)] if self.rule.protects else may

    def _first_counts(self, entries: int) -> Tensor:
        return -(torch.arange(entries, dtype=torch.int32, device=self.device) % self.rule.stagger)

    def _allocate(self, capacity: int) -> None:
        fresh = {
            "detections": self._first_counts(capacity + 1),
            "timer": torch.zeros(capacity + 1, dtype=torch.int32, device=self.device),
            "since": torch.zeros(capacity + 1, dtype=torch.int32, device=self.device),
            "score": torch.zeros(capacity + 1, device=self.device),
            "frozen": torch.zeros(capacity + 1, dtype=torch.bool, device=self.device),
        }
        kept = [torch.empty_like(tensor) for tensor in (*fresh.values(), self.hold)]
        for name, tensor in fresh.items():
            if self.capacity:
                tensor[: self.capacity] = getattr(self, name)[: self.capacity]
            setattr(self, name, tensor)
        self._saved = kept
        self.index = torch.arange(capacity + 1, device=self.device)
        self.capacity = capacity


NONE = torch.zeros(1, dtype=torch.bool)  # of the tokens


class CpuTimers(Timers):
    """``Timers`` on a CPU, where reading back costs no wait; without numba the operations are torch's."""

    def _flag(self, position: Tensor, table: Tensor, score: Tensor, control: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if not (loops := freeze_loops()):
            return super()._flag(position, table, score, control)
        p, rule, end = self.parameters, self.rule, position + 1 - self.parameters.K
        counts, away, retrieved = torch.empty_like(table), torch.empty_like(table), torch.empty(len(table)).bool()
        masks = NONE if self._pin_mask is None else self._pin_mask, control if rule.protects else NONE
        limits = rule.sink, int(end), p.tau, self.retrieved_above, p.k
        how = rule.recalls, rule.same_step, bool(self.hold > 0)
        loops.flag(
            *_shared((table, score, self.detections, *masks)), *limits, *how, *_shared((counts, away, retrieved))
        )
        return counts, away, retrieved

    def _above_floor(self, leaves: Tensor, score: Tensor, awake: Tensor) -> Tensor:
        return leaves if leaves.sum() <= awake - self.rule.floor else super()._above_floor(leaves, score, awake)

    def _store_step(self, position: Tensor, table: Tensor, score: Tensor, counts: Tensor, away: Tensor) -> Tensor:
        if not (loops := freeze_loops()):
            return super()._store_step(position, table, score, counts, away)
        waiting = torch.empty_like(self.frozen)
        states = self.detections, self.timer, self.since, self.score, self.frozen, waiting
        loops.store_step(int(position), *_shared((table, score, counts, away, *states)))
        return waiting

    def thaw_hot(self, tokens: Tensor) -> None:
        if tokens.any():
            super().thaw_hot(tokens)

    def _with_followers(self, table: Tensor, retrieved: Tensor, position: Tensor, hot: Tensor) -> Tensor:
        if not (loops := freeze_loops()):
            return super()._with_followers(table, retrieved, position, hot)
        loops.mark_followers(*_shared((table, retrieved)), int(position), FOLLOWING, hot.numpy())
        return hot


def freeze_loops() -> ModuleType | None:
    """The compiled loops of this mode; None where there are none."""
    if loops := cpu_ops.compiled_loops(cpu_ops.FREEZE):
        cpu_ops.use_threads(torch.get_num_threads())
    return loops


def _shared(tensors: Iterable[Tensor]) -> list[Any]:
    return [tensor.numpy() for tensor in tensors]


class Scores:
    """Relevance of the tokens in ``table [n]`` (-1 empty) to the one being decoded, gathered layer by layer.

    ``kind`` is a parameter of the freeze mode; of ``prob_rel`` the first ``sink`` tokens have no share.
    """

    def __init__(self, kind: str, sink: int, table: Tensor) -> None:
        self.kind = kind
        self.table = table
        self.sum = torch.zeros(len(table), device=table.device)
        self.layers = 0
        self.windowed: Tensor | int = 0
        self._counted = (table >= sink).float()
        self._number = self._counted.sum()

    def add_shares(self, weights: Weights, spec: AttentionSpec, position: Tensor) -> None:
        seen = self._seen(spec, position)
        number = self._number if seen is None else (self._counted * seen).sum()
        weights.add_shares(self.sum, self._counted, number)

    def add_products(self, query: Tensor, keys: Tensor, spec: AttentionSpec, position: Tensor) -> None:
        """Count a layer by ``query [q_heads, d_k]`` and ``keys [H, n, d_k]``, but for a score that takes nothing."""
        if self.kind == "always":
            return
        seen = self._seen(spec, position)
        grouped = query.view(len(keys), -1, query.shape[-1])
        products = torch.bmm(grouped, keys.transpose(1, 2)).float().abs().mean((0, 1))
        self.sum += products if seen is None else products * seen

    def _seen(self, spec: AttentionSpec, position: Tensor) -> Tensor | None:
        """The tokens that the layer sees, which counts for them; float32 ``[n]``, None for all."""
        if spec.window is None:
            self.layers += 1
            return None
        seen = (self.table > position - spec.window).float()
        self.windowed = self.windowed + seen
        return seen

    def result(self) -> Tensor:
        """``[n]``, the mean over the layers; 0 for a token that no layer can see."""
        layers = self.layers + self.windowed
        return self.sum / (layers.clamp(min=1) if isinstance(layers, Tensor) else max(1, layers))
