"""Start-up check: run every kernel once on this GPU and compare the results with the torch reference.

It finds faults that depend on the machine: no C compiler for Triton's launchers, a GPU unknown to Triton, a miscompiled
kernel. It costs only compilations that the first steps need anyway; Triton caches them on disk.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from kvchat.kv.attention import AttentionSpec
from kvchat.kv.geometry import Geometry
from kvchat.kv.memory.device_slots import DeviceSlots, Layout
from kvchat.kv.memory.eight_bit_pool import EightBitPool
from kvchat.kv.memory.host_pool import HostPool
from kvchat.kv.ops import key_codes
from kvchat.kv.ops.eight_bit_ops import EightBitOps
from kvchat.kv.ops.selection import Candidates, TokenQuery, page_bounds
from kvchat.kv.ops.torch_ops import TorchOps
from kvchat.kv.ops.triton_ops import EightBitTritonOps, TritonOps

PAGES = 8
# Relative L2 error. Rounding to bfloat16 causes about 0.005; a wrong mask or row causes more than 0.1.
TOLERANCE = 0.05


@functools.cache
def kernel_failure(geometry: Geometry, device: torch.device, quantizes: bool = False) -> str:
    """Return why the kernels cannot be used for this geometry of one layer on ``device``; "" if they can.

    ``quantizes`` means that the host pool has 8-bit pages.
    """
    try:
        with torch.inference_mode():
            kinds = (EightBitOps, EightBitTritonOps) if quantizes else (TorchOps, TritonOps)
            expected, measured = (outcomes(kind, geometry, device) for kind in kinds)
            wrong = [name for name in expected if not error(measured[name], expected[name]) <= TOLERANCE]
    except Exception as raised:  # noqa: BLE001  # Triton raises any error of its compiler, a C compiler or the driver
        return f"{type(raised).__name__}: {(str(raised).strip().splitlines() or [''])[0][:200]}"
    return f"wrong results on this machine: {', '.join(wrong)}" if wrong else ""


def error(measured: Tensor, expected: Tensor) -> float:
    """Return ||measured - expected|| / ||expected||; for integers 0 if equal, else 1. NaN anywhere gives NaN."""
    if not expected.is_floating_point():
        return 0.0 if torch.equal(measured, expected) else 1.0
    measured, expected = measured.double(), expected.double()
    return float((measured - expected).norm() / expected.norm().clamp(min=1e-9))


def outcomes(kind: type[TorchOps], g: Geometry, device: torch.device) -> dict[str, Tensor]:
    """Return each operation's result for the same random inputs, independent of the order within a head's slots."""
    step = _Step(kind, g, device)
    return step.append() | step.select() | step.recall() | step.choose() | step.attend() | step.move()


class _Step:
    """One layer's operations in the order of a step, on random tokens that fill the pages."""

    def __init__(self, kind: type[TorchOps], g: Geometry, device: torch.device) -> None:
        self.g, self.device, self._drawn = g, device, torch.Generator().manual_seed(0)
        tokens = PAGES * g.page
        self.keys, self.values = self.noise(g.kv_heads, tokens, g.d_k), self.noise(g.kv_heads, tokens, g.d_v)
        self.query, self.spec = self.noise(g.q_heads, g.d_k), AttentionSpec(g.d_k**-0.5)
        host = HostPool(g, device, tokens)
        self.host = EightBitPool(host) if issubclass(kind, EightBitOps) else host
        self.ops, self.position = kind(g, self.host, device), torch.tensor(tokens - 1, device=device)
        self.slots = DeviceSlots(Layout(0, 1, g.page, g.page, pages=2, shared=False), g, device)
        self.counters = torch.zeros(3, dtype=torch.int64, device=device)

    def noise(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._drawn).to(self.device, self.g.dtype)

    def append(self) -> dict[str, Tensor]:
        last = int(self.position)
        self.host.reserve(last)
        self.host.append(0, 0, self.keys[:, :last], self.values[:, :last])
        self.host.total = last
        self.host.reserve(last + 1)
        self.ops.begin_step(self.position)
        self.ops.assign(self.slots, self.position)
        self.ops.append([self.slots], 0, self.keys[:, last], self.values[:, last])  # fills a page
        self.host.total = last + 1
        self.host.reserve(last + 2)
        self.position.fill_(last + 1)
        stored = self.host.dense(0, last + 1, PAGES - 1)
        written = torch.cat((self.slots.kv.flatten(), *(part.flatten() for part in stored)))
        return {"append": written, "assign": self.slots.table.clone()}

    def select(self) -> dict[str, Tensor]:
        g, bounds = self.g, page_bounds(self.keys, PAGES, self.g.page)
        self.ops.update_bounds(bounds, torch.tensor([PAGES - 1], device=self.device), 4 * self.noise(g.kv_heads, g.d_k))
        signs = torch.tensor([1 - 2 * (row // g.group % 2) for row in range(g.q_heads)], device=self.device)
        self.flagged = self.ops.needs_correction(self.query, self.query * signs[:, None], 0.5)
        return {
            "update_bounds": bounds[:, PAGES - 1].clone(),
            "page_scores": self.ops.page_scores(self.query, bounds, self.spec.scaling),
            "needs_correction": self.flagged,
        }

    def recall(self) -> dict[str, Tensor]:
        p, slots, resident = self.g.page, self.slots, self.slots.pages_of(0)
        scores = self.noise(self.g.kv_heads, self.g.group, PAGES).float()
        candidates = Candidates.between(1, self.position // p - 2, PAGES)
        for heads in (self.flagged, None):
            placed = self.ops.choose(scores, candidates, resident, heads)
            self.ops.move_pages(slots, 0, placed, resident, self.counters)
            resident.copy_(placed)
        self.ops.open_pages(slots, slice(0, 1), p, self.position - p)
        return {
            "choose": resident.sort().values,
            "move_pages": self.counters,
            "open_pages": slots.table.sort().values,
        }

    def choose(self) -> dict[str, Tensor]:
        """Choose tokens by their codes, first without and then with resident ones: how many, and their weights."""
        g, k = self.g, self.g.page + 3
        found: dict[str, Tensor] = {}
        tokens = torch.arange(PAGES * g.page, device=self.device)
        hidden, masked = tokens >= (PAGES - 1) * g.page, (tokens < 5) | (tokens >= (PAGES - 2) * g.page)
        resident = torch.full((g.kv_heads, k), -1, dtype=torch.int32, device=self.device)
        for bits in (2, 4):
            index = self.ops.encode_keys(self.keys[:, : -g.page // 2], bits)
            by = self.query, index, bits, self.spec.scaling
            scores = self.ops.token_scores(*by)
            means = self.values[:, : PAGES * g.page].view(g.kv_heads, PAGES, g.page, -1).mean(2)
            placed, unread = self.ops.choose_tokens(TokenQuery(*by, means), hidden, masked, resident)
            assert unread is not None
            resident.copy_(placed)
            chosen = torch.zeros((g.kv_heads, len(tokens) + 1), dtype=torch.bool, device=self.device)
            chosen = chosen.scatter_(1, resident.long().remainder(len(tokens) + 1), True)[:, :-1]
            weights = scores.masked_fill(hidden, -torch.inf).softmax(-1).mean(1) * chosen
            found[f"{bits}-bit keys"] = key_codes.decode(index, g.d_k, g.page, bits, g.dtype)
            found |= {f"{bits}-bit scores": scores, f"{bits}-bit weights": weights.sort().values}
            found |= {f"{bits}-bit choice": (chosen & ~masked).sum(1), f"{bits}-bit rest": unread}
        return found

    def attend(self) -> dict[str, Tensor]:
        attended, weights = self.ops.attend(self.slots, 0, self.query, self.spec, True)
        assert weights is not None
        shares = torch.zeros(self.slots.n, device=self.device)
        weights.add_shares(shares, torch.ones_like(shares), shares.new_tensor(self.slots.n))
        spilling = DeviceSlots(Layout(0, 1, 0, self.g.page, spills=True), self.g, self.device)
        # A part without weight, so that joining it changes nothing.
        nothing = torch.full((self.g.kv_heads, self.g.group, self.g.d_v + 1), -1e4, device=self.device)
        spilling.on_cpu, spilling.other_part = range(PAGES * self.g.page, PAGES * self.g.page), lambda: nothing
        spilled, _ = self.ops.attend(spilling, 0, self.query, self.spec, False)
        best = weights.best().sort().values
        return {"attend": attended, "weights": best, "shares": shares.sum(), "spilled": spilled}

    def move(self) -> dict[str, Tensor]:
        p, slots = self.g.page, self.slots
        some = torch.arange(p, device=self.device).expand(self.g.kv_heads, -1) * 3
        self.ops.move_tokens(slots, 0, slots.offset, some.contiguous(), torch.full_like(some, -1), self.counters)
        unordered = DeviceSlots(Layout(0, 1, 0, 2 * p, unordered=True), self.g, self.device)
        self.ops.move_shared(unordered, some[0].contiguous(), some[0].flip(0) // 2, some[0] % 2 == 0)
        moved = slots.kv[:, :, :, slots.offset : slots.offset + p]
        return {"move_tokens": moved, "move_shared": unordered.kv}
