"""Page digests: element-wise minimum and maximum of a page's keys, per KV head.

Stored as ``[max | -min]`` so that an update is one ``maximum`` and Quest's bound one dot product:
``sum_i max(q_i * max_i, q_i * min_i) = relu(q) . max + relu(-q) . (-min)``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvchat.kv.geometry import Geometry
from kvchat.kv.host import HostPool


class Digests:
    """Digests ``[layers, H, page, 2 * d_k]`` of the layers ``first`` to the last, kept where selection needs them."""

    def __init__(self, geometry: Geometry, device: torch.device, first: int = 0) -> None:
        self.geometry = geometry
        self.first = first
        self.data = torch.empty(
            (geometry.layers - first, geometry.kv_heads, 0, 2 * geometry.d_k), dtype=geometry.dtype, device=device
        )

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return self.data.nbytes

    @property
    def pages(self) -> int:
        """Pages there is room for."""
        return self.data.shape[2]

    def reserve(self, pages: int) -> None:
        """Make room for ``pages``; new ones are empty."""
        if pages > self.pages:
            more = self._lowest((*self.data.shape[:2], pages - self.pages, self.data.shape[3]))
            self.data = torch.cat((self.data, more), 2)

    def of(self, layer: int) -> Tensor:
        """``[H, page, 2 * d_k]``"""
        return self.data[layer - self.first]

    def rebuild(self, host: HostPool, first_token: int = 0) -> None:
        """Compute the digests of all pages from the one holding ``first_token`` to the end of the host pool."""
        g = self.geometry
        begin, end = first_token // g.page, g.pages(host.total)
        self.reserve(end)
        self.data[:, :, begin:] = torch.finfo(g.dtype).min
        if begin == end:
            return
        for layer in range(self.first, g.layers):
            keys = host.dense(layer, host.total)[0][:, begin * g.page :]
            self.of(layer)[:, begin:end] = _digest(keys, end - begin, g.page)

    def add(self, layer: int, page: Tensor, keys: Tensor) -> None:
        """Widen the digest of ``page`` (1-element int64) by the new token's ``keys [H, d_k]``."""
        digests = self.of(layer)
        row = torch.cat((keys, -keys), -1).unsqueeze(1)
        digests.index_copy_(1, page, torch.maximum(digests.index_select(1, page), row))

    def _lowest(self, shape: tuple[int, ...]) -> Tensor:
        return torch.full(shape, torch.finfo(self.geometry.dtype).min, dtype=self.data.dtype, device=self.data.device)


def _digest(keys: Tensor, pages: int, page: int) -> Tensor:
    """``keys [H, n, d_k]`` -> ``[H, pages, 2 * d_k]``; the last page may be partly filled."""
    heads, n, d_k = keys.shape
    both = torch.cat((keys, -keys), -1)
    lowest = torch.finfo(keys.dtype).min
    padded = torch.nn.functional.pad(both, (0, 0, 0, pages * page - n), value=lowest)
    return padded.view(heads, pages, page, 2 * d_k).amax(2)
