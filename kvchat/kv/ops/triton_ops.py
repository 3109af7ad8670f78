"""The ops of ``kvchat.kv.ops.torch_ops`` as Triton kernels: same tensors in, same tensors out.

Everything runs on the stream that is current, allocates only there, and reads nothing back, so that a step can be
captured in a CUDA graph and recall can run beside the model. What changes from step to step is in tensors, what changes
rarely (slots, pages) in integers that no kernel is compiled for: once a mode has decoded a token nothing is compiled,
but for choosing pages when their number passes 1,024 and each doubling of it.
``page_scores`` are float32 here; the rest is to rounding what stock torch operations give, and the same bits each time.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from kvchat.kv.attention import AttentionSpec, Weights
from kvchat.kv.geometry import Geometry
from kvchat.kv.memory.device_slots import DeviceSlots
from kvchat.kv.memory.eight_bit_pool import EightBitPool
from kvchat.kv.memory.host_pool import HostPool
from kvchat.kv.ops.eight_bit_ops import EightBitOps
from kvchat.kv.ops.selection import Candidates, TokenQuery
from kvchat.kv.ops.torch_ops import TorchOps
from kvchat.kv.ops.triton import append, attend, recall, select, tokens
from kvchat.kv.ops.triton.language import host_tensors

# Programs of one attention: a few for each of a GPU's multiprocessors, so that none waits for long.
PROGRAMS_PER_UNIT = 4
PROGRAMS_ON_A_CPU = 64


class TritonOps(TorchOps):
    """``TorchOps`` by Triton kernels: bfloat16 and float16 on a CUDA device, and for any dtype in Triton's interpreter.

    ``ctas`` programs recall, at most ``programs`` attend, in tiles of ``tile`` elements. A pageable host pool is not
    the device's to address: what touches it is then left to stock torch operations.
    """

    name = "triton"
    reads_staged = True

    def __init__(self, geometry: Geometry, host: HostPool, device: torch.device) -> None:
        super().__init__(geometry, host, device)
        # Triton launches on the current device, not on its operands'.
        self._on: AbstractContextManager[object] = nullcontext()
        self.ctas, self.programs = recall.DEFAULT_CTAS, PROGRAMS_ON_A_CPU
        self.tile = attend.tile_of(device)
        if device.type == "cuda":
            self._on = torch.cuda.device(device)
            self.ctas = recall.measured_ctas(device)
            units = torch.cuda.get_device_properties(device).multi_processor_count
            self.programs = PROGRAMS_PER_UNIT * units

    def begin_step(self, position: Tensor) -> None:
        if self.host.pinned:
            self.position = position
        else:
            super().begin_step(position)

    def assign(self, slots: DeviceSlots, position: Tensor) -> None:
        if slots.layout.unordered or not self.host.pinned:  # else the kernel that appends does it
            super().assign(slots, position)

    def append(self, held: Sequence[DeviceSlots], layer: int, key: Tensor, value: Tensor) -> None:
        if not self.host.pinned:
            super().append(held, layer, key, value)
            return
        host = host_tensors(self.host, layer)
        next_quantized = self.host.next_quantized if isinstance(self.host, EightBitPool) else self.position
        with self._on:
            for slots in held:
                append.append(slots, host, next_quantized, layer, self.position, key, value, self.geometry)

    def update_bounds(self, bounds: Tensor, page: Tensor, keys: Tensor) -> None:
        with self._on:
            append.update_bounds(bounds, page, keys)

    def attend(
        self, slots: DeviceSlots, layer: int, query: Tensor, spec: AttentionSpec, needs_weights: bool
    ) -> tuple[Tensor, Weights | None]:
        if slots.layout.spills and not self.host.pinned:
            return super().attend(slots, layer, query, spec, needs_weights)
        with self._on:
            sizes = self.geometry, self.programs, self.tile
            return attend.attend(
                slots, layer, self.position, query, spec, needs_weights, *sizes, host_tensors(self.host, layer)
            )

    def page_scores(self, query: Tensor, bounds: Tensor, scaling: float) -> Tensor:
        with self._on:
            return select.page_scores(query, bounds, scaling)

    def needs_correction(self, query: Tensor, before: Tensor, tau: float) -> Tensor:
        with self._on:
            return select.needs_correction(query, before, self.geometry.kv_heads, tau)

    def choose(self, scores: Tensor, candidates: Candidates, resident: Tensor, flagged: Tensor | None = None) -> Tensor:
        if not select.choosable(scores.shape[2], resident.shape[1]):
            return super().choose(scores, candidates, resident, flagged)
        with self._on:
            return select.choose(scores, candidates, resident, flagged)

    def encode_keys(self, keys: Tensor, bits: int) -> Tensor:
        if keys.dtype == torch.float32:  # edges are rounded: the interpreter does it otherwise
            return super().encode_keys(keys, bits)
        with self._on:
            return tokens.encode(keys, self.geometry.page, bits)

    def token_scores(self, query: Tensor, index: Tensor, bits: int, scaling: float) -> Tensor:
        with self._on:
            return tokens.token_scores(query, index, self.geometry.page, bits, scaling)

    def choose_tokens(
        self, by: TokenQuery, hidden: Tensor, masked: Tensor, resident: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        if not tokens.choosable(resident.shape[1]):
            return super().choose_tokens(by, hidden, masked, resident)
        with self._on:
            return tokens.choose_tokens(*by[:4], hidden, masked, resident, by.means, self.geometry.page)

    def open_pages(self, slots: DeviceSlots, layers: slice, first: int, last: Tensor) -> None:
        with self._on:
            select.open_pages(slots, layers, first, last)

    def move_pages(self, slots: DeviceSlots, layer: int, placed: Tensor, resident: Tensor, counters: Tensor) -> None:
        if not self.host.pinned:
            super().move_pages(slots, layer, placed, resident, counters)
            return
        with self._on:
            recall.move_pages(host_tensors(self.host, layer), slots, layer, placed, resident, counters, self.ctas)

    def move_tokens(
        self, slots: DeviceSlots, layer: int, first: int, placed: Tensor, resident: Tensor, counters: Tensor
    ) -> None:
        if not self.host.pinned:
            super().move_tokens(slots, layer, first, placed, resident, counters)
            return
        with self._on:
            recall.move_tokens(
                host_tensors(self.host, layer), slots, layer, first, placed, resident, counters, self.ctas
            )

    def move_shared(self, slots: DeviceSlots, positions: Tensor, targets: Tensor, taken: Tensor) -> None:
        if not self.host.pinned:
            super().move_shared(slots, positions, targets, taken)
            return
        with self._on:
            for layer in range(slots.layout.first, slots.layout.last):
                recall.move_shared(host_tensors(self.host, layer), slots, layer, positions, targets, taken)


class EightBitTritonOps(TritonOps, EightBitOps):
    """``TritonOps`` over a pinned pool with 8-bit pages: the same kernels, which unpack behind the link.

    They are not staged: the pages of a conversation lie in two pools, in an order that only ``places`` knows.
    """

    reads_staged = False

    @property
    def badges(self) -> tuple[str, ...]:
        return ()
