"""KVState: the stored K/V of one conversation and its memory, as modes see them. It contains no policy."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvchat.kv.attention import AttentionSpec
from kvchat.kv.geometry import Geometry
from kvchat.kv.memory.device_slots import DeviceSlots, Layout
from kvchat.kv.memory.eight_bit_pool import EightBitPool
from kvchat.kv.memory.host_pool import CachedPrefix, HostPool
from kvchat.kv.ops.choose import choose_ops
from kvchat.kv.prompt_queries import PromptQueries
from kvchat.kv.transfer import Transfer

SEES_ALL = 2**40  # ``sight`` of a layer without a window, in tokens


class KVState:
    """Host pool, device slots, and what is kept from one step to the next.

    Attributes:
        host: K/V of all ``total`` tokens.
        slots: the device slots of the current mode; ``slots_of[layer]`` are those of one layer.
        capacity: number of tokens that the slots have room for, where they grow with the conversation.
        position: 0-d int64 on the device, the position of the token being decoded; ``total`` between steps.
        query: ``[layers, H_q, d_k]``, the last token's queries; ``prompt`` has the queries of the last prompt's end.
        control: ``[reserved]`` bool, marks the chat's control tokens, which a mode should keep if it can choose.
        pins: ascending positions of the pinned messages' tokens, which every mode reads.
        specs: each layer's attention rule; until it is known, scale 1/sqrt(d_k) and no window.
        scales, sight: each layer's scale, and the number of most recent tokens it sees: ``[layers]`` on the device.
        quantizes: true if full pages are quantized to 8 bits.
        steps: decode steps so far; ``after_step`` is true if the last forward was one.
        ops: the operations of a step on this device; ``transfer`` copies from host to slots and counts the copies.
    """

    def __init__(self, geometry: Geometry, device: torch.device, context: int) -> None:
        g = geometry
        self.geometry = g
        self.device = device
        self.host = HostPool(g, device, context)
        self.ops = choose_ops(g, self.host, device)
        self.transfer = Transfer(g, self.ops, device)
        self.query = torch.zeros((g.layers, g.q_heads, g.d_k), dtype=g.dtype, device=device)
        self.prompt = PromptQueries(g, device)
        self.position = torch.zeros((), dtype=torch.int64, device=device)
        self.control = torch.zeros(self.host.reserved, dtype=torch.bool, device=device)
        self.pins: tuple[int, ...] = ()
        self.specs = [AttentionSpec(g.d_k**-0.5)] * g.layers
        self.scales = torch.full((g.layers,), g.d_k**-0.5, device=device)
        self.sight = torch.full((g.layers,), SEES_ALL, device=device)
        self.slots: list[DeviceSlots] = []
        self.slots_of: list[list[DeviceSlots]] = []
        self.quantizes = False
        self.head_orders: dict[int, Tensor] = {}
        self.capacity = 0
        self.steps = 0
        self.after_step = False
        self._read_before = 0

    @property
    def total(self) -> int:
        return self.host.total

    @property
    def query_bytes(self) -> bytes:
        """``query`` as bytes; setting empty bytes makes it zero."""
        return self.query.cpu().view(torch.uint8).numpy().tobytes()

    @query_bytes.setter
    def query_bytes(self, held: bytes) -> None:
        self.query.zero_()
        if held:
            self.query.copy_(torch.frombuffer(bytearray(held), dtype=self.query.dtype).view(self.query.shape))

    @property
    def slot_bytes(self) -> int:
        return sum(slots.nbytes for slots in self.slots)

    @property
    def read_pairs(self) -> int:
        """(token, layer, KV head) triples that attention has read in all steps so far; waits for the device."""
        return self._read_before + sum(int(slots.read_pairs) for slots in self.slots)

    def count_verified(self, tokens: int) -> None:
        """Count the last ``tokens`` stored tokens, verified by one forward, as steps that read everything."""
        self.steps += tokens
        for position in range(self.total - tokens, self.total):
            for spec in self.specs:
                self._read_before += self.geometry.kv_heads * (position + 1 - spec.first_seen(position + 1))

    def note_spec(self, layer: int, spec: AttentionSpec) -> None:
        """Remember a layer's attention rule; every forward passes it again."""
        if spec is not self.specs[layer]:
            self.specs[layer] = spec
            self.scales[layer] = spec.scaling
            self.sight[layer] = SEES_ALL if spec.window is None else spec.window

    def scaling(self, layer: int) -> float:
        return self.specs[layer].scaling

    def graph_buffers(self) -> list[Tensor]:
        """Return the tensors that a step reads or changes and that persist between steps."""
        slots = [tensor for slots in self.slots for tensor in slots.graph_buffers()]
        own = [self.query, self.position, self.control, self.scales, self.sight, self.transfer.counters]
        return [*own, *self.head_orders.values(), *slots, *self.host.graph_buffers()]

    # ---- changes to the stored tokens, only between steps

    def truncate(self, tokens: int) -> None:
        self.after_step = False  # first: if memory runs out below, tables still name forgotten tokens
        self.host.truncate(tokens)
        self.prompt.truncate(tokens)
        self.control[tokens:] = False
        for slots in self.slots:
            slots.truncate(tokens)

    def adopt(self, prefix: CachedPrefix) -> None:
        """Store the tokens of ``prefix`` in an empty state; ``total`` is then the number that could be read."""
        self.reserve(prefix.tokens)
        self.prepare_quantized(prefix.has_quantized)
        self.host.synchronize()
        self.host.total = prefix.read(self.host, prefix.tokens)
        self.control[torch.tensor([at for at in prefix.control if at < self.total], dtype=torch.int64)] = True
        self.query_bytes = prefix.query

    # ---- memory, only between steps

    def reserve(self, tokens: int) -> None:
        """Grow the host pool to ``tokens``.

        Raises:
            DoesNotFitError: there is not enough RAM; the stored tokens are unchanged.
        """
        self._leave_quantized()
        was_pinned = self.host.pinned
        if self.host.reserve(tokens) and self.host.pinned != was_pinned:
            self._use_pool(self.host)
        if tokens > len(self.control):
            more = max(self.host.reserved, self.geometry.grown(tokens)) - len(self.control)
            self.control = torch.nn.functional.pad(self.control, (0, more))

    def quantize_pages(self, quantizes: bool) -> None:
        """Start or stop quantizing pages when they become full; pages that are full already do not change.

        Raises:
            DoesNotFitError: there is not enough RAM for the first 8-bit page; nothing changed.
        """
        self.prepare_quantized(quantizes)
        self.quantizes = quantizes
        if isinstance(self.host, EightBitPool):
            self.host.quantizes = quantizes
        self._leave_quantized()

    @property
    def left_quantized(self) -> list[int]:
        """The pages with quantized tokens, if 8 bits are no longer wanted; otherwise empty."""
        return self.host.quantized_pages if isinstance(self.host, EightBitPool) and not self.quantizes else []

    @property
    def first_quantized(self) -> int:
        """Number of tokens before ``left_quantized``; all if it is empty."""
        return min((page * self.geometry.page for page in self.left_quantized), default=self.total)

    def reusable(self, tokens: int) -> int:
        """Round ``tokens`` down to whole pages if they end in a ``left_quantized`` page, which would stay quantized."""
        page, inside = divmod(tokens, self.geometry.page)
        return tokens - inside if page in self.left_quantized else tokens

    def prepare_quantized(self, quantized: bool) -> None:
        """If ``quantized``, replace a host pool that cannot hold 8-bit pages by one that can.

        Raises:
            DoesNotFitError: there is not enough RAM for the first 8-bit page; nothing changed.
        """
        if quantized and not isinstance(self.host, EightBitPool):
            self._use_pool(EightBitPool(self.host, self.quantizes))

    def _leave_quantized(self) -> None:
        """Go back to a full-precision host pool once no page is, was or will be in 8 bits."""
        if isinstance(self.host, EightBitPool) and not (self.quantizes or self.host.has_quantized):
            self._use_pool(self.host.full_precision_pool())

    def _use_pool(self, pool: HostPool) -> None:
        self.ops = self.transfer.ops = choose_ops(self.geometry, pool, self.device)
        self.host = pool

    def allocate(self, layouts: Sequence[Layout], capacity: int) -> None:
        """Replace all slots by empty ones with these layouts, for ``capacity`` tokens."""
        self.release_slots()
        self.capacity = capacity
        self._use([DeviceSlots(layout, self.geometry, self.device) for layout in layouts])
        # If several slots share a layer's heads: the order that restores the model's. Growing keeps it.
        self.head_orders = {
            layer: torch.cat([slots.heads_of(layer) for slots in held]).argsort()
            for layer, held in enumerate(self.slots_of)
            if len(held) > 1
        }

    def release_slots(self) -> None:
        """Free the device slots before others are allocated; keep their counts."""
        try:
            self._read_before = self.read_pairs
        finally:
            self._use([])
            self.transfer.timer.clear()

    def resize(self, layouts: Sequence[Layout], capacity: int) -> None:
        """Move the contents of the slots into slots with these ``layouts``; keep slots whose layout did not change."""
        pairs = zip(self.slots, layouts, strict=True)
        self._use([slots if slots.layout == layout else slots.grown(layout) for slots, layout in pairs])
        # Last, so that the next step tries again if memory ran out above.
        self.capacity = capacity

    def _use(self, slots: list[DeviceSlots]) -> None:
        self.slots = slots
        self.slots_of = [
            [each for each in slots if each.layout.first <= layer < each.layout.last]
            for layer in range(self.geometry.layers)
        ]
