"""Page bounds: element-wise minimum and maximum of a page's keys, per KV head.

Stored as ``[max | -min]`` so that an update is one ``maximum`` and Quest's bound one dot product:
``sum_i max(q_i * max_i, q_i * min_i) = relu(q) . max + relu(-q) . (-min)``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvchat.kv.geometry import Geometry
from kvchat.kv.memory.host_pool import HostPool
from kvchat.kv.ops.selection import page_bounds


class PageBounds:
    """Bounds ``[layers, H, page, 2 * d_k]`` of the layers ``first`` to the last, kept where selection needs them.

    They cover the first ``tokens`` tokens.
    """

    def __init__(self, geometry: Geometry, device: torch.device, first: int = 0) -> None:
        self.geometry = geometry
        self.first = first
        self.tokens = 0
        self.data = torch.empty(
            (geometry.layers - first, geometry.kv_heads, 0, 2 * geometry.d_k), dtype=geometry.dtype, device=device
        )

    @property
    def pages(self) -> int:
        """Pages there is room for."""
        return self.data.shape[2]

    def reserve(self, tokens: int) -> None:
        """Make room for the pages of ``tokens``; new ones are empty."""
        if self.geometry.pages(tokens) > self.pages:
            shape = (*self.data.shape[:2], self.geometry.pages(tokens) - self.pages, self.data.shape[3])
            more = torch.full(shape, self._lowest, dtype=self.data.dtype, device=self.data.device)
            self.data = torch.cat((self.data, more), 2)

    def of(self, layer: int) -> Tensor:
        """``[H, page, 2 * d_k]``"""
        return self.data[layer - self.first]

    def refresh(self, host: HostPool) -> None:
        """Cover exactly what the host pool holds; only pages that are not covered yet are read from it."""
        g = self.geometry
        begin, end = min(self.tokens, host.total) // g.page, g.pages(host.total)
        self.reserve(g.grown(host.total))
        self.data[:, :, begin:] = self._lowest
        self.tokens = host.total
        if begin == end:
            return
        for layer in range(self.first, g.layers):
            keys = host.dense(layer, host.total, begin)[0]
            self.of(layer)[:, begin:end] = page_bounds(keys, end - begin, g.page)

    def compute(self, layer: int, start: int, keys: Tensor) -> None:
        """Cover a layer's tokens from ``start`` on, given the ``keys [H, n, d_k]`` of all tokens during a prefill.

        ``tokens`` advances only after the last layer. ``refresh`` then re-reads at most one page, and clears what a
        failed forward left.
        """
        g = self.geometry
        if start // g.page > self.tokens // g.page:
            return
        begin, end = start // g.page, g.pages(keys.shape[1])
        self.reserve(g.grown(keys.shape[1]))
        self.of(layer)[:, begin:end] = page_bounds(keys[:, begin * g.page :], end - begin, g.page)
        if layer == g.layers - 1:
            self.tokens = keys.shape[1]

    @property
    def _lowest(self) -> float:
        # Not -inf: relu(q) = 0 times it would be NaN.
        return torch.finfo(self.geometry.dtype).min
