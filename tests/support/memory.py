"""Memory in tests: a registrar that records what is pinned, resident bytes, and the tensors that a kv holds."""

from __future__ import annotations

import ctypes
import mmap

import torch

from kvchat.kv.manager import KVManager
from kvchat.kv.memory.pinned import PinnedRegion


class Pins:
    """A registrar that records registrations and checks them; the one numbered ``fails_at`` fails.

    With ``fails_for_good`` all later ones fail too. With ``elsewhere`` the device sees each registration at another
    address, as in WSL2.
    """

    def __init__(self, fails_at: int = 0, elsewhere: bool = False, fails_for_good: bool = False) -> None:
        self.held: dict[int, int] = {}
        self.calls = 0
        self.given_back: list[int] = []
        self.fails_at = fails_at
        self.elsewhere = elsewhere
        self.fails_for_good = fails_for_good

    def register(self, address: int, size: int) -> int:
        self.calls += 1
        if self.calls == self.fails_at or (self.fails_for_good and self.calls > self.fails_at):
            raise RuntimeError("no more memory may be pinned")
        assert address % mmap.PAGESIZE == size % mmap.PAGESIZE == 0
        assert size > 0
        for start, length in self.held.items():
            assert address + size <= start or start + length <= address, "segments overlap"
        ctypes.string_at(address, 1)  # raises a fault unless the memory is mapped
        self.held[address] = size
        return address + self.elsewhere * self.calls * 2**40

    def unregister(self, address: int) -> None:
        ctypes.string_at(address, 1)  # still mapped
        del self.held[address]
        self.given_back.append(address)

    def is_exact(self, address: int, size: int) -> bool:
        end = address
        for start, length in sorted(self.held.items()):
            if start <= end < start + length:
                end = start + length
        return end >= address + size


def resident(region: PinnedRegion) -> int:
    """Return the region's resident bytes, as the kernel counts them."""
    pages = (ctypes.c_ubyte * (region.size // mmap.PAGESIZE))()
    address, size = ctypes.c_void_p(region.bytes.data_ptr()), ctypes.c_size_t(region.size)
    assert ctypes.CDLL(None).mincore(address, size, pages) == 0
    return sum(page & 1 for page in bytes(pages)) * mmap.PAGESIZE


def tensors_of(kv: KVManager) -> dict[int, int]:
    """Return size by address of every storage reachable from the kv, except specs, traits and rotations."""
    found, seen, todo = {}, {id(kv)}, [kv]
    while todo:
        thing = todo.pop()
        if isinstance(thing, torch.Tensor):
            found[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
            continue
        inside = list(vars(thing).values()) if hasattr(thing, "__dict__") else []
        inside += list(thing) if isinstance(thing, list | tuple) else []
        inside += list(thing.values()) if isinstance(thing, dict) else []
        for one in inside:
            if id(one) not in seen and type(one).__name__ not in ("AttentionSpec", "ModelTraits", "module", "Rotation"):
                seen.add(id(one))
                todo.append(one)
    return found


def stored_rows(kv: KVManager) -> list[torch.Tensor]:
    """A copy of the stored K and V of each layer, ``[2, H, total, d]``."""
    return [torch.stack(kv.state.host.dense(layer, kv.total)).clone() for layer in range(kv.state.geometry.layers)]
