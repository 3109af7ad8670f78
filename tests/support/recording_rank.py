"""``python recording_rank.py``: a follower rank that runs out of memory where a test says, and reports its state."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from support.memory_faults import MemoryRunsOut
from torch import Tensor

from kvchat.engine.ranks import follower
from kvchat.errors import UsageError
from kvchat.kv.inspect import attended
from kvchat.kv.manager import KVManager
from kvchat.kv.modes.speculative import Speculative
from kvchat.kv.state import KVState


@dataclass
class RankRecord:
    """What a rank did with its heads, in speculative mode.

    Attributes:
        read: the tokens that each KV head read at each step, bool ``[layers, heads, tokens]``.
        queries: of each step, ``[layers, q_heads, d]``.
        keys: all stored ones, ``[layers, heads, tokens, d]``.
        index: that chose the tokens, ``[layers - 1, heads, pages, words]``: the first layer reads everything.
    """

    read: list[Tensor] = field(default_factory=list)
    queries: list[Tensor] = field(default_factory=list)
    keys: Tensor = field(default_factory=lambda: torch.empty(0))
    index: Tensor = field(default_factory=lambda: torch.empty(0))

    def record_step(self, state: KVState) -> None:
        self.read.append(torch.stack([attended(state, layer) for layer in range(state.geometry.layers)]))
        self.queries.append(state.query.clone())

    def end(self, kv: KVManager) -> None:
        """Record the keys and their index."""
        layers = range(kv.state.geometry.layers)
        self.keys = torch.stack([kv.state.host.dense(layer, kv.total)[0] for layer in layers])
        assert isinstance(kv.mode, Speculative)
        self.index = kv.mode.index.data.clone()


class RecordingFollower(follower.Follower):
    _fault: MemoryRunsOut | None = None
    _record = RankRecord()

    def do(self, order: follower.Order) -> None:
        if order.name in vars(RecordingFollower):
            getattr(self, order.name)(*order.given)
        elif self._fault is None:
            super().do(order)
        else:
            with self._fault:
                super().do(order)

    def run_out(self, *places: int) -> None:
        """Let memory run out in later orders, at the operations with these numbers; never without numbers."""
        self._fault = MemoryRunsOut(*places) if places else None

    def check_in_sync(self, total: int, mode: str, params: dict[str, Any], pins: tuple[int, ...]) -> None:
        """Raise ``UsageError`` if this rank's state is not the leader's."""
        kv = self._runner.kv
        mine = (kv.total, kv.mode.name, kv.mode.report().params, kv.state.pins)
        if mine != (total, mode, params, pins):
            raise UsageError(f"{mine} here, {(total, mode, params, pins)} there")

    def count_operations(self) -> None:
        """Raise ``UsageError`` with the number of operations since ``run_out``."""
        assert self._fault
        raise UsageError(str(self._fault.count))

    def record_step(self) -> None:
        self._record.record_step(self._runner.kv.state)

    def save(self, file: str) -> None:
        """Write the ``RankRecord`` of all recorded steps to ``file``."""
        self._record.end(self._runner.kv)
        torch.save(self._record, file)


if __name__ == "__main__":
    from support import recording_rank  # the class that it writes is of that module, not of __main__

    follower.Follower = recording_rank.RecordingFollower
    follower.main()
