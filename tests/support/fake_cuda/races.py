"""The race detector: happens-before over streams, events and the host.

Every byte keeps, for each stream and for the host, the last launch that wrote it and the last that read it. A launch
that touches what another stream wrote, or writes what another stream read, must be ordered after it: by
``wait_stream``, by an event or by a wait of the host. Freed memory is reused by the stream that allocated it, which
must have waited for all other users. Triton's interpreter reports a kernel's accesses to the byte; an operation of
torch counts as touching its whole operands, except for the rows that an index selects.

Can be deleted once a GPU runs the tests: ``TORCH_CUDA_SANITIZER=1`` then reports the same races.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

HOST = "host"
Clock = dict[object, int]


class Race(RuntimeError):
    """Two unordered accesses to the same memory."""


@dataclass
class Access:
    """Bytes of one allocation, as offsets."""

    address: int
    size: int
    bytes: np.ndarray | slice
    writes: bool

    @property
    def end(self) -> int:
        """The offset after the last byte."""
        return self.bytes.stop if isinstance(self.bytes, slice) else int(self.bytes.max(initial=-1)) + 1


@dataclass
class Shadow:
    """The last launch of each stream that touched each byte of an allocation, 0 for none; one number if all have it."""

    size: int
    made_on: object
    written: dict[object, np.ndarray | int] = field(default_factory=dict)
    read: dict[object, np.ndarray | int] = field(default_factory=dict)

    def mark(self, who: object, writes: bool, at: np.ndarray | slice, number: int) -> None:
        by = self.written if writes else self.read
        if isinstance(at, slice) and at.stop - at.start == self.size:
            by[who] = number
            return
        if isinstance(before := by.get(who, 0), int):
            # Memory of zeros is mapped only where it is written: most of a pool never is.
            by[who] = np.full(self.size, before, dtype=np.int32) if before else np.zeros(self.size, dtype=np.int32)
        by[who][at] = number

    def last(self, who: object) -> int:
        """Return the last launch of ``who`` that touched any byte."""
        return max((int(np.max(by[who])) for by in (self.written, self.read) if who in by), default=0)


class Order:
    """Launches so far, and what each stream and the host have waited for."""

    def __init__(self) -> None:
        self.number = 0
        self._waited = 0  # the last launch when the host waited for all streams
        self._clocks: dict[object, Clock] = {HOST: {}}
        self._last: Clock = {}
        self.shadows: dict[int, Shadow] = {}

    # ---- waits

    def waits(self, who: object, other: object) -> None:
        """Order later work of ``who`` after all work of ``other``."""
        self.reaches(who, self.now(other))

    def now(self, who: object) -> Clock:
        """Return the clock at which all work of ``who`` is done."""
        clock = dict(self._clock(who))
        clock[who] = self._last.get(who, 0)
        return clock

    def reaches(self, who: object, clock: Clock) -> None:
        """Order later work of ``who`` after ``clock``."""
        mine = self._clock(who)
        for other, number in clock.items():
            mine[other] = max(mine.get(other, 0), number)

    def host_waits(self, streams: Iterable[object] | None = None) -> None:
        """Wait on the host for the given streams or all of them; later launches are ordered after their work."""
        if streams is None:  # no clock has to say more: tests make hundreds of streams
            self._waited, self._clocks = self.number, {HOST: {}}
        for each in streams or ():
            self.waits(HOST, each)

    def unjoined(self, origin: object) -> list[object]:
        """Return the streams with work that ``origin`` has not waited for."""
        clock = self.now(origin)
        return [who for who, number in self._last.items() if number > clock.get(who, 0)]

    # ---- accesses

    def launch(self, who: object, name: str, accesses: Iterable[Access]) -> None:
        """Record the accesses of a launch of ``who``.

        Raises:
            Race: another stream touched the same bytes and is not ordered before.
        """
        self.number += 1
        self.reaches(who, self._clock(HOST))
        self._last[who] = self.number
        if who == HOST:  # what the host does is done before it launches anything else
            self._clock(HOST)[HOST] = self.number
        for access in accesses:
            shadow = self.shadows.setdefault(access.address, Shadow(access.size, who))
            touches = f"{name} on {who} {'writes' if access.writes else 'reads'}"
            self._refuse_race(who, touches, access, shadow.written, "wrote")
            if access.writes:
                self._refuse_race(who, touches, access, shadow.read, "read")
            shadow.mark(who, access.writes, access.bytes, self.number)

    def made(self, address: int, size: int, who: object) -> None:
        """Record an allocation of stream ``who``."""
        self.shadows[address] = Shadow(size, who)

    def freed(self, address: int) -> str:
        """Record that an allocation is freed; describe the launch that may still use it, empty if there is none."""
        shadow = self.shadows.pop(address, None)
        if shadow is None:
            return ""
        clock, host = self._clock(shadow.made_on), self._clock(HOST)
        for who in {*shadow.written, *shadow.read} - {shadow.made_on, HOST}:
            latest = shadow.last(who)
            if latest > max(clock.get(who, 0), host.get(who, 0), self._waited):
                return f"memory of {shadow.made_on} is freed while launch {latest} of {who} may use it"
        return ""

    def as_one(self, other: Order, who: object, name: str) -> None:
        """Record a graph's replay: all accesses of ``other`` as one launch of ``who``."""
        accesses = []
        for address, shadow in other.shadows.items():
            for by, writes in ((shadow.read, False), (shadow.written, True)):
                for numbers in by.values():
                    at = slice(0, shadow.size) if isinstance(numbers, int) else np.flatnonzero(numbers)
                    accesses.append(Access(address, shadow.size, at, writes))
        self.launch(who, name, accesses)

    def _refuse_race(self, who: object, touches: str, access: Access, by: dict[object, Any], verb: str) -> None:
        clock = self._clock(who)
        for other in by.keys() - {who}:
            numbers = by[other]
            latest = numbers * (access.end > 0) if isinstance(numbers, int) else numbers[access.bytes].max(initial=0)
            if latest > max(clock.get(other, 0), self._waited):
                raise Race(f"{touches} what {other} {verb} in launch {latest}, unordered")

    def _clock(self, who: object) -> Clock:
        return self._clocks.setdefault(who, {})


# ---- accesses of a launch -------------------------------------------------------------------------------

Touched = list[tuple[np.ndarray, int, bool]]


class Interpreter:
    """Wrapper of Triton's interpreter that records the addresses of loads and stores."""

    def __init__(self, plain: Any) -> None:
        self._plain = plain
        self.touched: Touched | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)

    def load(self, pointers, mask, other, dtype):
        self._note(pointers, mask, np.dtype(dtype).itemsize, False)
        return self._plain.load(pointers, mask, other, dtype)

    def store(self, pointers, value, mask):
        self._note(pointers, mask, value.dtype.itemsize, True)
        return self._plain.store(pointers, value, mask)

    def atomic_rmw(self, operation, pointers, value, mask, order):
        self._note(pointers, mask, value.dtype.itemsize, True)
        return self._plain.atomic_rmw(operation, pointers, value, mask, order)

    def _note(self, pointers: np.ndarray, mask: np.ndarray, size: int, writes: bool) -> None:
        if self.touched is not None:
            pointers, mask = np.broadcast_arrays(pointers, mask)
            self.touched.append((pointers[mask.astype(bool)].astype(np.int64).ravel(), size, writes))

    @contextmanager
    def noting(self) -> Iterator[Touched]:
        self.touched = touched = []
        try:
            yield touched
        finally:
            self.touched = None


def of_kernel(touched: Touched, tensors: list[torch.Tensor]) -> list[Access]:
    """Return a kernel's accesses to its operands.

    Raises:
        Race: the kernel touched other memory.
    """
    bases = sorted({(t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()) for t in tensors})
    starts, sizes = (np.array(column, dtype=np.int64) for column in zip(*bases, strict=True))
    found: dict[tuple[int, int, bool], list[np.ndarray]] = {}
    for pointers, size, writes in touched:
        if not len(pointers):
            continue
        which = np.searchsorted(starts, pointers, "right") - 1
        offsets = pointers - starts[which]
        if (which < 0).any() or (offsets + size > sizes[which]).any():
            raise Race("a kernel touches memory outside its operands")
        for each in _distinct(which):
            found.setdefault((int(each), size, writes), []).append(offsets[which == each])
    return [
        Access(int(starts[which]), int(sizes[which]), _bytes(_distinct(np.concatenate(at)), size), writes)
        for (which, size, writes), at in found.items()
    ]


def of_tensor(tensor: torch.Tensor, writes: bool, picked: tuple[int, torch.Tensor] | None = None) -> Access:
    """Return the access to a tensor's bytes, or to those that an index picks along one dimension."""
    storage, size, first = tensor.untyped_storage(), tensor.element_size(), tensor.storage_offset()
    if picked is None and (tensor.is_contiguous() or _is_permuted(tensor)):
        touched = slice(first * size, (first + tensor.numel()) * size)
        return Access(storage.data_ptr(), storage.nbytes(), touched, writes)
    along = [np.arange(n) for n in tensor.shape]
    if picked is not None:
        along[picked[0]] = picked[1].numpy().ravel()
    at = np.array(first)
    for numbers, stride in zip(along, tensor.stride(), strict=True):
        at = at[..., None] + numbers * stride
    return Access(storage.data_ptr(), storage.nbytes(), _bytes(_distinct(at.ravel()) * size, size), writes)


def _is_permuted(tensor: torch.Tensor) -> bool:
    """Whether the tensor's dimensions, in another order, are contiguous."""
    return tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True)).is_contiguous()


def _distinct(numbers: np.ndarray) -> np.ndarray:
    """Sort and deduplicate numbers that lie close together."""
    if not len(numbers):
        return numbers
    first = numbers.min()
    seen = np.zeros(numbers.max() - first + 1, dtype=bool)
    seen[numbers - first] = True
    return np.flatnonzero(seen) + first


def _bytes(firsts: np.ndarray, size: int) -> np.ndarray:
    """Return the bytes of elements of ``size`` bytes, each given by its first."""
    return (firsts[:, None] + np.arange(size)).ravel()
