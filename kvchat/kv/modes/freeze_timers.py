"""Freeze timers: per token how often it was found irrelevant, and for how long it stays away (ASR-KF-EGR, Eq. 3).

Everything is a tensor by position or by slot, of fixed shape within a step, and nothing is read back.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvchat.config.modes import FreezeParameters
from kvchat.kv.geometry import GROWTH_HEADROOM, grown
from kvchat.kv.memory.device_slots import EMPTY

# What a score of 0 counts for a token that waits to return, so that it is not forgotten.
MIN_RETURN_SCORE = 0.01
# Above every score: puts tokens that are relevant behind those that are not.
SORT_LAST = 1e9


def duration(detections: Tensor, k: float) -> Tensor:
    """Eq. 3: ``floor(sqrt(c) / k)`` steps, int32."""
    return (detections.clamp(min=0).double().sqrt() / k).floor().to(torch.int32)


def state_bytes(capacity: int) -> int:
    """Bytes of the state of ``capacity`` tokens: three int32, one float32 and one bool each."""
    return 17 * (capacity + 1)


class Timers:
    """State of the tokens that share slots, by position: tensors ``[capacity + 1]``; the last entry is a dummy.

    ``detections`` begins at minus the token's offset, which staggers the first freezes; ``timer`` is the number of
    steps to stay away, 0 or less where the token waits for room to return; ``since`` the position at which it left;
    ``score`` its smoothed one. ``hold`` (0-d) is the number of steps for which nothing may be frozen.
    """

    detections: Tensor
    timer: Tensor
    since: Tensor
    score: Tensor
    frozen: Tensor

    def __init__(self, rule: FreezeParameters, device: torch.device, headroom: int = GROWTH_HEADROOM) -> None:
        self.rule = rule
        self.device = device
        self.headroom = headroom
        self.hold = torch.zeros((), dtype=torch.int32, device=device)
        self.capacity = 0
        self._allocate(grown(0, headroom))

    def reserve(self, tokens: int) -> None:
        """Make room for the state of ``tokens``."""
        if tokens > self.capacity:
            self._allocate(grown(tokens, self.headroom))

    def truncate(self, tokens: int) -> None:
        """Forget the tokens from position ``tokens`` on; those in the window before it are active."""
        self.detections[tokens:] = self._offsets(self.capacity + 1)[tokens:]
        self.frozen[max(0, tokens - self.rule.window) :] = False
        self.score[tokens:] = 0

    def observe(self, position: Tensor, table: Tensor, score: Tensor, pinned: Tensor) -> Tensor:
        """One step: the tokens in ``table [n]`` scored ``score [n]``; which slots they leave, bool ``[n]``.

        ``position`` (0-d) is that of the newest token. The timers of tokens that were away fall by one.
        """
        rule, held = self.rule, table != EMPTY
        index = torch.where(held, table, self.capacity).long()
        score = self._smoothed(self.score[index], score)
        may = held & (table <= position - rule.window) & ~self._protected(index, pinned)
        low = may & (score < rule.tau)
        c = self._counted(self.detections[index], low, score)
        # A timer that falls in the step it is set in: a token that were to leave and return at once does not move.
        d = duration(c, rule.k) - int(rule.same_step)
        leaves = self._bounded(low & (d > 0) & (self.hold == 0), may, score, held.sum())
        self.timer -= 1
        self.hold.sub_(1).clamp_(min=0)
        for state, value in ((self.timer, d.clamp(min=1)), (self.since, position.to(torch.int32))):
            state[index] = torch.where(leaves, value, state[index])
        self.detections[index], self.score[index], self.frozen[index] = c, score, leaves
        return leaves

    def urgency(self) -> Tensor:
        """How much each token should return now, ``[capacity]``; 0 where it should not. Grows while it waits."""
        waiting = self.frozen & (self.timer <= 0)
        return torch.where(waiting, (self.score + MIN_RETURN_SCORE) * (1 - self.timer), 0.0)[:-1]

    def limit(self, total: int, most: int, pinned: Tensor) -> None:
        """Freeze the least relevant of ``total`` tokens until at most ``most`` are active; between steps."""
        index = torch.arange(total, device=self.device)
        active = ~self.frozen[:total]
        may = active & (index < total - self.rule.window) & ~self._protected(index, pinned)
        over = min(int(active.sum()) - most, int(may.sum()))
        if over > 0:
            least = torch.where(may, self.score[:total], SORT_LAST).topk(over, largest=False).indices
            self.frozen[least], self.timer[least], self.since[least] = True, 1, total

    def restart(self, tokens: int) -> None:
        """All of the first ``tokens`` are active and were never flagged."""
        self.frozen[:tokens] = False
        self.detections[:tokens] = self._offsets(tokens)

    def wake(self, tokens: Tensor) -> None:
        """The tokens of a mask ``[total]`` are active again."""
        self.frozen[: len(tokens)] &= ~tokens

    def _smoothed(self, before: Tensor, score: Tensor) -> Tensor:
        """A share of the score before counts; none was 0, as a token never scored has it."""
        return torch.where(before > 0, score.lerp(before, self.rule.smooth), score) if self.rule.smooth else score

    def _counted(self, c: Tensor, low: Tensor, score: Tensor) -> Tensor:
        """Detections after this step: one more where low, half where relevant, at most the history window."""
        c = torch.where((score > self.rule.tau) & (c > 0), c // 2, c + low.to(torch.int32))
        return c.clamp(max=self.rule.history) if self.rule.history else c

    def _bounded(self, leaves: Tensor, may: Tensor, score: Tensor, active: Tensor) -> Tensor:
        """The floor and the ceiling on active tokens: the least relevant leave first, beyond the flagged if need be."""
        least, most = self.rule.min_active, self.rule.max_active
        if not least and most is None:
            return leaves
        order = torch.where(may, score.double() + SORT_LAST * ~leaves, torch.inf).argsort()
        rank = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        # One more token comes before the next look.
        forced = torch.zeros_like(leaves) if most is None else may & (rank < active + 1 - most)
        return (leaves | forced) & (rank < active - least)

    def _protected(self, index: Tensor, pinned: Tensor) -> Tensor:
        sinks = index < self.rule.sink
        return sinks | pinned[index.clamp(max=len(pinned) - 1)] if self.rule.protect else sinks

    def _offsets(self, entries: int) -> Tensor:
        return -(torch.arange(entries, dtype=torch.int32, device=self.device) % self.rule.stagger)

    def _allocate(self, capacity: int) -> None:
        fresh = {
            "detections": self._offsets(capacity + 1),
            "timer": torch.zeros(capacity + 1, dtype=torch.int32, device=self.device),
            "since": torch.zeros(capacity + 1, dtype=torch.int32, device=self.device),
            "score": torch.zeros(capacity + 1, device=self.device),
            "frozen": torch.zeros(capacity + 1, dtype=torch.bool, device=self.device),
        }
        for name, tensor in fresh.items():
            if self.capacity:
                tensor[: self.capacity] = getattr(self, name)[: self.capacity]
            setattr(self, name, tensor)
        self.capacity = capacity
