"""The host pool: every token's K and V, in every mode, always complete.

One array ``[page, H, 2, p, d]`` per layer, contiguous, so that one (page, head) is one block of K then V. A new
token's K/V is written through as soon as it is computed; leaving the device then costs nothing.

Each layer lies in one ``PinnedRegion``: its address space is reserved for the model's context and its memory committed
from the front as the conversation grows. Addresses stay, so views and captured CUDA graphs stay valid, and the device
reads and writes the pool through an alias of the same bytes. Where pinning fails the pool stays pageable: the
same calls gather on the CPU and copy, which is slow but right, and cannot be captured.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvchat import units
from kvchat.errors import DoesNotFitError
from kvchat.kv.geometry import Geometry
from kvchat.kv.memory import available
from kvchat.kv.memory.pinned import CudaArray, CudaRegistrar, PinnedRegion, Registrar, in_system_pages

# Pinned in steps that double up to this many bytes over all layers: a step costs a call per layer and about 0.5 s/GiB.
STEP_BYTES = 256 * 2**20


class HostPool:
    """Pages of all layers. ``total`` tokens are stored; memory grows in place up to ``context`` tokens.

    ``pageable_reason`` says why the device cannot address the pool; empty where it does.

    Raises:
        DoesNotFitError: the host has no memory for an empty conversation.
    """

    def __init__(
        self, geometry: Geometry, device: torch.device, context: int = 0, registrar: Registrar | None = None
    ) -> None:
        self.geometry = geometry
        self.device = device
        self.total = 0
        self.pageable_reason = ""
        self._registrar = CudaRegistrar(device) if registrar is None and device.type == "cuda" else registrar
        self._step = STEP_BYTES // geometry.token_bytes if self._registrar else 0
        self._page_bytes = geometry.kv_heads * 2 * geometry.page * geometry.row_bytes
        least = self._bytes(geometry.grown(0))
        # One more than the context: a full one still makes room for the next token.
        self._regions = self._reserved(max(least, self._bytes(context + 1)), least)
        self._extend(self._affordable(least, least))
        self._tables = [self._table(region) for region in self._regions]

    # ---- room

    @property
    def capacity(self) -> int:
        """Tokens there is memory for."""
        return self._regions[0].committed // self._page_bytes * self.geometry.page

    @property
    def reserved(self) -> int:
        """Tokens there is address space for: so many fit before the pool moves."""
        return self._regions[0].size // self._page_bytes * self.geometry.page

    @property
    def nbytes(self) -> int:
        """Bytes of memory taken."""
        return sum(region.committed for region in self._regions)

    @property
    def pinned(self) -> bool:
        """True if the device addresses the pool itself; otherwise nothing that uses the pool can be captured."""
        return not self.pageable_reason

    @property
    def badges(self) -> tuple[str, ...]:
        """Warnings about how the pool is kept, for the screen."""
        return (f"pageable host memory: {self.pageable_reason}",) if self.pageable_reason else ()

    def reserve(self, tokens: int) -> bool:
        """Make room for ``tokens`` in all; True when the views changed: the pool moved, or is no longer pinned.

        Raises:
            DoesNotFitError: the host has no memory for it; what is stored is unchanged.
        """
        if tokens <= self.capacity:
            return False
        was_pinned, moves = self.pinned, tokens > self.reserved
        wanted = max(self.geometry.grown(tokens), self.capacity + min(self.capacity, self._step))
        if moves:
            self._move(self._bytes(tokens), self._bytes(wanted))
        else:
            self._extend(self._affordable(self._bytes(tokens), self._bytes(min(wanted, self.reserved))))
        return moves or self.pinned != was_pinned

    def truncate(self, tokens: int) -> None:
        """Forget all but the first ``tokens``; memory is kept for what comes next."""
        self.total = min(self.total, tokens)

    def settle(self) -> None:
        """Wait until what steps wrote through has arrived in host memory."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    # ---- views: of ``device`` where pinned, else of the CPU; ``gather`` and ``scatter`` take both

    @property
    def layers(self) -> list[Tensor]:
        """What there is memory for, in host memory: ``[page, H, 2, p, d]`` a layer."""
        pages = self.capacity // self.geometry.page
        return [self._pages(region)[:pages] for region in self._regions]

    def rows(self, layer: int) -> Tensor:
        """The layer's address space, one row per token and head of K or V: ``[page * H * 2 * p, d]``."""
        return self._tables[layer].view(-1, self.geometry.d)

    def blocks(self, layer: int) -> Tensor:
        """The layer's address space, one row per (page, head, K or V): ``[page * H * 2, p * d]``."""
        return self._tables[layer].view(-1, self.geometry.page * self.geometry.d)

    def segments(self, layer: int, first: int, last: int) -> list[Tensor]:
        """Pages ``first`` up to ``last`` in host memory, uint8, cut where a ``cudaMemcpy`` may not go across."""
        return self._regions[layer].segments(first * self._page_bytes, last * self._page_bytes)

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
        scatter(rows[:, : k.shape[2]], index, k.flatten(0, 1))
        scatter(rows[:, : v.shape[2]], index + self.geometry.page, v.flatten(0, 1))

    def dense(self, layer: int, tokens: int, page: int = 0) -> tuple[Tensor, Tensor]:
        """Keys ``[H, n, d_k]`` and values ``[H, n, d_v]`` of tokens from ``page`` up to ``tokens``, on the device."""
        g = self.geometry
        pages = self._tables[layer][page : g.pages(tokens)].to(self.device)
        heads_first = pages.permute(2, 1, 0, 3, 4).reshape(2, g.kv_heads, -1, g.d)[:, :, : tokens - page * g.page]
        return heads_first[0, :, :, : g.d_k], heads_first[1, :, :, : g.d_v]

    # ---- inside

    def _bytes(self, tokens: int) -> int:
        """Bytes of one layer for ``tokens``, in whole system pages."""
        return in_system_pages(self.geometry.pages(tokens) * self._page_bytes)

    def _affordable(self, least: int, wanted: int, beside: int = 0) -> int:
        """``wanted`` bytes a layer, or ``least`` where the host has no memory for more; ``beside`` is needed meanwhile.

        Raises:
            DoesNotFitError: nor for that.
        """
        free, taken = available.usable(available.host_free()), self.nbytes
        for size in (wanted, least):
            if size * self.geometry.layers - taken + beside <= free:
                return size
        raise self._does_not_fit(
            least, f"{units.size(taken, 2)} of it are held and {units.size(free, 2)} more are free."
        )

    def _reserved(self, wanted: int, least: int) -> list[PinnedRegion]:
        """Fresh address space of ``wanted`` bytes a layer, or ``least`` where the system gives no more.

        Raises:
            DoesNotFitError: nor that.
        """
        reason = ""
        for size in (wanted, least):
            try:
                return [PinnedRegion(size) for _ in range(self.geometry.layers)]
            except OSError as error:
                reason = f"the system gives no address space for it: {error.strerror}."
        raise self._does_not_fit(least, reason)

    def _extend(self, size: int) -> None:
        """Take memory for ``size`` bytes in each layer, in place."""
        for region in self._regions:
            self._commit(region, size)

    def _move(self, least: int, wanted: int) -> None:
        """Beyond the reservation: twice the address space, and a copy, a layer at a time."""
        size = self._affordable(least, wanted, beside=self._regions[0].committed)
        used = self.geometry.pages(self.total) * self._page_bytes
        self.settle()
        for layer, region in enumerate(self._reserved(2 * size, size)):
            self._commit(region, size)
            region.bytes[:used] = self._regions[layer].bytes[:used]
            self._regions[layer], self._tables[layer] = region, self._table(region)

    def _commit(self, region: PinnedRegion, size: int) -> None:
        """Take memory for the first ``size`` bytes of a region and pin it; where that fails all becomes pageable."""
        segment = region.commit(size)
        if self._registrar is None or self.pageable_reason:
            return
        try:
            region.register(self._registrar, segment)
        except RuntimeError as error:
            self.pageable_reason = str(error)
            for each in self._regions:
                each.unregister()
            self._tables = [self._table(each) for each in self._regions]

    def _pages(self, region: PinnedRegion) -> Tensor:
        """The region in host memory, ``[page, H, 2, p, d]``."""
        g = self.geometry
        pages = region.size // self._page_bytes
        held = region.bytes[: pages * self._page_bytes].view(g.dtype)
        return held.view(pages, g.kv_heads, 2, g.page, g.d)

    def _table(self, region: PinnedRegion) -> Tensor:
        """The region as the device sees it, ``[page, H, 2, p, d]``; as the CPU does where it is pageable."""
        pages = self._pages(region)
        if self.device.type != "cuda" or self.pageable_reason:
            return pages
        with torch.inference_mode(False):
            seen = torch.as_tensor(CudaArray(region), device=self.device)
        return seen[: pages.nbytes].view(pages.dtype).view(pages.shape)

    def _does_not_fit(self, size: int, reason: str) -> DoesNotFitError:
        tokens = size // self._page_bytes * self.geometry.page
        return DoesNotFitError(
            "There is not enough host memory for the conversation.",
            f"K/V of {tokens:,} tokens take {units.size(size * self.geometry.layers, 2)}; {reason}",
            "Shorten the conversation or free memory; what is stored is kept.",
        )


def gather(view: Tensor, index: Tensor) -> Tensor:
    """Rows of a pool's view at ``index [m]`` (int64), on the device of ``index``."""
    return view.index_select(0, index.to(view.device)).to(index.device)


def scatter(view: Tensor, index: Tensor, rows: Tensor) -> None:
    """Write ``rows`` to a pool's view at ``index [m]`` (int64)."""
    view.index_copy_(0, index.to(view.device), rows.to(view.device))
