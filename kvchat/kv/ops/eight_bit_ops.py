"""Operations of a decode step over a host pool with 8-bit pages, in plain torch.

The token that fills a page quantizes it. Slots hold full precision: as computed if the token was written in its own
step, dequantized if it was recalled. On a CPU, full and freeze mode read the codes in place: at 8,018 stored tokens of
the bundled model, on one thread, a step takes 1.2 to 1.3 times the CPU time of full-precision pages. Without numba,
torch first unpacks all pages of a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvchat.kv.attention import Products, products
from kvchat.kv.memory import eight_bit_pages
from kvchat.kv.memory.device_slots import DeviceSlots
from kvchat.kv.memory.eight_bit_pool import EightBitPool
from kvchat.kv.memory.host_pool import gather, scatter
from kvchat.kv.ops.cpu_ops import CpuOps, mixed
from kvchat.kv.ops.torch_ops import TorchOps


class EightBitOps(TorchOps):
    """``TorchOps`` for an ``EightBitPool``. If values may not be read back, both kinds of page are read every time."""

    host: EightBitPool

    @property
    def badges(self) -> tuple[str, ...]:
        return (*super().badges, "8-bit pages with stock torch operations")

    def begin_step(self, position: Tensor) -> None:
        super().begin_step(position)
        page = torch.div(position, self.geometry.page, rounding_mode="floor").view(1)
        self._open_page = self.host.places.index_select(0, page)

    def append(self, held: Sequence[DeviceSlots], layer: int, key: Tensor, value: Tensor) -> None:
        super().append(held, layer, key, value)
        if self._fills_page():
            page = gather(self.host.table(layer), self._open_page)
            blocks = eight_bit_pages.quantize(page, self.geometry)
            scatter(self.host.eight_bit.table(layer), self.host.next_quantized, blocks)

    def _fills_page(self) -> bool:
        """Return True if the token may have filled its page. An 8-bit page written too early is never read."""
        return True

    def _stored(self, layer: int, tokens: Tensor, heads: Tensor) -> Sequence[Tensor]:
        shape = len(heads), tokens.shape[-1]
        found = self.host.read_tokens(layer, tokens.expand(shape).flatten(), heads.expand(shape).flatten())
        return found.view(2, *shape, -1).unbind()

    # ---- recall

    def _bring_pages(self, slots: DeviceSlots, layer: int, pages: Tensor, heads: Tensor, changed: Tensor) -> None:
        to = slots.blocks(layer), slots.page_blocks, len(pages) * slots.n // self.geometry.page
        self._copy_in(self.host.read_pages, layer, pages, heads, *to, changed)

    def _bring_tokens(
        self, slots: DeviceSlots, layer: int, positions: Tensor, heads: Tensor, target: Tensor, changed: Tensor
    ) -> None:
        to = slots.rows(layer), target, len(target) * slots.n
        self._copy_in(self.host.read_tokens, layer, positions, heads, *to, changed)

    def move_picked(self, slots: DeviceSlots, layer: int, rows: Tensor, positions: Tensor, targets: Tensor) -> None:
        heads = slots.heads_of(layer)
        to = slots.rows(layer), rows * slots.n + targets, len(heads) * slots.n
        self._copy_in(
            self.host.read_tokens, layer, positions, heads[rows], *to, torch.ones_like(rows, dtype=torch.bool)
        )

    def _copy_in(
        self,
        read: Callable[[int, Tensor, Tensor], Tensor],
        layer: int,
        numbers: Tensor,
        heads: Tensor,
        slots: Tensor,
        target: Tensor,
        v_target: int,
        changed: Tensor,
    ) -> None:
        """Copy pages or tokens ``numbers`` of ``heads`` to rows ``target`` where ``changed`` (all broadcast)."""
        shape = target.shape
        numbers, heads, target, changed = (x.expand(shape).flatten() for x in (numbers, heads, target, changed))
        picks = self.reads_back or not self.host.pinned
        if picks:
            numbers, heads, target = numbers[changed], heads[changed], target[changed]
        both = torch.cat((target, target + v_target))
        fresh = read(layer, numbers, heads).reshape(len(both), slots.shape[1])
        if not picks:
            fresh = torch.where(changed.repeat(2)[:, None], fresh, slots.index_select(0, both))
        slots.index_copy_(0, both, fresh)


class EightBitCpuOps(EightBitOps, CpuOps):
    """``EightBitOps`` that may read tensor values. Full mode attends to the host pool in place."""

    attends_as_it_chooses = False
    move_pages = TorchOps.move_pages  # the loop of ``CpuOps`` copies only full-precision pages

    def begin_step(self, position: Tensor) -> None:
        super().begin_step(position)
        self._places = self.host.places[: self.geometry.pages(self._now + 1)]

    @property
    def badges(self) -> tuple[str, ...]:
        return ("8-bit pages: less memory, but the CPU unpacks them at every token",)

    def _fills_page(self) -> bool:
        return (self._now + 1) % self.geometry.page == 0

    def _in_pool(self, layer: int) -> None:
        """Return None: loops for full-precision pages cannot read this pool."""

    def _products_of_all(self, layer: int, first: int) -> Products:
        return self._mixed(layer, self._stored_tokens[:1, first:]) or products(*self._unpacked(layer, first))

    def _products_of_some(self, layer: int, table: Tensor) -> Products:
        return self._mixed(layer, table) or super()._products_of_some(layer, table)

    def _mixed(self, layer: int, table: Tensor) -> Products | None:
        stored = self.host.by_head(layer), self.host.eight_bit.table(layer)
        return mixed(*stored, self._places, table, self.geometry)

    def _unpacked(self, layer: int, first: int) -> tuple[Tensor, Tensor]:
        """Return unpacked copies of the keys and values of the tokens from ``first`` on."""
        g, n = self.geometry, len(self._places)
        pages, heads = torch.arange(n).repeat(g.kv_heads), self._heads.repeat_interleave(n)
        stored = self.host.read_pages(layer, pages, heads).reshape(2, g.kv_heads, -1, g.d)
        keys, values = stored[:, :, first : self._now + 1].unbind()
        return keys[..., : g.d_k], values[..., : g.d_v]
