"""Freeze timers: how often each token was found irrelevant, and how long it stays frozen (ASR-KF-EGR, Eq. 3).

All state is in tensors by position or by slot, of fixed shape within a step, and nothing is read back. On a CPU, one
pass compiled by numba replaces many operations. ``Scores`` accumulates each token's relevance (Eq. 2).
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

# Minimum score of a token that the budget keeps frozen, so that its urgency grows even if it scored 0.
MIN_RETURN_SCORE = 0.01
HOT_SCORE = 1e9  # above all others, until the token is scored again
RETRIEVED = 32  # multiple of tau: the mean score of a token that one head retrieves and the others ignore
FOREVER = 2**30  # steps
FOLLOWING = 16  # number of tokens kept from each retrieved one on


@dataclass(frozen=True)
class Rule:
    """The constants of a profile.

    The first ``sink`` tokens and, if ``protects``, the chat's control tokens never freeze. Others freeze only while
    more than ``floor`` are read, the least relevant first. First freezes are spread over ``stagger`` steps. With
    ``same_step``, a timer is decremented in the step that sets it. With ``recalls``, a query unfreezes pages and the
    tokens after a retrieved one, and the flags of relevant tokens are halved.
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
    """Return the constants of the profile, with ``floor`` if it is given."""
    rule = RULES[parameters.profile]
    return rule if parameters.floor is None else replace(rule, floor=parameters.floor)


def state_bytes(capacity: int) -> int:
    """Return the state's bytes: per token three int32, a float32 and a bool, all twice, and an int64; and counters."""
    return 42 * (capacity + 1) + 16


class Timers:
    """State of the tokens by position, in tensors ``[capacity + 1]``; the last entry is a dummy.

    ``detections`` counts flags, from a negative start that staggers the first freezes. ``timer`` is the number of steps
    that a token stays frozen, 0 or less if the budget keeps it frozen. ``since`` is the position at which it froze,
    ``score`` its last score, ``index`` its position. ``hold`` (0-d) is the number of steps in which nothing may freeze.
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
        """Save the states before a step, which may fail after changing some of them."""
        for kept, state in zip(self._saved, self.states(), strict=True):
            kept.copy_(state)
        self._saved_at = step

    def undo(self, step: int) -> None:
        """Restore the states saved before this step, if any."""
        if self._saved_at == step:
            for kept, state in zip(self._saved, self.states(), strict=True):
                state.copy_(kept)
        self._saved_at = -1

    def reserve(self, tokens: int) -> None:
        if tokens > self.capacity:
            self._allocate(grown(tokens, self.headroom))

    def truncate(self, tokens: int) -> None:
        """Forget the tokens from position ``tokens`` on; unfreeze those in the window before it."""
        self.detections[tokens:] = self._first_counts(self.capacity + 1)[tokens:]
        self.frozen[max(0, tokens - self.parameters.K) :] = False
        self.score[tokens:] = 0
        if tokens < self._prompt_end - 1:
            self._prompt_end = 0

    def begin_answer(self, tokens: int, is_new: bool) -> None:
        """Save the states at the end of a prompt that ``is_new``, 17 bytes on the host per token.

        If only the prompt's last token was read again, to regenerate its answer, restore these states instead.
        """
        states = [state.view(-1)[:tokens] for state in self.states()]
        if is_new:
            self._prompt_end, self._at_prompt_end = tokens, [state.to("cpu", copy=True) for state in states]
        elif 0 < tokens == self._prompt_end:
            for kept, state in zip(self._at_prompt_end, states, strict=True):
                state.copy_(kept)

    def pin(self, tokens: Tensor | None, budget: int | None) -> None:
        """Set the ``budget`` and a mask of tokens that never freeze; its last entry, False, is for all later tokens."""
        self._pin_mask, self.budget = tokens, budget

    def num_awake(self, total: int) -> int:
        """Return how many of the ``total`` tokens the next token reads; waits for the device."""
        return total - int(self.frozen[:total].sum())

    def observe(self, position: Tensor, table: Tensor, score: Tensor, control: Tensor, hot: Tensor | None) -> None:
        """Update ``frozen`` for the next step by the ``score [n]`` of the tokens in ``table [n]``.

        ``position`` (0-d) is the newest token's, ``hot [capacity + 1]`` marks the tokens of its hot pages.
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
        """Fill ``table [n]`` with the unfrozen of ``total`` tokens, in order; return how many are new.

        Waits for the device.
        """
        tokens = (~self.frozen[:total]).nonzero().flatten()
        new = len(tokens) - int((table != EMPTY).sum())
        table.fill_(EMPTY)
        table[: len(tokens)] = tokens.to(torch.int32)
        return new

    def num_awake_in_slots(self, table: Tensor, held: Tensor) -> int:
        """Return how many tokens in the slots are not frozen; waits for the device."""
        there = torch.where(table == EMPTY, held, table)
        return int(((there != EMPTY) & ~self.frozen[there.long()]).sum())

    def reopen(self, table: Tensor, held: Tensor) -> Tensor:
        """Put tokens of ``held [n]`` that are no longer frozen back into ``table [n]``; return how many."""
        reopened = (table == EMPTY) & (held != EMPTY) & ~self.frozen[held.long()]
        table.copy_(torch.where(reopened, held, table))
        return reopened.sum()

    def missing(self, position: Tensor, table: Tensor, most: int) -> tuple[Tensor, Tensor]:
        """Return up to ``most`` tokens before ``position`` that are not frozen and not in ``table [n]``.

        Returns:
            Positions, int64 ``[m]``, most relevant first, and a mask ``[m]`` of the valid ones.
        """
        missing = ~self.frozen & (self.index < position)
        missing = missing.index_fill(0, self._index(table), False)
        score, positions = torch.where(missing, self.score, -1.0).topk(min(most, len(table), len(missing)))
        return positions, score >= 0

    def slots_to_reuse(self, table: Tensor, held: Tensor, number: int) -> Tensor:
        """Return ``number`` empty slots of ``table [n]`` (int64), first those whose tokens stay frozen longest."""
        away = torch.where(held == EMPTY, FOREVER, self.timer[held.long()].clamp(min=0))
        return away.masked_fill(table != EMPTY, -1).topk(number).indices

    def note_held(self, table: Tensor, held: Tensor, keeps: bool) -> None:
        """If ``keeps``, note in ``held [n]`` that slots still have the tokens of ``table [n]`` after these freeze."""
        held.copy_(torch.where(table == EMPTY, held, table) if keeps else torch.full_like(held, EMPTY))

    def drop_frozen(self, table: Tensor) -> None:
        """Remove frozen tokens from ``table [n]``."""
        table.masked_fill_((table != EMPTY) & self.frozen[table.long()], EMPTY)

    def _flag(self, position: Tensor, table: Tensor, score: Tensor, control: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return for each token in ``table [n]`` its flags, the steps to stay frozen (or 0), and if it is retrieved."""
        p, index = self.parameters, self._index(table)
        may = (table != EMPTY) & self._may_freeze(index, position + 1, control)
        low = may & (score < p.tau)
        before = self.detections[index]
        counts = before + low.to(torch.int32)
        if self.rule.recalls:  # halve the flags of a token that is relevant again
            counts = torch.where((score > p.tau) & (before > 0), before // 2, counts)
        away = (counts.clamp(min=0).double().sqrt() / p.k).floor().to(torch.int32)  # Eq. 3: floor(sqrt(c) / k) steps
        # With same_step, a timer of 1 runs out in the step that sets it, so the token does not freeze at all.
        away = (away - int(self.rule.same_step)).clamp(min=0)
        return counts, torch.where(low & (self.hold == 0), away, 0), may & (score > self.retrieved_above)

    def _store_step(self, position: Tensor, table: Tensor, score: Tensor, counts: Tensor, away: Tensor) -> Tensor:
        """Store a step's results for the tokens in ``table [n]``; return whose timers ran out, ``[capacity + 1]``."""
        index, leaves = self._index(table), away > 0
        self.timer -= 1
        for state, value in ((self.timer, away), (self.since, position.to(torch.int32))):
            state[index] = torch.where(leaves, value, state[index])
        self.detections[index], self.score[index], self.frozen[index] = counts, score, leaves
        waiting = self.frozen & (self.timer <= 0)
        self.frozen &= ~waiting
        return waiting

    def _index(self, table: Tensor) -> Tensor:
        """Return each slot's index into the state for ``table [n]``; empty slots get the dummy entry."""
        return torch.where(table != EMPTY, table, self.capacity).long()

    def thaw_hot(self, tokens: Tensor) -> None:
        """Unfreeze the tokens of the mask ``[capacity + 1]`` and reset their flags."""
        self.frozen &= ~tokens
        self.detections.masked_fill_(tokens, 0)
        self.score.masked_fill_(tokens, HOT_SCORE)

    def _with_followers(self, table: Tensor, retrieved: Tensor, position: Tensor, hot: Tensor) -> Tensor:
        """Return ``hot`` plus ``FOLLOWING`` tokens from each ``retrieved [n]`` token on, up to ``position``."""
        before = torch.zeros_like(self.index).index_put_((self._index(table),), retrieved.long()).cumsum(0)
        near = before > torch.nn.functional.pad(before[:-FOLLOWING], (FOLLOWING, 0))
        return hot | (near & (self.index <= position))

    def limit(self, total: Tensor, control: Tensor, waiting: Tensor) -> None:
        """Freeze the least relevant tokens so that the next token reads at most ``budget`` tokens, itself included.

        ``total`` (0-d) tokens are stored. Tokens in ``waiting [capacity + 1]``, whose timer ran out, get more urgent.
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
        """Unfreeze the tokens of the mask ``[total]``."""
        self.frozen[: len(tokens)] &= ~tokens

    def _above_floor(self, leaves: Tensor, score: Tensor, awake: Tensor) -> Tensor:
        """Return the least relevant of ``leaves [n]``, so that ``floor`` of ``awake`` (0-d) tokens are still read."""
        order = torch.where(leaves, score, torch.inf).argsort(stable=True)
        rank = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        return leaves & (rank < awake - self.rule.floor)

    def _may_freeze(self, index: Tensor, total: Tensor, control: Tensor) -> Tensor:
        """Return which tokens at positions ``index`` may freeze: not sinks, the window, pinned or protected ones."""
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


NONE = torch.zeros(1, dtype=torch.bool)  # mask without tokens


class CpuTimers(Timers):
    """``Timers`` on a CPU, where reading back does not wait; uses torch unless the numba loops are compiled."""

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
    """Return the compiled loops of this mode; None if there are none."""
    if loops := cpu_ops.compiled_loops(cpu_ops.FREEZE):
        cpu_ops.use_threads(torch.get_num_threads())
    return loops


def _shared(tensors: Iterable[Tensor]) -> list[Any]:
    return [tensor.numpy() for tensor in tensors]


class Scores:
    """Relevance of the tokens in ``table [n]`` (-1: empty) to the token being decoded, accumulated layer by layer.

    ``kind`` is the mode's parameter ``score``; with ``prob_rel``, the first ``sink`` tokens have no share.
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
        """Add a layer's mean |q.k| of ``query [q_heads, d_k]`` and ``keys [H, n, d_k]``; nothing for ``always``."""
        if self.kind == "always":
            return
        seen = self._seen(spec, position)
        grouped = query.view(len(keys), -1, query.shape[-1])
        products = torch.bmm(grouped, keys.transpose(1, 2)).float().abs().mean((0, 1))
        self.sum += products if seen is None else products * seen

    def _seen(self, spec: AttentionSpec, position: Tensor) -> Tensor | None:
        """Count the layer for the tokens that it sees, and return these as float32 ``[n]``; None for all."""
        if spec.window is None:
            self.layers += 1
            return None
        seen = (self.table > position - spec.window).float()
        self.windowed = self.windowed + seen
        return seen

    def result(self) -> Tensor:
        """Return the mean over the layers, ``[n]``; 0 for a token that no layer can see."""
        layers = self.layers + self.windowed
        return self.sum / (layers.clamp(min=1) if isinstance(layers, Tensor) else max(1, layers))
