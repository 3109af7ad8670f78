"""Freeze timers on a CPU: one pass that numba compiles in place of many operations, and none that changes nothing."""

from __future__ import annotations

from collections.abc import Iterable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from kvchat.kv.modes.freeze_timers import FOLLOWING, Timers
from kvchat.kv.ops import cpu_ops

NONE = torch.zeros(1, dtype=torch.bool)  # of the tokens


class CpuTimers(Timers):
    """``Timers`` where reading back costs no wait; without numba the operations are torch's."""

    def _flag(self, position: Tensor, table: Tensor, score: Tensor, control: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if not (loops := freeze_loops()):
            return super()._flag(position, table, score, control)
        p, rule, end = self.parameters, self.rule, position + 1 - self.parameters.K
        counts, away, sought = torch.empty_like(table), torch.empty_like(table), torch.empty(len(table)).bool()
        masks = NONE if self._pin_mask is None else self._pin_mask, control if rule.protects else NONE
        limits = rule.sink, int(end), p.tau, self.sought_above, p.k
        how = rule.recalls, rule.same_step, bool(self.hold > 0)
        loops.flag(*_shared((table, score, self.detections, *masks)), *limits, *how, *_shared((counts, away, sought)))
        return counts, away, sought

    def _above_floor(self, leaves: Tensor, score: Tensor, awake: Tensor) -> Tensor:
        return leaves if leaves.sum() <= awake - self.rule.floor else super()._above_floor(leaves, score, awake)

    def _store_step(self, position: Tensor, table: Tensor, score: Tensor, counts: Tensor, away: Tensor) -> Tensor:
        if not (loops := freeze_loops()):
            return super()._store_step(position, table, score, counts, away)
        waiting = torch.empty_like(self.frozen)
        states = self.detections, self.timer, self.since, self.score, self.frozen, waiting
        loops.store_step(int(position), *_shared((table, score, counts, away, *states)))
        return waiting

    def name(self, tokens: Tensor) -> None:
        if tokens.any():
            super().name(tokens)

    def _followed(self, table: Tensor, sought: Tensor, position: Tensor, named: Tensor) -> Tensor:
        if not (loops := freeze_loops()):
            return super()._followed(table, sought, position, named)
        loops.follow(*_shared((table, sought)), int(position), FOLLOWING, named.numpy())
        return named


def freeze_loops() -> ModuleType | None:
    """The compiled loops of this mode; None where numba does not run."""
    if not (loops := cpu_ops.compiled_loops()):
        return None
    from kvchat.kv.ops.numba import freeze

    loops.use_threads(torch.get_num_threads())
    return freeze


def _shared(tensors: Iterable[Tensor]) -> list[Any]:
    """Tensors as numpy's arrays of the same memory."""
    return [tensor.numpy() for tensor in tensors]
