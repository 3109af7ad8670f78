"""Products with packed or unpacked weights on a CPU, for one token or many, and the number of threads for them.

For one row in float32, Intel's MKL, which torch uses on x86, reads a matrix at a third of the memory bandwidth if the
processor is not Intel's: on an AMD EPYC, 384 x 8,192 take 1.2 ms on one thread or two. MKL's batched product of blocks
of rows takes 0.33 ms on one thread and 0.25 on two. The processor's vendor decides, not a measurement, so that a
conversation always has the same last bits.

With AVX-512, torch multiplies bfloat16 with oneDNN, for one row at a third to half of the memory bandwidth. torch's own
product reads at full bandwidth: 8,192 x 2,048 take 0.95 ms instead of 1.75, and 1.8 in float32. Without AVX-512, many
rows of bfloat16 are slow: 512 take 368 ms, but 122 if the matrix is first widened to float32, and 100 if it is stored
in float32.

Short parallel loops use as many threads as other processes leave cores for. Each loop waits for its last thread, and
next to a busy process one thread always waits for a core: on two cores with two busy processes, a token of the bundled
model, about a hundred such loops, took 10 ms on two threads and 6.8 on one. Loading a model runs such loops too: the
tests of the bundled one took 11.5 s on two threads and 0.5 s on one. A prompt has long loops and gets all threads.
"""

from __future__ import annotations

import math
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, ClassVar, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvchat import process
from kvchat.kv.ops.cpu_ops import ROWS as ROWS_TOGETHER
from kvchat.kv.ops.cpu_ops import compiled_loops, needed_loops, use_threads

ROWS, STACKS = "packed_rows", "packed_stacks"  # attributes of a Linear, and of a layer's experts
PIECE = 2**26  # bytes that exist twice while weights are moved; larger weights get huge pages in place
CHUNK = 2**18  # weights quantized at a time: in float32 they stay in a processor's cache
BLOCK = 64  # rows that int4 interleaves, fewer on some processors; merged matrices must start a new block
PROCESSOR = Path("/proc/cpuinfo")
MAKE = "AuthenticAMD"
BLOCKS = 4  # the minimum: fewer are slower (one is the slow product itself)
FEW = 16  # most rows that a loop multiplies together in float32
MANY = 32  # fewest rows for which widening a matrix pays off
SAMPLE_S = 0.1  # between two samples: ten ticks of the kernel's clock for processor time
PAUSE_S = 1.0  # between two answers
# Other processes that take at most this share of a core may share it with one of our threads. While drawing an answer,
# the application takes a quarter, and the terminal must draw it too; a busy process that shares its core with one of
# our threads gets two thirds.
SHARED = 0.6
FIXED = "OMP_DYNAMIC"
PRODUCTS, BLOCKS_OF_WEIGHTS = "kvchat.models.quantize.product_loops", "kvchat.models.quantize.block_loops"


Arrays = tuple[Any, ...]


class PackedRows(ABC):
    """The packed rows of a Linear's matrix ``[N, K]``, or of a stack of matrices.

    Attributes:
        data: packed weights, a parameter of the Linear.
        scales: constants, not a parameter; their dimension ``of_rows`` counts the rows.
        bias: ``[N]``, the Linear's.
    """

    of_rows: ClassVar[int] = 0
    _cached: tuple[int, Arrays | None] = (0, None)  # arrays, and the address they belong to

    def __init__(self, data: Tensor, scales: Tensor, bias: Tensor | None = None) -> None:
        self.data, self.scales, self.bias = data, scales, bias

    def forward(self, x: Tensor) -> Tensor:
        """Compute the Linear, in place of its own forward."""
        return self.multiply(x, self.bias)

    @abstractmethod
    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply ``x [..., K]`` by the matrix and add ``bias [N]``: ``[..., N]``."""

    @property
    def arrays(self) -> Arrays | None:
        """The matrix as ``product_loops`` takes it; None if no loop can multiply it."""
        if self._cached[0] != self.data.data_ptr():  # loading moves the weights
            has_loops = self.data.device.type == "cpu" and product_loops()
            self._cached = self.data.data_ptr(), self._arrays() if has_loops else None
        return self._cached[1]

    def _arrays(self) -> Arrays | None:
        return None

    def forget_arrays(self) -> None:
        """Release the arrays, which keep the memory alive from which the weights were moved."""
        self._cached = 0, None

    def one_token(
        self,
        x: Tensor,
        bias: Tensor | None = None,
        norm: Tensor | None = None,
        eps: float = 0.0,
        residual: Tensor | None = None,
        gate: int = 0,
    ) -> Tensor | None:
        """Multiply one token's row ``x [..., K]`` by the matrix: ``[..., N]``, or None if no loop can.

        The row is first normalized by ``norm [K]``, if given; ``bias [N]`` and ``residual [..., N]`` are added. With
        ``gate``, a number of ``GATES``, the result is that gate of the first half times the second half,
        ``[..., N / 2]``.
        """
        if (arrays := self.arrays) is None:
            return None
        loops = product_loops()
        assert loops is not None
        use_threads(torch.get_num_threads())
        out = torch.empty(*x.shape[:-1], len(self.data) // 2 if gate else len(self.data))
        product = loops.four_bit_product if len(arrays) == 3 else loops.eight_bit_product
        before, after = (numbers(x), numbers(bias), numbers(norm)), numbers(residual)
        product(*arrays, *before, eps, after, gate, out.view(-1).numpy())
        return out if x.dtype == torch.float32 else out.to(x.dtype)

    def matrix(self, index: int) -> Self:
        """Return one matrix of a stack as a view."""
        return type(self)(self.data[index], self.scales[index])

    @property
    def mergeable(self) -> bool:
        """Whether another matrix's rows can be appended."""
        return True

    @classmethod
    def merged(cls, linears: Sequence[Any]) -> Self:
        """Merge the rows of several Linears into one matrix; their own become views of it, so no memory is added."""
        parts: list[Self] = [linear.__dict__[ROWS] for linear in linears]
        merged = cls(merge([part.data for part in parts]), torch.cat([part.scales for part in parts], cls.of_rows))
        views = torch.split(merged.scales, [part.scales.shape[cls.of_rows] for part in parts], cls.of_rows)
        for part, view in zip(parts, views, strict=True):
            part.scales = view
            part.forget_arrays()
        return merged


Weight = Tensor | PackedRows
SILU, GELU = 1, 2  # numbers of gates, for loops
GATES: tuple[Callable[[Tensor], Tensor], ...] = F.silu, partial(F.gelu, approximate="tanh")  # by number
NOTHING = np.empty(0, np.float32)


def numbers(row: Tensor | None) -> Any:
    """Return a contiguous float32 row as a numpy array; an empty array for None."""
    return NOTHING if row is None else row.detach().float().view(-1).numpy()


def product_loops() -> ModuleType | None:
    """Return the loops that multiply packed weights with one token; None if numba does not work here."""
    return needed_loops(PRODUCTS)


def block_loops() -> ModuleType | None:
    """Return the loops that unpack and pack weights in blocks; None if numba does not work here."""
    return needed_loops(BLOCKS_OF_WEIGHTS)


def weight_of(linear: Any) -> Weight:
    rows: PackedRows | None = linear.__dict__.get(ROWS)
    return linear.weight if rows is None else rows


def attach(linear: Any, rows: PackedRows) -> None:
    linear.__dict__ |= {ROWS: rows, "forward": rows.forward}


def in_chunks(matrix: Tensor, elements: int) -> tuple[Tensor, ...]:
    """Split ``matrix [N, K]`` into runs of rows with about ``elements`` elements each."""
    return torch.split(matrix, max(1, elements // (BLOCK * matrix.shape[1])) * BLOCK)


def all_rows(model: Any) -> Iterator[tuple[str, PackedRows]]:
    """Yield the packed rows of the Linears and of the stacks of experts in ``model``, with names."""
    for name, module in model.named_modules():
        if ROWS in module.__dict__:
            yield name, module.__dict__[ROWS]
        yield from ((f"{name}.{stack}", rows) for stack, rows in module.__dict__.get(STACKS, {}).items())


def body(model: Any) -> Iterator[nn.Linear]:
    """Return the Linears of ``model`` except its head."""
    head = model.get_output_embeddings()
    return (module for module in model.modules() if type(module) is nn.Linear and module is not head)


def is_tied(model: Any) -> bool:
    """Return True if the head of ``model`` shares the weights of its embeddings."""
    return model.get_output_embeddings().weight is model.get_input_embeddings().weight


def packs_head(quantize: str) -> bool:
    """Return True if the head, and embeddings that share its weights, get 8 bits when the layers get ``quantize``."""
    return quantize in ("int8", "int4")


def merge(parameters: Sequence[Tensor]) -> Tensor:
    """Stack ``parameters`` along their first dimension; they become views of the result, so no memory is added."""
    merged = _adjacent(parameters)
    if merged is not None:
        return merged
    merged = torch.cat([parameter.data for parameter in parameters])
    start = 0
    for parameter in parameters:
        parameter.data = merged[start : start + len(parameter)]
        start += len(parameter)
    return merged


def _adjacent(parameters: Sequence[Tensor]) -> Tensor | None:
    """Return the parameters as one tensor if they are already adjacent in memory (see ``reading``), else None."""
    first = parameters[0].data
    end = first.data_ptr()
    for parameter in parameters:
        if parameter.data_ptr() != end or not parameter.is_contiguous():
            return None
        end += parameter.nbytes
    rows = sum(len(parameter) for parameter in parameters)
    size = rows * first[0].numel()
    if first.untyped_storage().nbytes() < (first.storage_offset() + size) * first.element_size():
        return None  # adjacent by chance
    return first.as_strided((rows, *first.shape[1:]), first.stride())


def linear(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """Multiply ``x [..., K]`` by ``weight [N, K]`` and add ``bias [N]``: ``[..., N]``."""
    if isinstance(weight, PackedRows):
        return weight.multiply(x, bias)
    if is_one_row(x) and weight.dtype == torch.float32 and weight.device.type == "cpu" and in_blocks():
        blocks = _blocks(weight.shape[0])
        if blocks > 1 and weight.is_contiguous():
            return _by_blocks(x, weight, bias, blocks)
    if (product := _multiply_few(x, weight, bias)) is not None:
        return product
    if x.numel() >= MANY * x.shape[-1] and widens(weight.dtype, weight.device):
        return F.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)
    return F.linear(x, weight, bias)


def widens(dtype: torch.dtype, device: torch.device) -> bool:
    """Return True if many rows are multiplied in float32: bfloat16 on a processor without a oneDNN product for it."""
    return dtype == torch.bfloat16 and device.type == "cpu" and not _has_bfloat16()


@cache
def _has_bfloat16() -> bool:
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@contextmanager
def without_onednn(dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    """Make torch multiply single bfloat16 rows on a CPU with its own product, in the whole process."""
    onednn: Any = torch.backends.mkldnn  # its type stubs hide that the property can be set
    enabled = onednn.enabled
    onednn.enabled = enabled and not (dtype == torch.bfloat16 and device.type == "cpu")
    try:
        yield
    finally:
        onednn.enabled = enabled


def is_one_row(x: Tensor) -> bool:
    """Return True if ``x [..., K]`` is one contiguous row, of a single token."""
    return x.numel() == x.shape[-1] and x.is_contiguous()


@cache
def in_blocks(processor: Path = PROCESSOR) -> bool:
    """Return True if multiplying in blocks of rows is faster on this processor."""
    if not torch.backends.mkl.is_available():  # type: ignore[no-untyped-call]
        return False
    try:
        return MAKE in processor.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False


def _by_blocks(x: Tensor, weight: Tensor, bias: Tensor | None, blocks: int) -> Tensor:
    size = x.shape[-1]
    # The row as a column of every block; ``view(size, 1)`` would be ten times slower.
    column = x.as_strided((blocks, size, 1), (0, 1, size))
    product = torch.bmm(weight.view(blocks, -1, size), column).view(*x.shape[:-1], -1)
    return product if bias is None else product.add_(bias)


def _multiply_few(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """Multiply a few rows, as for verifying drafts, reading each weight once; return None without a loop for it."""
    rows, size = x.numel() // x.shape[-1], x.shape[-1]
    if not 1 < rows <= FEW or weight.dtype != torch.float32 or weight.device.type != "cpu" or not in_blocks():
        return None
    if not weight.is_contiguous() or not (loops := compiled_loops(ROWS_TOGETHER)):
        return None
    if weight.shape[0] % loops.ROWS or size % loops.LANES:
        return None
    use_threads(torch.get_num_threads())
    padded = F.pad(x.reshape(rows, size), (0, 0, 0, -rows % loops.ROWS)).contiguous()
    product = padded.new_empty((len(padded), weight.shape[0]))
    loops.multiply(padded.numpy(), weight.numpy(), product.numpy())
    product = product[:rows].view(*x.shape[:-1], -1)
    return product if bias is None else product.add_(bias)


@cache
def _blocks(rows: int) -> int:
    """Return the number of blocks: a power of two, at least ``BLOCKS`` and the threads if that divides ``rows``."""
    blocks = BLOCKS
    while blocks < torch.get_num_threads():
        blocks *= 2
    while blocks > 1 and rows % blocks:
        blocks //= 2
    return blocks


class ThreadBudget:
    """In this context torch uses as many threads as there are free cores, afterwards as many as before.

    It does nothing if the device is not a CPU or ``OMP_DYNAMIC=false`` fixes the number. A sample over more than
    ``pause`` seconds is ignored, because it says little about the present.
    """

    def __init__(
        self,
        device: torch.device,
        clock: Callable[[], float] = time.monotonic,
        own: Callable[[], float] = time.process_time,
        stat: Path = process.STAT,
        pause: float = PAUSE_S,
    ) -> None:
        self.threads = self._most = torch.get_num_threads()
        fixed = os.environ.get(FIXED, "").strip().lower() in ("false", "0")
        self._samples = device.type == "cpu" and self._most > 1 and not fixed
        self._clock, self._own, self._stat, self._pause = clock, own, stat, pause
        self._seen: tuple[float, process.Spent | None, float] = -math.inf, None, 0.0

    def __enter__(self) -> None:
        self.sample()
        if self._samples:
            torch.set_num_threads(self.threads)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._samples:
            torch.set_num_threads(self._most)

    def sample(self) -> None:
        """Measure the processor time that others took since the last sample, unless that is less than 0.1 s old."""
        now, (then, before, own) = self._clock(), self._seen
        if not self._samples or now - then < SAMPLE_S:
            return
        after, own_now = process.processor_time(self._stat), self._own()
        self._seen = now, after, own_now
        if after is None or before is None or now - then > self._pause or after.total <= before.total:
            return
        busy = (after.total - before.total) - (after.idle - before.idle) - (own_now - own)
        others = busy / (after.total - before.total) * after.processors
        self.threads = max(1, min(self._most, math.floor(after.processors - others + SHARED)))
