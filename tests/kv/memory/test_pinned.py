"""Pinned memory: registered by segment, unregistered in time, and the CUDA runtime's replies."""

import mmap
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from support.memory import Pins

from kvchat.kv.memory import pinned
from kvchat.kv.memory.pinned import HUGE_PAGE, CudaRegistrar, PinnedRegion


def test_memory_is_unregistered_after_its_last_device_view():
    pins = Pins()
    region = PinnedRegion(3 * mmap.PAGESIZE)
    for size in (mmap.PAGESIZE, 3 * mmap.PAGESIZE):
        region.commit(size)
        region.pin(pins)
    seen = pinned.CudaArray(region)  # what a device tensor holds
    view = region.bytes[:4]
    del region
    assert len(pins.held) == 2
    del seen
    assert not pins.held
    assert view.tolist() == [0, 0, 0, 0], "a CPU view keeps the memory"


def test_each_committed_huge_page_is_requested_once(monkeypatch):
    region, requests = PinnedRegion(4 * 3 * HUGE_PAGE, parts=4), []
    monkeypatch.setattr(pinned, "use_huge_pages", lambda memory: requests.append((memory.data_ptr(), memory.nbytes)))
    base, part = region.bytes.data_ptr(), 3 * HUGE_PAGE
    for size in (1, 2, 700, 701, 768):  # system pages of each part
        region.commit(4 * size * HUGE_PAGE // 256)
        for start, length in requests:
            assert (start - base) % part + length <= size * HUGE_PAGE // 256, "only committed memory is requested"
    first = -(-base // HUGE_PAGE) * HUGE_PAGE
    whole = [page for page in range(first, base + region.size, HUGE_PAGE) if (page - base) % part <= part - HUGE_PAGE]
    for page in whole:
        assert sum(start <= page and page + HUGE_PAGE <= start + length for start, length in requests) == 1


def test_huge_pages_keep_their_contents():
    region = PinnedRegion(2 * 3 * HUGE_PAGE, parts=2)
    region.commit(2 * 3 * mmap.PAGESIZE)
    region.bytes[:9] = torch.arange(9)
    region.commit(region.size)
    assert region.bytes[:9].tolist() == list(range(9))
    assert not region.bytes[9:].any()


def test_nothing_is_unregistered_at_exit():
    """By then the driver may be gone; the end of the process frees everything."""
    code = (
        "import mmap, sys\nfrom kvchat.kv.memory.pinned import PinnedRegion\n"
        "class Pins:\n"
        "    def register(self, address, size): return address\n"
        "    def unregister(self, address): sys.stderr.write('unregistered')\n"
        "region = PinnedRegion(mmap.PAGESIZE)\nregion.commit(mmap.PAGESIZE)\nregion.pin(Pins())\n"
        "region.itself = region\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert (result.returncode, result.stderr) == (0, "")


def test_registration_calls_the_cuda_runtime_and_raises_its_errors(monkeypatch):
    """Without a GPU: which runtime functions are called, in which order, and what their errors become."""
    calls: list[tuple[object, ...]] = []
    code = {"register": 0}

    class Error(int):
        pass

    runtime = SimpleNamespace(
        cudaHostRegister=lambda *args: calls.append(("register", *args)) or Error(code["register"]),
        cudaHostUnregister=lambda *args: calls.append(("unregister", *args)) or Error(0),
        cudaGetErrorString=lambda error: f"error {int(error)}",
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", lambda device: pytest.MonkeyPatch.context())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: calls.append(("synchronize",)))
    monkeypatch.setattr(pinned, "_device_address", lambda address: address)
    monkeypatch.setattr(CudaRegistrar, "_clear_error", lambda self: calls.append(("clear",)))
    registrar = CudaRegistrar(torch.device("cuda", 0))
    assert registrar.register(4096, 8192) == 4096
    registrar.unregister(4096)
    assert calls == [("register", 4096, 8192, 3), ("synchronize",), ("unregister", 4096)]
    calls.clear()
    code["register"] = 2
    with pytest.raises(RuntimeError, match=r"cudaHostRegister: error 2 \(2\)"):
        registrar.register(4096, 8192)
    assert calls == [("register", 4096, 8192, 3), ("clear",)]
    calls.clear()
    code["register"] = 0
    monkeypatch.setattr(pinned, "_device_address", lambda address: address + 2**40)
    assert registrar.register(4096, 8192) == 4096 + 2**40
    monkeypatch.setattr(pinned, "_device_address", lambda address: None)
    with pytest.raises(RuntimeError, match="no address"):
        registrar.register(4096, 8192)
    assert calls[-1] == ("unregister", 4096)


@pytest.fixture
def cuda():
    return torch.device("cuda", 0)


@pytest.mark.cuda
def test_a_refused_registration_leaves_no_cuda_error(cuda):
    registrar = CudaRegistrar(cuda)
    region = PinnedRegion(2 * mmap.PAGESIZE)
    region.commit(region.size)
    segment = region.bytes.data_ptr(), region.size
    registrar.register(*segment)
    with pytest.raises(RuntimeError, match="cudaHostRegister"):
        registrar.register(*segment)  # registering twice is refused
    assert torch.ones(3, device=cuda).sum().item() == 3
    registrar.unregister(segment[0])
    registrar.register(*segment)
    registrar.unregister(segment[0])


# ---- Huge pages are requested where they fit entirely into the given memory


def test_only_whole_huge_pages_are_requested(monkeypatch):
    requests: list[tuple[int, int]] = []

    class Libc:
        @staticmethod
        def madvise(address, size, advice):
            if advice == pinned.MADV_COLLAPSE:
                requests.append((address.value, size.value))

    monkeypatch.setattr(pinned, "_libc", lambda: Libc)
    memory = torch.zeros(4 * HUGE_PAGE, dtype=torch.uint8)
    first = -memory.data_ptr() % HUGE_PAGE
    for begin, end, pages in ((0, 0, 0), (0, HUGE_PAGE - 1, 0), (0, HUGE_PAGE, 1), (1, 2 * HUGE_PAGE, 1)):
        requests.clear()
        pinned.use_huge_pages(memory[first + begin : first + end])
        assert sum(size for _, size in requests) == pages * HUGE_PAGE
        assert all(address % HUGE_PAGE == 0 for address, _ in requests)


def test_huge_pages_are_skipped_without_madvise(monkeypatch):
    monkeypatch.setattr(pinned, "_libc", lambda: None)
    pinned.use_huge_pages(torch.zeros(2 * HUGE_PAGE, dtype=torch.uint8))
