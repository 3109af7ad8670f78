"""The host pool of a conversation whose full pages are stored in 8 bits.

A page is written in full precision, token by token, and quantized when it is full. So pages are in two pools:
``eight_bit`` has the quantized pages; the full-precision pool has the page that is not full, and pages that became full
while 8 bits were off. A conversation can mix them in any order. ``places [page]`` (int64, on the device) says where
each page is: its index in the full-precision pool or, as ``~index``, in ``eight_bit``.

If a truncation cuts into an 8-bit page, the page is dequantized before tokens are appended to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set

import torch
from torch import Tensor

from kvchat.kv.memory import eight_bit_pages
from kvchat.kv.memory.host_pool import HostPool, QuantizedByPage, gather, scatter
from kvchat.kv.memory.pages import Pages, copied


class EightBitPool(HostPool):
    """Takes over the contents of ``pool``, between two steps; while it ``quantizes``, pages that get full become 8-bit.

    ``reserve(tokens)`` also plans the places of the pages that a forward up to ``tokens`` writes. Setting ``total`` to
    that number adds these pages to the conversation; until then no stored token is overwritten.

    Raises:
        DoesNotFitError: there is not enough RAM for the first 8-bit page.
    """

    def __init__(self, pool: HostPool, quantizes: bool = True) -> None:
        g = pool.geometry
        self.eight_bit = HostPool(g, pool.device, pool.reserved - 1, pool.registrar, QuantizedByPage(g))
        self.quantizes = quantizes
        self._total = pool.total
        self._taken_over = tuple(name for name in vars(pool) if name != "total")
        vars(self).update({name: getattr(pool, name) for name in self._taken_over})
        self._pages = list(range(g.pages(pool.total)))
        self._dequantized: set[int] = set()
        self._free = FreeList(len(self._pages))
        self._free_quantized = FreeList(0)
        with torch.inference_mode(False):  # written to inside and outside inference mode
            self.places = torch.zeros(g.pages(self.reserved), dtype=torch.int64, device=self.device)
            self.next_quantized = torch.zeros(1, dtype=torch.int64, device=self.device)
            self._share = torch.zeros((), dtype=torch.float64, device=self.device)
        # How many pages' places are on the device, and the value of ``next_quantized`` there.
        self._published = self._published_next = 0

    # ---- what is stored

    @property
    def total(self) -> int:
        """Number of stored tokens; it grows to the number that was reserved last."""
        return self._total

    @total.setter
    def total(self, tokens: int) -> None:
        if tokens <= self._total:
            self.truncate(tokens)
            return
        if len(self._pages) > self.geometry.pages(self._total):  # ``put`` has added pages
            self._total = tokens
            self.truncate(tokens)
            return
        first, coming = self._total // self.geometry.page, self._planned(tokens)
        before, self._pages[first:] = self._pages[first:], coming
        if before != coming[: len(before)]:
            self._published = min(self._published, first)
        self._give_back(set(before) - set(coming))
        self._take(set(coming) - set(before))
        self._total = tokens

    def truncate(self, tokens: int) -> None:
        self._total = min(tokens, self._total)
        self._keep(self.geometry.pages(self._total))

    def _keep(self, pages: int) -> None:
        self._give_back(self._pages[pages:])
        del self._pages[pages:]
        self._published = min(self._published, pages)
        self._dequantized = {page for page in self._dequantized if page < pages}

    @property
    def quantized(self) -> list[bool]:
        return [place < 0 for place in self._pages]

    def full_precision_pool(self) -> HostPool:
        """Return a full-precision pool in the same memory; no page may be in 8 bits, and so all are in order."""
        pool = object.__new__(HostPool)
        vars(pool).update({name: getattr(self, name) for name in self._taken_over})
        pool.total = self._total
        return pool

    @property
    def dequantized(self) -> Set[int]:
        return self._dequantized

    @property
    def quantized_pages(self) -> list[int]:
        """The pages that are 8-bit, or were until a truncation cut into them."""
        return [page for page, place in enumerate(self._pages) if place < 0 or page in self._dequantized]

    @property
    def has_quantized(self) -> bool:
        """True if ``quantized_pages`` is not empty; looks at no page, because every step asks for it."""
        return bool(self._dequantized or self._free_quantized.used)

    @property
    def room(self) -> int:
        return self.capacity + self.eight_bit.capacity

    @property
    def nbytes(self) -> int:
        return self._committed + self.eight_bit.nbytes

    @property
    def pinned(self) -> bool:
        return super().pinned and self.eight_bit.pinned

    @property
    def badges(self) -> tuple[str, ...]:
        return super().badges or self.eight_bit.badges

    def graph_buffers(self) -> list[Tensor]:
        own = [self.places, self.next_quantized, self._share]
        return [*super().graph_buffers(), *self.eight_bit.graph_buffers(), *own]

    # ---- memory

    def reserve(self, tokens: int) -> bool:
        new = self.geometry.pages(tokens) - len(self._pages) + 2  # one for a dequantized page, one being written
        full = max(0, tokens // self.geometry.page - self._total // self.geometry.page)
        moved = super().reserve(self._free.after(new if not self.quantizes else 2) * self.geometry.page)
        # One more, because every step writes an 8-bit page, which counts only if its token filled the page.
        moved |= self._reserve_quantized((full if self.quantizes else 0) + 1)
        if tokens > self._total and self._total % self.geometry.page and self._pages[-1] < 0:
            self._dequantize_last()
        self._publish(self._planned(tokens))
        return moved

    def _reserve_quantized(self, pages: int) -> bool:
        """Make room for ``pages`` more 8-bit pages; True if their views changed."""
        p = self.geometry.page
        self.eight_bit.total = self._free_quantized.after(0) * p  # the part to copy if it has to move
        return self.eight_bit.reserve(self._free_quantized.after(pages) * p)

    def _planned(self, tokens: int) -> list[int]:
        """Return the places of the pages from the next token's on, once ``tokens`` are stored."""
        p = self.geometry.page
        first, full = self._total // p, tokens // p - self._total // p
        opened = self._pages[first:]
        if not self.quantizes or full <= 0:
            new = self.geometry.pages(tokens) - first - len(opened)
            return opened + self._free.lowest(max(0, new))
        return [~index for index in self._free_quantized.lowest(full)] + self._free.lowest(1 if tokens % p else 0)

    def _dequantize_last(self) -> None:
        """Dequantize the last page, into which a truncation cut, so that tokens can be appended."""
        index, (place,) = self._pages[-1], self._free.lowest(1)
        for layer in range(self.geometry.layers):
            page = eight_bit_pages.dequantize(self.eight_bit.table(layer)[~index], self.geometry)
            self.table(layer)[place] = page
        self._pages[-1] = place
        self._published = min(self._published, len(self._pages) - 1)
        self._dequantized.add(len(self._pages) - 1)
        self._free.take([place])
        self._free_quantized.give_back([~index])

    def _publish(self, coming: list[int]) -> None:
        """Copy the places of new pages to the device, including a page that the next token opens."""
        opened = [] if self._total % self.geometry.page else [place for place in coming[:1] if place >= 0]
        first, end = min(self._published, len(self._pages)), len(self._pages) + len(opened)
        if end > len(self.places):
            more = self.geometry.pages(self.geometry.grown(end * self.geometry.page)) - len(self.places)
            with torch.inference_mode(False):
                self.places = torch.nn.functional.pad(self.places, (0, more))
        if new := self._pages[first:] + opened:
            self._share.fill_(self._free_quantized.used / end)
            self.places[first:end] = torch.tensor(new, device=self.device)
        self._published = end
        (next_quantized,) = self._free_quantized.lowest(1)
        if next_quantized != self._published_next:
            self.next_quantized.fill_(next_quantized)
            self._published_next = next_quantized

    @property
    def _used(self) -> int:
        return self._free.after(0)

    def _take(self, places: Iterable[int]) -> None:
        places = list(places)
        self._free.take(place for place in places if place >= 0)
        self._free_quantized.take(~place for place in places if place < 0)

    def _give_back(self, places: Iterable[int]) -> None:
        places = list(places)
        self._free.give_back(place for place in places if place >= 0)
        self._free_quantized.give_back(~place for place in places if place < 0)

    # ---- reading and writing between steps

    def append(self, layer: int, start: int, k: Tensor, v: Tensor) -> None:
        """Write new tokens to the pages that ``reserve`` planned; earlier tokens in the same page are kept."""
        g, p = self.geometry, self.geometry.page
        head, tokens = start % p, start % p + k.shape[1]
        rows = k.new_zeros((2, g.kv_heads, tokens, g.d))
        if head:
            rows[:, :, :head] = self.table(layer)[self._pages[-1]][:, :, :head].transpose(0, 1)
        rows[0, :, head:, : g.d_k], rows[1, :, head:, : g.d_v] = k, v
        full = tokens // p
        pages = rows[:, :, : full * p].reshape(2, g.kv_heads, full, p, g.d).permute(2, 1, 0, 3, 4)
        coming = self._planned(start + k.shape[1])
        places = torch.tensor(coming[:full], dtype=torch.int64, device=k.device)
        if full and coming[0] < 0:
            scatter(self.eight_bit.table(layer), ~places, eight_bit_pages.quantize(pages, g))
        elif full:
            scatter(self.table(layer), places, pages)
        if rest := tokens % p:
            self.table(layer)[coming[full]][:, :, :rest] = rows[:, :, full * p :].transpose(0, 1)

    def stored(self, page: int) -> list[Tensor]:
        place = self._pages[page]
        layers, index = (self.layers, place) if place >= 0 else (self.eight_bit.layers, ~place)
        return [layer[index] for layer in layers]

    def copied(self, first: int) -> Pages:
        places = self._pages[first:]
        return Pages(
            [place < 0 for place in places],
            copied(self.layers, [place for place in places if place >= 0]),
            copied(self.eight_bit.layers, [~place for place in places if place < 0]),
            {page - first for page in self._dequantized if page >= first},
        )

    def put(self, first: int, pages: Pages) -> None:
        """Replace all pages from page ``first`` on by ``pages`` of both kinds.

        Raises:
            DoesNotFitError: there is not enough RAM.
        """
        self._keep(first)
        self._total = min(self._total, first * self.geometry.page)
        quantized = sum(pages.quantized)
        full_precision = len(pages.quantized) - quantized
        super().reserve(self._free.after(full_precision) * self.geometry.page)
        self._reserve_quantized(quantized)
        of_full_precision, of_quantized = self._free.lowest(full_precision), self._free_quantized.lowest(quantized)
        for layers, index, kept in (
            (self.layers, of_full_precision, pages.full_precision),
            (self.eight_bit.layers, of_quantized, pages.eight_bit),
        ):
            where = torch.tensor(index, dtype=torch.int64)
            for layer, blocks in zip(layers, kept, strict=True) if index else ():
                layer.index_copy_(0, where, blocks)
        places = iter(of_full_precision), (~index for index in of_quantized)
        new = [next(places[kind]) for kind in pages.quantized]
        self._take(new)
        self._pages += new
        self._dequantized |= {first + page for page in pages.dequantized}

    def dense(self, layer: int, tokens: int, page: int = 0) -> tuple[Tensor, Tensor]:
        """``HostPool.dense`` of stored tokens, as a dequantized copy."""
        g = self.geometry
        places = torch.tensor(self._pages[page : g.pages(tokens)], dtype=torch.int64, device=self.device)
        whole = torch.empty((2, g.kv_heads, len(places), g.page, g.d), dtype=g.dtype, device=self.device)
        pages = whole.permute(2, 1, 0, 3, 4)
        for at, table, read in (
            (places >= 0, self.table(layer), lambda stored, _: stored),
            (places < 0, self.eight_bit.table(layer), eight_bit_pages.dequantize),
        ):
            where = at.nonzero().flatten()
            if len(where):
                index = places[where]
                pages[where] = read(gather(table, torch.where(index < 0, ~index, index)), g)
        heads_first = whole.flatten(2, 3)[:, :, : tokens - page * g.page]
        return heads_first[0, :, :, : g.d_k], heads_first[1, :, :, : g.d_v]

    # ---- which tokens are quantized

    def quantized_at(self, positions: Tensor) -> Tensor:
        return self._locate(positions)[0] < 0

    @property
    def quantized_share(self) -> Tensor:
        return self._share

    # ---- reading in a step: with fixed shapes on a GPU

    def row_index(self, positions: Tensor, heads: Tensor) -> Tensor:
        place, offset = self._locate(positions)
        return super().row_index(place.clamp(min=0) * self.geometry.page + offset, heads)

    def read_pages(self, layer: int, pages: Tensor, heads: Tensor) -> Tensor:
        """Return K and V ``[2, m, p, d]`` of ``pages [m]`` in KV ``heads [m]``, on the device."""
        places = self.places[pages]

        def full_precision(place: Tensor, head: Tensor) -> Tensor:
            return self.table(layer)[place, head]

        def quantized(place: Tensor, head: Tensor) -> Tensor:
            return eight_bit_pages.dequantize(self.eight_bit.table(layer)[place, head], self.geometry)

        return self._read_either(places, full_precision, quantized, heads).transpose(0, 1)

    def read_tokens(self, layer: int, positions: Tensor, heads: Tensor) -> Tensor:
        """Return K and V ``[2, m, d]`` of tokens ``positions [m]`` in KV ``heads [m]``, on the device."""
        places, offsets = self._locate(positions)

        def full_precision(place: Tensor, head: Tensor, offset: Tensor) -> Tensor:
            return self.table(layer)[place, head, :, offset]

        def quantized(place: Tensor, head: Tensor, offset: Tensor) -> Tensor:
            codes, of_keys, of_values = eight_bit_pages.parts(self.eight_bit.table(layer), self.geometry)
            scale_v = of_values[place, head, offset].unsqueeze(-1)
            scales = torch.stack((of_keys[place, head], scale_v.expand(-1, self.geometry.d)), 1)
            return eight_bit_pages.scaled(codes[place, head, :, offset], scales)

        return self._read_either(places, full_precision, quantized, heads, offsets).transpose(0, 1)

    def _locate(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the places of the pages of ``positions``, and the offsets of the tokens within their pages."""
        page = torch.div(positions, self.geometry.page, rounding_mode="floor")
        return self.places[page], positions % self.geometry.page

    def _read_either(
        self, places: Tensor, full_precision: Callable[..., Tensor], quantized: Callable[..., Tensor], *where: Tensor
    ) -> Tensor:
        """Read each of ``places [m]`` with the function for its kind; on a GPU run both, to avoid a synchronization."""
        is_full_precision, held = places >= 0, self.table(0).device
        index, where = torch.where(is_full_precision, places, ~places).to(held), tuple(x.to(held) for x in where)
        if self.device.type == "cpu" and bool(is_full_precision.all()):
            return full_precision(index, *where)
        if self.device.type == "cpu" and not bool(is_full_precision.any()):
            return quantized(index, *where)
        is_full_precision = is_full_precision.to(held)
        zero = torch.zeros_like(index)
        one = full_precision(torch.where(is_full_precision, index, zero), *where)
        other = quantized(torch.where(is_full_precision, zero, index), *where)
        chosen = torch.where(is_full_precision.view(-1, *[1] * (one.dim() - 1)), one, other)
        return chosen.to(self.device)


class FreeList:
    """The free indices of a table: those given back, and all from ``end`` on."""

    def __init__(self, end: int) -> None:
        self._end = end
        self._returned: list[int] = []  # ascending

    @property
    def used(self) -> int:
        return self._end - len(self._returned)

    def lowest(self, number: int) -> list[int]:
        """Return the ``number`` lowest free indices, ascending."""
        found = self._returned[:number]
        return [*found, *range(self._end, self._end + number - len(found))]

    def after(self, number: int) -> int:
        """Return the length of the table once ``number`` more indices are taken."""
        return self._end + max(0, number - len(self._returned))

    def take(self, indices: Iterable[int]) -> None:
        """Mark ``indices``, which ``lowest`` returned, as used."""
        for index in sorted(indices):
            if index < self._end:
                self._returned.remove(index)  # fast, because it is one of the first
            else:
                assert index == self._end
                self._end += 1

    def give_back(self, indices: Iterable[int]) -> None:
        self._returned.extend(indices)
        self._returned.sort()
