"""Figures that are read only while somebody looks at them: by layer and KV head, recall by its time, PCIe traffic."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterable

from kvchat.kv.inspect import held_per_head, read_per_head
from kvchat.kv.memory.step_timer import RecallTime
from kvchat.kv.state import KVState
from kvchat.nvml import GpuReader, PcieTraffic
from kvchat.protocol.details import RECALL_EDGES_MS, Details, RecallBin


class PcieReading:
    """The traffic on a GPU's link, measured on a thread beside the engine's work: NVML waits 40 ms for it."""

    def __init__(self, reader: GpuReader | None) -> None:
        self._reader = reader
        self._latest = PcieTraffic()
        self._thread: threading.Thread | None = None

    def latest(self) -> PcieTraffic:
        """The last measurement; starts the next one."""
        latest = self._latest
        if self._reader and not (self._thread and self._thread.is_alive()):
            self._thread = threading.Thread(target=self._measure, args=(self._reader,), daemon=True)
            self._thread.start()
        return latest

    def _measure(self, reader: GpuReader) -> None:
        self._latest = reader.pcie()


def details(state: KVState, pcie: PcieTraffic) -> Details:
    """Tokens read and held by layer and KV head, and the time of recall."""
    read, held = (tuple(map(tuple, counts.tolist())) for counts in (read_per_head(state), held_per_head(state)))
    return Details(state.total, read, held, histogram(state.transfer.timer.steps), pcie.to_device, pcie.to_host)


def histogram(steps: Iterable[RecallTime]) -> tuple[RecallBin, ...]:
    """The steps by the time their recall took; no bins without a step."""
    binned: list[list[RecallTime]] = [[] for _ in (*RECALL_EDGES_MS, None)]
    for step in steps:
        binned[bisect_right(RECALL_EDGES_MS, 1000 * step.total)].append(step)
    if not any(binned):
        return ()
    return tuple(
        RecallBin(
            len(steps), 1000 * sum(step.total - step.exposed for step in steps), 1000 * sum(s.exposed for s in steps)
        )
        for steps in binned
    )
