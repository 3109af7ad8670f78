"""Prefill: its memory, and how new tokens are stored and attend to all earlier tokens.

A GPU holds one layer's K/V at a time: while a layer computes, its new K/V are copied to the host pool and the next
layer's earlier K/V from it. This takes three buffers of one layer. Two have the host pool's layout, so that copy
engines move whole pages; a kernel that gathers them would occupy all multiprocessors for as long as the link is busy.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvchat.errors import DoesNotFitError
from kvchat.kv.attention import PREFILL_WORKSPACE
from kvchat.kv.geometry import Geometry
from kvchat.kv.memory import available
from kvchat.kv.memory.eight_bit_pool import EightBitPool
from kvchat.kv.memory.host_pool import HostPool, copy_segments
from kvchat.kv.transfer import SideStream
from kvchat.units import count, size

# Tokens per prefill forward on a GPU. Fewer do not keep it busy; with more, a person who cancels waits too long, and
# earlier K/V is read only a little less often.
CHUNKS = (512, 1024, 2048, 4096, 8192, 16384)


def staging_bytes(geometry: Geometry, stored: int, new: int) -> int:
    """Return the device bytes of ``StagedPrefill`` for ``new`` tokens after ``stored`` ones."""
    pages = geometry.pages(stored + new)
    changed = pages - stored // geometry.page
    return (pages + geometry.pages(stored) + changed) * geometry.page_bytes


def prefill_bytes(geometry: Geometry, stored: int, new: int, token_bytes: int) -> int:
    """Return the device bytes of one forward of ``new`` tokens after ``stored`` ones, without weights and slots.

    ``token_bytes`` is what the model's layers need per new token.
    """
    return staging_bytes(geometry, stored, new) + new * token_bytes + PREFILL_WORKSPACE


def prefill_chunk(geometry: Geometry, stored: int, new: int, token_bytes: int, devices: Sequence[torch.device]) -> int:
    """Return how many of the ``new`` tokens after ``stored`` ones to prefill at a time; ``token_bytes`` as above.

    This is the largest of ``CHUNKS`` that takes at most half of the free memory, which allows for fragmentation; the
    smallest may take all of it. The first of ``devices`` has the K/V, and all have layers.

    Raises:
        DoesNotFitError: not even the smallest chunk fits.
    """
    free, *others = (available.usable(available.free_bytes(device)) for device in devices)
    most = min(others, default=free) // 2

    def needed(chunk: int) -> int:
        last = min(chunk, new)
        return prefill_bytes(geometry, stored + new - last, last, token_bytes)

    least = CHUNKS[0]
    if needed(least) > free:
        raise DoesNotFitError(
            "There is not enough memory to process the prompt.",
            f"{count(new, 'token')} after {stored:,} stored ones, {least} at a time, need {size(needed(least), 2)} on "
            f"{devices[0]}: {size(staging_bytes(geometry, stored, new), 2)} for a copy of one layer's K/V, the rest "
            f"for intermediate results. Only {size(free, 2)} are free.",
            "Use a mode with a budget (streaming, speculative), a smaller budget or a shorter prompt.",
        )
    fitting = (chunk for chunk in CHUNKS if needed(chunk) <= free // 2 and min(chunk, new) * token_bytes <= most)
    return max(fitting, default=least)


def prefill_over(host: HostPool, tokens: int, first: int = 0) -> Prefill:
    """Return a prefill of ``tokens`` new tokens, reserved in ``host``, that reads stored tokens from ``first`` on."""
    if host.device.type == "cuda" and not isinstance(host, EightBitPool):
        return StagedPrefill(host, tokens, first)
    return DirectPrefill(host, first)


class DirectPrefill:
    """Reads the host pool directly on a CPU; with 8-bit pages, dequantizes each layer when it begins.

    New tokens are read in full precision, earlier ones as stored.
    """

    def __init__(self, host: HostPool, first: int = 0) -> None:
        self._host = host
        self._start, self._first = host.total, first

    def extended(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store the layer's new tokens, ``key [H, n, d_k]`` and ``value [H, n, d_v]``; call this layer by layer.

        Returns keys ``[H, start + n - first, d_k]`` and values of the tokens from ``first`` on, valid until the next
        layer's call.
        """
        host = self._host
        if not self._start:
            host.append(layer, 0, key, value)
            return key, value
        if not isinstance(host, EightBitPool):  # stored tokens can be read in place
            host.append(layer, self._start, key, value)
            keys, values = host.dense(layer, self._start + key.shape[1])
            return keys[:, self._first :], values[:, self._first :]
        page, offset = divmod(self._first, host.geometry.page)
        keys, values = (part[:, offset:] for part in host.dense(layer, self._start, page))
        host.append(layer, self._start, key, value)
        return torch.cat((keys, key), 1), torch.cat((values, value), 1)

    def close(self) -> None:
        """End the prefill, also after a failure; on return all writes have reached the host pool."""


class StagedPrefill:
    """Holds one layer's K/V on the device while the next layer's are copied there.

    Attention reads ``all [2, H, tokens, d]``, which begins with the page of the first token that is read. ``earlier``
    and ``new`` ``[page, H, 2, p, d]`` hold stored pages from the host and changed pages for it; a partly filled page is
    in both. ``staging_bytes`` predicts their size.
    """

    def __init__(self, host: HostPool, tokens: int, first: int = 0) -> None:
        g = host.geometry
        self._host = host
        self._page, self._first = divmod(first, g.page)
        offset = self._page * g.page
        self._start, self._end = host.total - offset, host.total + tokens - offset
        self._changed, pages = self._start // g.page, g.pages(self._end)
        # Zeros, because the unused end of the last page is written to the host too, and recall copies whole pages.
        self.all = torch.zeros((2, g.kv_heads, pages * g.page, g.d), dtype=g.dtype, device=host.device)
        shape = (g.kv_heads, 2, g.page, g.d)
        self.earlier = self.all.new_empty((g.pages(self._start), *shape))
        self.new = self.all.new_empty((pages - self._changed, *shape))
        self._side_stream = SideStream(host.device)
        self._fetched = -1

    def extended(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        g = self._host.geometry
        if layer != self._fetched:
            self._fetch(layer)
        self._side_stream.join()
        pages = self.all.view(2, g.kv_heads, -1, g.page, g.d).permute(2, 1, 0, 3, 4)
        pages[: len(self.earlier)].copy_(self.earlier)
        keys, values = self.all[0, :, : self._end, : g.d_k], self.all[1, :, : self._end, : g.d_v]
        keys[:, self._start :].copy_(key)
        values[:, self._start :].copy_(value)
        self.new.copy_(pages[self._changed :])
        with self._side_stream():
            first, last = self._page + self._changed, self._page + len(pages)
            copy_segments(self._host.segments(layer, first, last), self.new, to_device=False)
        if layer + 1 < g.layers:
            self._fetch(layer + 1)
        return keys[:, self._first :], values[:, self._first :]

    def close(self) -> None:
        self._side_stream.join()

    def _fetch(self, layer: int) -> None:
        with self._side_stream():
            last = self._page + len(self.earlier)
            copy_segments(self._host.segments(layer, self._page, last), self.earlier, to_device=True)
        self._fetched = layer


Prefill = DirectPrefill | StagedPrefill
