"""``python faulty_rank.py``: a following rank in which memory runs out where a test says; it says what it holds."""

from __future__ import annotations

from typing import Any

from support.memory_faults import MemoryRunsOut

from kvchat.engine.ranks import follower
from kvchat.errors import UsageError


class FaultyFollower(follower.Follower):
    _fault: MemoryRunsOut | None = None

    def do(self, order: follower.Order) -> None:
        if self._fault is None or order.name in vars(FaultyFollower):
            super().do(order)
        else:
            with self._fault:
                super().do(order)

    def run_out(self, *places: int) -> None:
        """Let memory run out in the orders from now on, at the operations with these numbers; without any never."""
        self._fault = MemoryRunsOut(*places) if places else None

    def check_alike(self, total: int, mode: str, params: dict[str, Any], pins: tuple[int, ...]) -> None:
        """Refuse what is not as the leader has it."""
        kv = self._runner.kv
        mine = (kv.total, kv.mode.name, kv.mode.report().params, kv.state.pins)
        if mine != (total, mode, params, pins):
            raise UsageError(f"{mine} here, {(total, mode, params, pins)} there")

    def tell_count(self) -> None:
        """Refuse with the number of operations since ``run_out``."""
        assert self._fault
        raise UsageError(str(self._fault.count))


if __name__ == "__main__":
    follower.Follower = FaultyFollower
    follower.main()
