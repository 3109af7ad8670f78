"""The operations of ``kvchat.kv.ops.torch_ops`` as Triton kernels, with the same signatures.

Everything runs and allocates on the current stream and reads nothing back, so that a step can be captured in a CUDA
graph and recall can run concurrently with the model. Values that change every step are in tensors; values that rarely
change (slots, pages) are integers without specialization. So once a mode has decoded a token nothing is compiled,
except to choose pages when their number passes 1,024 and each doubling of it. ``page_scores`` are float32 here. All
other results equal those of plain torch up to rounding, and are deterministic.
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

# Programs per attention: a few per multiprocessor, so that none waits long.
PROGRAMS_PER_UNIT = 4
PROGRAMS_ON_A_CPU = 64


class TritonOps(TorchOps):
    """``TorchOps`` as Triton kernels: bfloat16 and float16 on a CUDA device, any dtype in Triton's interpreter.

    ``ctas`` programs recall; at most ``programs`` attend, in tiles of ``tile`` elements. A device cannot address a
    pageable host pool, so plain torch does whatever touches one.
    """

    name = "triton"
    reads_staged = True

    def __init__(self, geometry: Geometry, host: HostPool, device: torch.device) -> None:
        super().__init__(geometry, host, device)
        # Triton launches on the current device, not on that of its operands.
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
        if slots.layout.unordered or not self.host.pinned:  # otherwise the append kernel assigns
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
        if keys.dtype == torch.float32:  # the interpreter rounds edges differently
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
    """``TritonOps`` over a pinned pool with 8-bit pages: the same kernels, which unpack on the device.

    Pages are not staged, because they are in two pools, in an order known only to ``places``.
    """

    reads_staged = False

    @property
    def badges(self) -> tuple[str, ...]:
        return ()
