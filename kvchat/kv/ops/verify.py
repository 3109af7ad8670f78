"""Start-up check: run every kernel once on this GPU and compare with the torch reference.

It shows what no other machine can: no C compiler for Triton's launchers, a GPU that Triton does not know, a kernel
compiled wrong. Costs the compilations that the first steps would need anyway; Triton caches them on disk.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
from torch import Tensor

from kvchat.kv.attention_spec import AttentionSpec
from kvchat.kv.geometry import Geometry
from kvchat.kv.memory.device_slots import DeviceSlots, Layout
from kvchat.kv.memory.eight_bit_pool import EightBitPool
from kvchat.kv.memory.host_pool import HostPool
from kvchat.kv.ops.eight_bit_ops import EightBitOps
from kvchat.kv.ops.selection import Candidates, page_bounds
from kvchat.kv.ops.torch_ops import TorchOps
from kvchat.kv.ops.triton_ops import EightBitTritonOps, TritonOps

PAGES = 8
# Relative L2 error. Rounding to bfloat16 makes about 0.005; a wrong mask or row makes more than 0.1.
TOLERANCE = 0.05


@functools.cache
def kernel_failure(geometry: Geometry, device: torch.device, rounds: bool = False) -> str:
    """Return why the kernels cannot be used for this geometry on ``device``, empty if they can.

    Where it ``rounds``, over a host pool with 8-bit pages.
    """
    g = replace(geometry, layers=1, headroom=geometry.page)
    try:
        with torch.inference_mode():
            kinds = (EightBitOps, EightBitTritonOps) if rounds else (TorchOps, TritonOps)
            expected, measured = (outcomes(kind, g, device) for kind in kinds)
            wrong = [name for name in expected if not error(measured[name], expected[name]) <= TOLERANCE]
    except Exception as raised:  # noqa: BLE001  # Triton raises whatever its compiler, a C compiler or the driver does
        return f"{type(raised).__name__}: {(str(raised).strip().splitlines() or [''])[0][:200]}"
    return f"wrong results on this machine: {', '.join(wrong)}" if wrong else ""


def error(measured: Tensor, expected: Tensor) -> float:
    """||measured - expected|| / ||expected||, of whole numbers all or nothing; NaN anywhere gives NaN."""
    if not expected.is_floating_point():
        return 0.0 if torch.equal(measured, expected) else 1.0
    measured, expected = measured.double(), expected.double()
    return float((measured - expected).norm() / expected.norm().clamp(min=1e-9))


def outcomes(kind: type[TorchOps], g: Geometry, device: torch.device) -> dict[str, Tensor]:
    """Return what each operation does with the same random numbers, independent of the order within a head's slots."""
    p, tokens = g.page, PAGES * g.page
    noise = _Noise(g.dtype, device)
    keys, values, query = noise(g.kv_heads, tokens, g.d_k), noise(g.kv_heads, tokens, g.d_v), noise(g.q_heads, g.d_k)
    host, last = HostPool(g, device, tokens), tokens - 1
    host = EightBitPool(host) if issubclass(kind, EightBitOps) else host
    host.reserve(last)
    host.append(0, 0, keys[:, :last], values[:, :last])
    host.total = last
    host.reserve(tokens)
    ops, position = kind(g, host, device), torch.tensor(last, device=device)
    slots = DeviceSlots(Layout(0, 1, p, p, pages=2, shared=False), g, device)
    ops.begin_step(position)
    slots.assign(position)
    ops.append([slots], 0, keys[:, last], values[:, last])  # it fills a page
    host.total = tokens
    host.reserve(tokens + 1)
    position.fill_(tokens)
    stored = host.dense(0, tokens, PAGES - 1)
    found = {"append": torch.cat((slots.kv.flatten(), *(part.flatten() for part in stored)))}

    bounds = page_bounds(keys, PAGES, p)
    ops.update_bounds(bounds, torch.tensor([PAGES - 1], device=device), 4 * noise(g.kv_heads, g.d_k))
    found["update_bounds"] = bounds[:, PAGES - 1].clone()
    found["page_scores"] = ops.page_scores(query, bounds, g.d_k**-0.5)
    signs = torch.tensor([1 - 2 * (row // g.group % 2) for row in range(g.q_heads)], device=device)
    flagged = ops.needs_correction(query, query * signs[:, None], 0.5)
    found["needs_correction"] = flagged
    scores = noise(g.kv_heads, g.group, PAGES).float()
    candidates = Candidates.between(1, position // p - 2, PAGES)
    counters = torch.zeros(3, dtype=torch.int64, device=device)
    for heads in (flagged, None):
        placed = ops.choose(scores, candidates, slots.pages_of(0), heads)
        ops.move_pages(slots, 0, placed, slots.pages_of(0), counters)
        slots.pages_of(0).copy_(placed)
    found["choose"], found["move_pages"] = slots.pages_of(0).sort().values, counters
    ops.open_pages(slots, slice(0, 1), p, position - p)
    found["open_pages"] = slots.table.sort().values
    attended, weights = ops.attend(slots, 0, query, AttentionSpec(g.d_k**-0.5), True)
    assert weights is not None
    shares = torch.zeros(slots.n, device=device)
    weights.add_shares(shares, torch.ones_like(shares), shares.new_tensor(slots.n))
    found |= {"attend": attended, "weights": weights.best().sort().values, "shares": shares.sum()}

    some = torch.arange(p, device=device).expand(g.kv_heads, -1) * 3
    ops.move_tokens(slots, 0, slots.offset, some.contiguous(), torch.full_like(some, -1), counters)
    found["move_tokens"] = slots.kv[:, :, :, slots.offset : slots.offset + p]
    unordered = DeviceSlots(Layout(0, 1, 0, 2 * p, unordered=True), g, device)
    ops.move_shared(unordered, some[0].contiguous(), some[0].flip(0) // 2, some[0] % 2 == 0)
    spilling = DeviceSlots(Layout(0, 1, 0, p, spills=True), g, device)
    found["spilled"], _ = ops.attend(spilling, 0, query, AttentionSpec(g.d_k**-0.5), False)
    return found | {"move_shared": unordered.kv}


class _Noise:
    """The same random numbers at every call in order."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._generator = torch.Generator().manual_seed(0)
        self._dtype = dtype
        self._device = device

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator).to(self._device, self._dtype)
