"""Host memory that grows in place: pinned segment by segment for a CUDA device, or in huge pages for a CPU.

A segment is pinned by itself, exactly and in whole system pages. Only kernels may span two of them: a ``cudaMemcpy``
across a boundary may be refused, therefore ``PinnedRegion.segments`` cuts there. Where the device sees pinned memory at
another address than the host (WSL2) segments would not lie side by side: there a region that grows is pinned anew as a
whole, 0.1 s/GiB, and its address changes.

Huge pages are for memory that a CPU reads from end to end at every token. Full mode of the bundled model takes 0.86 of
the CPU time at 8,192 tokens with its K/V in them, and 0.79 at 512 with its weights (alternating, one thread of an AMD
EPYC).
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import sys
import weakref
from functools import cache
from typing import Any

import torch
from torch import Tensor

PORTABLE_MAPPED = 1 | 2  # flags of cudaHostRegister
HUGE_PAGE = 2**21
MADV_HUGEPAGE = 14  # for what is written later
MADV_COLLAPSE = 25  # for what was written already; since Linux 6.1


class CudaRegistrar:
    """Pins host memory by ``cudaHostRegister``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def register(self, address: int, size: int) -> int:
        """Pin ``size`` bytes from ``address`` on; return the address at which the device sees them.

        Raises:
            RuntimeError: why it cannot be.
        """
        cudart = _cudart()
        # An alias is a tensor of the device that was current here.
        with torch.cuda.device(self._device):
            result = cudart.cudaHostRegister(address, size, PORTABLE_MAPPED)
            seen = address if int(result) else _device_address(address)
        if int(result):
            self._clear_error()
            raise RuntimeError(f"cudaHostRegister: {cudart.cudaGetErrorString(result)} ({int(result)})")
        if seen is None:
            self.unregister(address)
            raise RuntimeError("the driver gives no address at which the device sees pinned memory")
        return seen

    def unregister(self, address: int) -> None:
        """Give back what was pinned at ``address``, once the device is done with it."""
        with contextlib.suppress(RuntimeError):  # of an earlier kernel; the memory is unpinned all the same
            torch.cuda.synchronize(self._device)
        _cudart().cudaHostUnregister(address)

    def _clear_error(self) -> None:
        # The runtime keeps a failed call's code, and torch would raise it at the next, innocent kernel.
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device=self._device)


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _device_address(address: int) -> int | None:
    """The device's address of pinned memory; None if the driver gives none."""
    seen = ctypes.c_uint64()
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        failed = driver.cuMemHostGetDevicePointer_v2(ctypes.byref(seen), ctypes.c_void_p(address), ctypes.c_uint(0))
    except (OSError, AttributeError):
        return None
    return None if failed else seen.value


class PinnedRegion:
    """Address space of ``size`` bytes (rounded up to system pages); the first ``committed`` are in use.

    Where it has several equal ``parts`` (of whole system pages) each is used from its front, and none can be pinned.
    ``bytes`` is all of it, ``size`` of them, uint8 in host memory, zero where nothing was written. Memory that was
    registered is unregistered when the region goes, before its address space does. The first ``pinned`` bytes are
    pinned, and the device sees them ``shift`` bytes from the host's address.

    Raises:
        OSError: the system does not give so much address space.
    """

    def __init__(self, size: int, parts: int = 1) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        mapped = mmap.mmap(-1, in_system_pages(size), flags)
        with torch.inference_mode(False):  # written to in and out of it
            self.bytes = torch.frombuffer(mapped, dtype=torch.uint8)
        self.size = len(self.bytes)
        self.committed = self.pinned = 0
        self.shift = 0
        self._parts = self.bytes.view(parts, -1)
        self._starts: list[int] = []
        self._mapped = mapped
        self._registered: list[tuple[CudaRegistrar, int]] = []
        # The mapping is an argument so that it outlives the call. At exit the driver frees everything by itself.
        weakref.finalize(self, _unregister, self._registered, mapped).atexit = False

    def commit(self, size: int) -> None:
        """Take memory for the first ``size`` bytes (whole system pages)."""
        first, parts = self.committed, len(self._parts)
        # A write to each system page is what makes it memory; the kernel has cleared it.
        self._parts[:, first // parts : size // parts : mmap.PAGESIZE].zero_()
        for part in self._parts if parts > 1 else ():  # the huge pages that it completes: a short conversation has none
            low = first // parts
            before = (part.data_ptr() + low) % HUGE_PAGE  # bytes of the first that were there already
            use_huge_pages(part[max(0, low - before) : size // parts])
        self.committed = size
        self._starts.append(first)

    def segments(self, low: int, high: int) -> list[Tensor]:
        """Bytes ``low`` to ``high``, cut where a segment begins."""
        cuts = [low, *(start for start in self._starts if low < start < high), high]
        return [self.bytes[a:b] for a, b in itertools.pairwise(cuts)]

    def pin(self, registrar: CudaRegistrar) -> None:
        """Pin what was committed and is not pinned yet.

        Raises:
            RuntimeError: why it cannot be; of a region in one piece nothing is pinned then.
        """
        if self.pinned == self.committed:
            return
        if not self._registered:
            # A forked child would get pinned pages as a copy, or share them until a write parts host and device.
            self._mapped.madvise(mmap.MADV_DONTFORK)
        if self.shift:
            self.unpin()
        address = self.bytes.data_ptr() + self.pinned
        shift = registrar.register(address, self.committed - self.pinned) - address
        self._registered.append((registrar, address))
        if self.pinned and shift != self.shift:
            self.unpin()
            raise RuntimeError("the device does not see pinned memory side by side")
        self.pinned, self.shift = self.committed, shift

    def unpin(self) -> None:
        _unregister(self._registered)
        self.pinned = 0


def _unregister(registered: list[tuple[CudaRegistrar, int]], _kept: object = None) -> None:
    while registered:
        registrar, address = registered.pop()
        registrar.unregister(address)


def in_system_pages(size: int) -> int:
    """``size`` bytes rounded up to whole pages of the operating system."""
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


class CudaArray:
    """Names a region to CUDA, by the array interface that torch reads; a tensor made of it keeps the region alive."""

    def __init__(self, region: PinnedRegion) -> None:
        self._region = region
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (region.size,),
            "typestr": "|u1",
            "data": (region.bytes.data_ptr() + region.shift, False),
            "version": 3,
        }


def use_huge_pages(memory: Tensor) -> None:
    """Ask the system for huge pages where they lie whole in ``memory``, which is contiguous.

    Where it has none, on an older system or on another one, nothing changes, nor of a GPU's memory.
    """
    if memory.device.type != "cpu":
        return
    begin, end = memory.data_ptr(), memory.data_ptr() + memory.nbytes
    first = -(-begin // HUGE_PAGE) * HUGE_PAGE
    size = end // HUGE_PAGE * HUGE_PAGE - first
    if size > 0 and (libc := _libc()):
        for advice in (MADV_HUGEPAGE, MADV_COLLAPSE):
            libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), advice)


def aligned(size: int) -> Tensor:
    """``size`` bytes, uint8, that begin with a huge page; nothing is written to them."""
    memory = torch.empty(size + HUGE_PAGE, dtype=torch.uint8)
    start = -memory.data_ptr() % HUGE_PAGE
    return memory[start : start + size]


@cache
def _libc() -> Any:
    return ctypes.CDLL(None) if sys.platform == "linux" else None
