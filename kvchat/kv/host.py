"""The host pool: every token's K and V, in every mode, always complete.

One tensor ``[page, H, 2, p, d]`` per layer, contiguous, so that one (page, head) is one block of K then V. A new
token's K/V is written through as soon as it is computed; leaving the device then costs nothing. With a CUDA device
the memory is pinned and the device reads and writes it through an alias of the same bytes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvchat.errors import DoesNotFitError
from kvchat.kv.geometry import Geometry, grown


class HostPool:
    """Pages of all layers. ``total`` tokens are stored; capacity grows in whole pages."""

    def __init__(self, geometry: Geometry, device: torch.device) -> None:
        self.geometry = geometry
        self.device = device
        self.total = 0
        self.layers: list[Tensor] = []
        self._aliases: list[Tensor] = []
        self._allocate(geometry.pages(grown(0)))

    @property
    def capacity(self) -> int:
        """Tokens that fit before the pool has to grow."""
        # Layers differ when memory ran out while the pool grew: then it grows again.
        return min(layer.shape[0] for layer in self.layers) * self.geometry.page

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(layer.nbytes for layer in self.layers)

    def reserve(self, tokens: int) -> bool:
        """Make room for ``tokens`` in all; True when the pool moved (aliases and rows are new).

        Raises:
            DoesNotFitError: the host has no memory for it; what is stored is unchanged.
        """
        if tokens <= self.capacity:
            return False
        self._allocate(self.geometry.pages(grown(tokens)))
        return True

    def truncate(self, tokens: int) -> None:
        """Forget all but the first ``tokens``; memory is kept for what comes next."""
        self.total = min(self.total, tokens)

    def rows(self, layer: int) -> Tensor:
        """The layer as the device sees it, ``[page * H * 2 * p, d]``."""
        return self._aliases[layer].view(-1, self.geometry.d)

    def blocks(self, layer: int) -> Tensor:
        """The layer as the device sees it, one row per (page, head, K or V): ``[page * H * 2, p * d]``."""
        return self._aliases[layer].view(-1, self.geometry.page * self.geometry.d)

    def row_index(self, positions: Tensor, heads: Tensor) -> Tensor:
        """Rows of K of tokens ``positions`` and KV ``heads`` (broadcast, int64); V lies ``page`` rows further."""
        g = self.geometry
        page = torch.div(positions, g.page, rounding_mode="floor")
        return (page * g.kv_heads + heads) * (2 * g.page) + positions % g.page

    def append(self, layer: int, start: int, k: Tensor, v: Tensor) -> None:
        """Write ``k [H, n, d_k]`` and ``v [H, n, d_v]`` of the tokens from position ``start`` on."""
        positions = torch.arange(start, start + k.shape[1], device=self.device)
        heads = torch.arange(self.geometry.kv_heads, device=self.device)
        index = self.row_index(positions[None], heads[:, None]).flatten()
        rows = self.rows(layer)
        rows[:, : k.shape[2]].index_copy_(0, index, k.flatten(0, 1))
        rows[:, : v.shape[2]].index_copy_(0, index + self.geometry.page, v.flatten(0, 1))

    def dense(self, layer: int, tokens: int, page: int = 0) -> tuple[Tensor, Tensor]:
        """Keys ``[H, n, d_k]`` and values ``[H, n, d_v]`` of tokens from ``page`` up to ``tokens``, on the device."""
        g = self.geometry
        pages = self._aliases[layer][page : g.pages(tokens)]
        heads_first = pages.permute(2, 1, 0, 3, 4).reshape(2, g.kv_heads, -1, g.d)[:, :, : tokens - page * g.page]
        return heads_first[0, :, :, : g.d_k], heads_first[1, :, :, : g.d_v]

    def _allocate(self, pages: int) -> None:
        g = self.geometry
        shape = (pages, g.kv_heads, 2, g.page, g.d)
        used = g.pages(self.total)
        for index in range(g.layers):
            layer = self._empty(shape)
            if self.layers and index < len(self.layers):
                layer[:used] = self.layers[index][:used]
                self.layers[index] = layer
                self._aliases[index] = _alias(layer, self.device)
            else:
                self.layers.append(layer)
                self._aliases.append(_alias(layer, self.device))

    def _empty(self, shape: tuple[int, ...]) -> Tensor:
        # Zeroed, because recall copies whole pages and the tail of the last one must be finite.
        try:
            return torch.zeros(shape, dtype=self.geometry.dtype, pin_memory=self.device.type == "cuda")
        except (RuntimeError, MemoryError) as error:
            tokens = shape[0] * self.geometry.page
            size = tokens * self.geometry.token_bytes / 2**30
            raise DoesNotFitError(
                "There is not enough host memory for the conversation.",
                f"K/V of {tokens:,} tokens take {size:.2f} GiB of {'pinned ' * (self.device.type == 'cuda')}memory: "
                f"{str(error).splitlines()[0]}",
                "Shorten the conversation or free memory; what is stored is kept.",
            ) from error


class _CudaArray:
    """Names pinned host memory to CUDA, by the array interface that torch reads."""

    def __init__(self, tensor: Tensor) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (tensor.nbytes,),
            "typestr": "|u1",
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }


def _alias(layer: Tensor, device: torch.device) -> Tensor:
    """The same bytes as a tensor of ``device``: pinned memory is addressable from CUDA (no copy)."""
    if device.type != "cuda":
        return layer
    return torch.as_tensor(_CudaArray(layer), device=device).view(layer.dtype).view(layer.shape)
