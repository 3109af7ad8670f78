"""Host memory that grows in place: pinned segment by segment for a CUDA device, or in huge pages for a CPU.

Each segment is pinned separately, in whole system pages. Kernels may cross from one to the next, but a ``cudaMemcpy``
may fail there, so ``PinnedRegion.segments`` cuts at their boundaries. If the device sees pinned memory at another
address than the host (WSL2), segments would not be contiguous; there a region that grows is pinned again as a whole
(0.1 s/GiB), and its address changes.

Huge pages are for memory that a CPU reads from end to end for every token. The bundled model in full mode takes 0.86 of
the CPU time with its K/V in huge pages (8,192 tokens), and 0.79 with its weights (512 tokens; one AMD EPYC thread).
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
MADV_HUGEPAGE = 14  # for memory that is not written yet
MADV_COLLAPSE = 25  # for memory that was written; since Linux 6.1


class CudaRegistrar:
    """Pins host memory with ``cudaHostRegister``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def register(self, address: int, size: int) -> int:
        """Pin ``size`` bytes from ``address`` on; return the address at which the device sees them.

        Raises:
            RuntimeError: pinning failed; the message is the reason.
        """
        cudart = _cudart()
        # An alias becomes a tensor of the device that is current here.
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
        """Unpin the memory at ``address``, once the device has finished with it."""
        with contextlib.suppress(RuntimeError):  # an earlier kernel's error; the memory must be unpinned nevertheless
            torch.cuda.synchronize(self._device)
        _cudart().cudaHostUnregister(address)

    def _clear_error(self) -> None:
        # The runtime keeps a failed call's code, and torch would raise it at the next, unrelated kernel.
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device=self._device)


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _device_address(address: int) -> int | None:
    """Return the device's address of pinned memory; None if the driver gives none."""
    seen = ctypes.c_uint64()
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        failed = driver.cuMemHostGetDevicePointer_v2(ctypes.byref(seen), ctypes.c_void_p(address), ctypes.c_uint(0))
    except (OSError, AttributeError):
        return None
    return None if failed else seen.value


class PinnedRegion:
    """Address space of ``size`` bytes (rounded up to system pages), of which the first ``committed`` are in use.

    ``bytes`` is the whole region (uint8, in host memory), zero where nothing was written. With several equal ``parts``
    (of whole system pages), each is used from its front, and none can be pinned. The first ``pinned`` bytes are pinned
    until the region is freed; the device sees them ``shift`` bytes after the host's address.

    Raises:
        OSError: the system does not provide that much address space.
    """

    def __init__(self, size: int, parts: int = 1) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        mapped = mmap.mmap(-1, in_system_pages(size), flags)
        with torch.inference_mode(False):  # written to inside and outside inference mode
            self.bytes = torch.frombuffer(mapped, dtype=torch.uint8)
        self.size = len(self.bytes)
        self.committed = self.pinned = 0
        self.shift = 0
        self._parts = self.bytes.view(parts, -1)
        self._starts: list[int] = []
        self._mapped = mapped
        self._registered: list[tuple[CudaRegistrar, int]] = []
        # The mapping is an argument so that it outlives the call. At exit the driver frees everything.
        weakref.finalize(self, _unregister, self._registered, mapped).atexit = False

    def commit(self, size: int) -> None:
        """Commit memory for the first ``size`` bytes (whole system pages)."""
        first, parts = self.committed, len(self._parts)
        # The system allocates (cleared) memory for a page when it is first written to.
        self._parts[:, first // parts : size // parts : mmap.PAGESIZE].zero_()
        for part in self._parts if parts > 1 else ():  # only whole huge pages: a short conversation uses none
            low = first // parts
            before = (part.data_ptr() + low) % HUGE_PAGE  # bytes of the first huge page that were committed before
            use_huge_pages(part[max(0, low - before) : size // parts])
        self.committed = size
        self._starts.append(first)

    def segments(self, low: int, high: int) -> list[Tensor]:
        """Return the bytes from ``low`` to ``high``, cut where a segment begins."""
        cuts = [low, *(start for start in self._starts if low < start < high), high]
        return [self.bytes[a:b] for a, b in itertools.pairwise(cuts)]

    def pin(self, registrar: CudaRegistrar) -> None:
        """Pin the committed memory that is not pinned yet.

        Raises:
            RuntimeError: pinning failed; the message is the reason. The first ``pinned`` bytes are still pinned.
        """
        if self.pinned == self.committed:
            return
        if not self._registered:
            # A forked child would share pinned pages until a write gives host and device different copies.
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
    """Round ``size`` bytes up to whole pages of the operating system."""
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


class CudaArray:
    """Exposes a region through CUDA's array interface, which torch reads; its tensors keep the region alive."""

    def __init__(self, region: PinnedRegion) -> None:
        self._region = region
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (region.size,),
            "typestr": "|u1",
            "data": (region.bytes.data_ptr() + region.shift, False),
            "version": 3,
        }


def use_huge_pages(memory: Tensor) -> None:
    """Ask the system to use huge pages in ``memory``, which is contiguous, wherever a whole one fits.

    Without effect for a GPU's memory and on systems that do not support this.
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
    """Allocate ``size`` uninitialized bytes (uint8) that begin at a huge page."""
    memory = torch.empty(size + HUGE_PAGE, dtype=torch.uint8)
    start = -memory.data_ptr() % HUGE_PAGE
    return memory[start : start + size]


@cache
def _libc() -> Any:
    return ctypes.CDLL(None) if sys.platform == "linux" else None
