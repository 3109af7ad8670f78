"""Which accesses to memory are ordered: what happens before what, over streams, events and the host.

Every byte remembers, for each stream and for the host, the last launch that wrote it and the last that read it. A
launch that touches what another stream wrote, or writes what another stream read, must come after it: by
``wait_stream``, by an event or by the host's waiting. The same holds of memory that is given back: it is given out
again to the stream it was made on, which must have waited for all that use it. Kernels are seen to the byte in Triton's
interpreter; torch's operations touch all of their operands, but for rows that are picked.
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
    """Two accesses to the same memory that nothing orders."""


@dataclass
class Access:
    """Bytes of one allocation, by their number."""

    address: int
    size: int
    bytes: np.ndarray | slice
    writes: bool


@dataclass
class Shadow:
    """Who touched the bytes of an allocation last, by stream: numbers of launches, 0 for none."""

    size: int
    made_on: object
    written: dict[object, np.ndarray] = field(default_factory=dict)
    read: dict[object, np.ndarray] = field(default_factory=dict)

    def mark(self, who: object, writes: bool, at: np.ndarray | slice, number: int) -> None:
        by = self.written if writes else self.read
        if who not in by:
            by[who] = np.zeros(self.size, dtype=np.int32)
        by[who][at] = number

    def last(self, who: object) -> int:
        """The last launch of ``who`` that touched any byte."""
        return max((int(by[who].max()) for by in (self.written, self.read) if who in by), default=0)


class Order:
    """What was launched so far, and what each stream and the host have waited for."""

    def __init__(self) -> None:
        self._number = 0
        self._clocks: dict[object, Clock] = {HOST: {}}
        self._last: Clock = {}
        self.shadows: dict[int, Shadow] = {}

    # ---- what orders

    def waits(self, who: object, for_whom: object) -> None:
        """``who`` goes on when all that ``for_whom`` was given is done."""
        self.reaches(who, self.now(for_whom))

    def now(self, who: object) -> Clock:
        """What has happened when all that ``who`` was given is done."""
        clock = dict(self._clock(who))
        clock[who] = self._last.get(who, 0)
        return clock

    def reaches(self, who: object, clock: Clock) -> None:
        """``who`` goes on when ``clock`` is reached."""
        mine = self._clock(who)
        for other, number in clock.items():
            mine[other] = max(mine.get(other, 0), number)

    def host_waits(self, for_whom: Iterable[object] | None = None) -> None:
        """The host waits for streams, or all of them; whatever is launched from now on comes later."""
        for each in list(self._last) if for_whom is None else for_whom:
            self.waits(HOST, each)

    def unjoined(self, origin: object) -> list[object]:
        """Streams that were given work which ``origin`` does not wait for."""
        clock = self.now(origin)
        return [who for who, number in self._last.items() if number > clock.get(who, 0)]

    # ---- what is ordered

    def launch(self, who: object, name: str, accesses: Iterable[Access]) -> None:
        """``who`` touches memory.

        Raises:
            Race: something touches it that does not come before.
        """
        self._number += 1
        self.reaches(who, self._clock(HOST))
        self._last[who] = self._number
        for access in accesses:
            shadow = self.shadows.setdefault(access.address, Shadow(access.size, who))
            touches = f"{name} on {who} {'writes' if access.writes else 'reads'}"
            self._refuse_race(who, touches, access, shadow.written, "wrote")
            if access.writes:
                self._refuse_race(who, touches, access, shadow.read, "read")
            shadow.mark(who, access.writes, access.bytes, self._number)

    def made(self, address: int, size: int, who: object) -> None:
        """Memory was given to ``who``."""
        self.shadows[address] = Shadow(size, who)

    def freed(self, address: int) -> str:
        """Memory is given back; what may still use it when its stream is given it again, empty if nothing."""
        shadow = self.shadows.pop(address, None)
        if shadow is None:
            return ""
        clock, host = self._clock(shadow.made_on), self._clock(HOST)
        for who in {*shadow.written, *shadow.read} - {shadow.made_on, HOST}:
            latest = shadow.last(who)
            if latest > max(clock.get(who, 0), host.get(who, 0)):
                return f"memory of {shadow.made_on} is given back while launch {latest} of {who} may use it"
        return ""

    def as_one(self, other: Order, who: object, name: str) -> None:
        """All that ``other`` saw, in one launch of ``who``: a graph is replayed."""
        accesses = []
        for address, shadow in other.shadows.items():
            for by, writes in ((shadow.read, False), (shadow.written, True)):
                touched = [np.flatnonzero(numbers) for numbers in by.values()]
                accesses += [Access(address, shadow.size, at, writes) for at in touched if len(at)]
        self.launch(who, name, accesses)

    def _refuse_race(self, who: object, touches: str, access: Access, by: dict[object, np.ndarray], verb: str) -> None:
        clock = self._clock(who)
        for other in by.keys() - {who}:
            latest = int(by[other][access.bytes].max(initial=0))
            if latest > clock.get(other, 0):
                raise Race(f"{touches} what {other} {verb} in launch {latest}, unordered")

    def _clock(self, who: object) -> Clock:
        return self._clocks.setdefault(who, {})


# ---- what is touched -------------------------------------------------------------------------------

Touched = list[tuple[np.ndarray, int, bool]]


class Interpreter:
    """Stands before what Triton's interpreter loads and stores with, and notes the addresses."""

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
    """What a kernel touched of its operands.

    Raises:
        Race: it touched something else.
    """
    bases = sorted({(t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()) for t in tensors})
    starts, sizes = (np.array(column, dtype=np.int64) for column in zip(*bases, strict=True))
    found: dict[tuple[int, bool], list[np.ndarray]] = {}
    for pointers, size, writes in touched:
        if not len(pointers):
            continue
        which = np.searchsorted(starts, pointers, "right") - 1
        offsets = pointers - starts[which]
        if (which < 0).any() or (offsets + size > sizes[which]).any():
            raise Race("a kernel touches memory that is none of its operands'")
        for each in np.unique(which):
            at = offsets[which == each]
            found.setdefault((int(each), writes), []).append((at[:, None] + np.arange(size)).ravel())
    return [
        Access(int(starts[which]), int(sizes[which]), np.unique(np.concatenate(at)), writes)
        for (which, writes), at in found.items()
    ]


def of_tensor(tensor: torch.Tensor, writes: bool, picked: tuple[int, torch.Tensor] | None = None) -> Access:
    """All bytes of a tensor, or of what is picked from one of its dimensions."""
    storage, size = tensor.untyped_storage(), tensor.element_size()
    if tensor.is_contiguous() and picked is None:
        first = tensor.storage_offset() * size
        return Access(storage.data_ptr(), storage.nbytes(), slice(first, first + tensor.numel() * size), writes)
    numbers = torch.arange(storage.nbytes() // size).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    if picked is not None:
        numbers = numbers.index_select(picked[0], picked[1])
    at = np.unique(numbers.numpy().ravel())
    return Access(storage.data_ptr(), storage.nbytes(), (at[:, None] * size + np.arange(size)).ravel(), writes)
