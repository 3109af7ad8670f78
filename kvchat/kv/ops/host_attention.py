"""Attention of a decode step over a part of the host pool on the CPU, while the GPU attends to the rest.

A layer's query is copied to host memory, and the GPU's own attention is queued before the host waits for the query. The
compiled loop reads the pages where they are pinned; its result goes back in float32, with the logarithm of its sum of
exponentials, by which ``attend`` joins it. The host takes part in every layer, so a CUDA graph ends there and another
begins.
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

# While a CUDA graph is captured: ends it, and lets its replay run the given work of the host next.
pauses: list[Callable[[Callable[[], None]], None]] = []
LINK_BYTES = 2**26  # of a copy by which the link is measured
READ_BYTES = 2**28  # of K/V by which the CPU is measured: more than its caches hold


class Rates(NamedTuple):
    """Bytes/s of the ``link``, and of the K/V that the ``cpu`` attends to while the link copies."""

    link: float
    cpu: float


class HostAttention:
    """Takes a layer's query from the GPU to the host and the attention back; for one layer at a time."""

    def __init__(self, host: HostPool) -> None:
        g = host.geometry
        self.host = host
        self._query = torch.empty((g.q_heads, g.d_k), dtype=g.dtype, pin_memory=True)
        self._attended = torch.empty((g.kv_heads, g.group, g.d_v + 1), pin_memory=True)
        self._on_device = torch.empty_like(self._attended, device=host.device)
        self._asked = torch.cuda.Event(external=True)  # type: ignore[no-untyped-call]
        self._rows = torch.empty(0, dtype=torch.int32)

    def ask(self, query: Tensor) -> None:
        """Send ``query [H_q, d_k]`` to the host, behind all that was queued so far."""
        self._query.copy_(query, non_blocking=True)
        self._asked.record(torch.cuda.current_stream(self.host.device))  # another device may be the current one

    def answer(self, layer: int, slots: DeviceSlots, spec: AttentionSpec) -> Tensor:
        """Attend to ``slots.on_cpu``, without learned sinks, once the query is there; copy the result to the device.

        Float32 ``[H, G, d_v + 1]``, the logarithm of the sum of exponentials last; valid until the next layer's.
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
        """``cpu_ops.attended_part`` of ``query [H_q, d_k]`` in host memory over stored ``tokens``."""
        g, rows = self.host.geometry, self.host.rows_on_host(layer)
        if len(self._rows) < tokens.stop:
            self._rows = self.host.row_index(torch.arange(self.host.reserved), torch.tensor(0)).to(torch.int32)
        # The rows of each KV head lie two blocks behind those of the one before, its values one block behind its keys.
        size = g.kv_heads, len(rows) - (2 * g.kv_heads - 1) * g.page
        strides = 2 * g.page * g.d, g.d, 1
        keys, values = rows.as_strided((*size, g.d_k), strides), rows[g.page :].as_strided((*size, g.d_v), strides)
        table = self._rows[tokens.start : tokens.stop].expand(g.kv_heads, -1)
        grouped = query.view(g.kv_heads, g.group, g.d_k)
        found = cpu_ops.attended_part(grouped, keys, values, table, spec, None)
        assert found is not None, "there is a loop where ``is_ready``"
        return found


def is_ready(dtype: torch.dtype, waits: bool) -> bool:
    """True if the compiled loop can attend to K/V of ``dtype``; it is loaded when this is first asked.

    Where no cache holds it, it is compiled: half a minute, during which another thread goes on unless this one
    ``waits``.
    """
    # Imported by this thread, whose number of threads numba would change.
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
    """Rates of this machine, measured once in a process over what is stored: 0.2 s.

    None where little is stored, and until the compiled loop ``is_ready``.
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
