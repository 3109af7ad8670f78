"""The CPU attends to a part of the host pool during a decode step, while the GPU attends to the rest.

Each layer copies its query to host memory. The GPU's own attention is queued before the host waits for the query. The
compiled loop reads the pinned pages in place. It returns float32 with the log-sum-exp, which ``attend`` needs to join
the two parts. Since the host takes part in every layer, each layer ends one CUDA graph and starts the next.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from threading import Thread
from typing import NamedTuple

import torch
from torch import Tensor

from kvchat.kv.attention import AttentionSpec
from kvchat.kv.geometry import Geometry
from kvchat.kv.memory import rates
from kvchat.kv.memory.device_slots import DeviceSlots
from kvchat.kv.memory.host_pool import HostPool
from kvchat.kv.ops import cpu_ops

# While a CUDA graph is captured: ends the graph and makes its replay run the given host work next.
pauses: list[Callable[[Callable[[], None]], None]] = []
LINK_BYTES = 2**26  # copied to measure the link
READ_BYTES = 2**28  # K/V read to measure the CPU: more than its caches hold


class Rates(NamedTuple):
    """Bytes/s of the ``link``, and of the K/V to which the ``cpu`` attends while the link is copying."""

    link: float
    cpu: float


class HostAttention:
    """Moves a layer's query from the GPU to the host and the attention back, one layer at a time."""

    def __init__(self, host: HostPool) -> None:
        g = host.geometry
        self.host = host
        self._query = torch.empty((g.q_heads, g.d_k), dtype=g.dtype, pin_memory=True)
        self._attended = torch.empty((g.kv_heads, g.group, g.d_v + 1), pin_memory=True)
        self._on_device = torch.empty_like(self._attended, device=host.device)
        self._asked = torch.cuda.Event(external=True)  # type: ignore[no-untyped-call]
        self._rows = torch.empty(0, dtype=torch.int32)

    def ask(self, query: Tensor) -> None:
        """Queue the copy of ``query [H_q, d_k]`` to the host."""
        self._query.copy_(query, non_blocking=True)
        self._asked.record(torch.cuda.current_stream(self.host.device))  # another device may be current

    def answer(self, layer: int, slots: DeviceSlots, spec: AttentionSpec) -> Tensor:
        """Wait for the query, attend to ``slots.on_cpu`` without learned sinks, and copy the result to the device.

        Returns float32 ``[H, G, d_v + 1]`` with the log-sum-exp in the last column, valid until the next layer's.
        """

        def work() -> None:
            self._asked.synchronize()
            self._attended.copy_(self.attend(layer, self._query, slots.on_cpu, spec))

        if pauses:
            pauses[-1](work)
        else:
            work()
        return self._on_device.copy_(self._attended, non_blocking=True)

    def attend(self, layer: int, query: Tensor, tokens: range, spec: AttentionSpec) -> Tensor:
        """Return ``cpu_ops.attended_part`` of ``query [H_q, d_k]`` (in host memory) over stored ``tokens``."""
        g, rows = self.host.geometry, self.host.rows_on_host(layer)
        if len(self._rows) < tokens.stop:
            self._rows = self.host.row_index(torch.arange(self.host.reserved), torch.tensor(0)).to(torch.int32)
        # The rows of consecutive KV heads are two blocks apart; a head's values follow its keys by one block.
        size = g.kv_heads, len(rows) - (2 * g.kv_heads - 1) * g.page
        strides = 2 * g.page * g.d, g.d, 1
        keys, values = rows.as_strided((*size, g.d_k), strides), rows[g.page :].as_strided((*size, g.d_v), strides)
        table = self._rows[tokens.start : tokens.stop].expand(g.kv_heads, -1)
        grouped = query.view(g.kv_heads, g.group, g.d_k)
        found = cpu_ops.attended_part(grouped, keys, values, table, spec, None)
        assert found is not None, "there is a loop where ``is_ready``"
        return found


def is_ready(dtype: torch.dtype, waits: bool) -> bool:
    """Return True if the compiled loop can attend to K/V of ``dtype``. The first call starts loading it.

    If it is not cached, it is compiled in another thread for half a minute; if ``waits``, wait for that.
    """
    # Not in the other thread: the import restores torch's number of threads in the thread that imports.
    if dtype not in cpu_ops.KNOWN or cpu_ops.imported(cpu_ops.BASE) is None:
        return False
    loading = _loading(dtype)
    if waits:
        loading.join()
    return not loading.is_alive() and cpu_ops.loops_over(dtype, cpu_ops.TOKENS) is not None


@cache
def _loading(dtype: torch.dtype) -> Thread:
    thread = Thread(target=cpu_ops.loops_over, args=(dtype, cpu_ops.TOKENS), daemon=True)
    thread.start()
    return thread


_measured: dict[tuple[Geometry, torch.device], Rates] = {}


def measured(host: HostPool) -> Rates | None:
    """Return this machine's rates, measured once per process on the stored K/V, which takes 0.2 s.

    Returns None while too little is stored or the compiled loop is not ready.
    """
    g, known = host.geometry, (host.geometry, host.device)
    if known not in _measured:
        if host.total * g.token_bytes < READ_BYTES or not is_ready(g.dtype, waits=False):
            return None
        layers = range(-(-READ_BYTES * g.layers // (host.total * g.token_bytes)))
        attention, tokens, spec = HostAttention(host), range(host.total), AttentionSpec(g.d_k**-0.5)
        query = torch.ones((g.q_heads, g.d_k), dtype=g.dtype)
        host.synchronize()

        def run() -> None:
            for layer in layers:
                attention.attend(layer, query, tokens, spec)

        taken = rates.seconds_beside_link(run, host.device, LINK_BYTES)
        read = len(layers) * host.total * g.token_bytes / g.layers
        _measured[known] = Rates(rates.link(host.device, True, LINK_BYTES), read / taken)
    return _measured[known]
