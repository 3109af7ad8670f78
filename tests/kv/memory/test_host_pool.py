"""The host pool: growth in place, pinning by segment, and what happens if either is refused."""

import mmap
import weakref
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.memory import Pins, resident

from kvchat.errors import DoesNotFitError
from kvchat.kv.geometry import Geometry
from kvchat.kv.memory import available, host_pool
from kvchat.kv.memory.host_pool import HostPool, gather, layer_bytes, pool_tokens
from kvchat.kv.memory.pinned import CudaRegistrar, PinnedRegion

CPU = torch.device("cpu")


def geometry(layers: int = 2, kv_heads: int = 2, d: int = 16, page: int = 8, dtype=torch.float32, d_v=None) -> Geometry:
    return Geometry(layers, 2 * kv_heads, kv_heads, d, d if d_v is None else d_v, dtype, page)


def append_random(pool: HostPool, tokens: int, seed: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Append ``tokens`` random tokens to every layer; returns them."""
    g, dice = pool.geometry, torch.Generator().manual_seed(seed)
    pool.reserve(pool.total + tokens)
    new = []
    for layer in range(g.layers):
        k, v = (torch.randn((g.kv_heads, tokens, d), generator=dice).to(g.dtype) for d in (g.d_k, g.d_v))
        pool.append(layer, pool.total, k.to(pool.device), v.to(pool.device))
        new.append((k, v))
    pool.total += tokens
    return new


def holds(pool: HostPool, layer: int, start: int, k: torch.Tensor, v: torch.Tensor) -> bool:
    keys, values = pool.dense(layer, pool.total)
    end = start + k.shape[1]
    return torch.equal(keys[:, start:end].cpu(), k) and torch.equal(values[:, start:end].cpu(), v)


def pool_of(tokens: int, registrar: CudaRegistrar | None = None, **kwargs) -> HostPool:
    return HostPool(geometry(**kwargs), CPU, tokens, registrar)


# ---- address space and memory


@given(st.lists(st.integers(1, 700), min_size=1, max_size=30), st.booleans())
@settings(max_examples=60, deadline=None)
def test_pool_size_depends_only_on_the_tokens_held(growths, is_pinned):
    g = geometry(kv_heads=4, d=64, page=32)  # pages that are whole system pages
    pool = HostPool(g, CPU, 30_000, Pins() if is_pinned else None)
    pool._step = min(pool._step, 512)
    held = 0
    for more in growths:
        held += more
        pool.reserve(held)
        assert pool.capacity == pool_tokens(g, held, pool._step) >= held
        assert pool.nbytes == g.layers * layer_bytes(g, pool.capacity)


def test_the_pool_moves_when_it_outgrows_the_context():
    pool = pool_of(300)
    written = append_random(pool, 290)
    old = weakref.ref(pool._regions[0])
    assert pool.reserve(pool.reserved + 1)
    assert all(holds(pool, layer, 0, *written[layer]) for layer in range(2))
    assert old() is None, "the old region is freed"
    assert not pool.reserve(pool.reserved), "it reserves twice the address space, so the next tokens move nothing"


def test_reported_bytes_equal_resident_memory():
    pool = pool_of(100_000)
    pool.reserve(20_000)
    assert pool.nbytes < pool._regions[0].size
    assert [resident(region) for region in pool._regions] == [region.committed for region in pool._regions]
    needed = 20_000 * pool.geometry.token_bytes
    assert needed <= pool.nbytes <= needed * 1.08
    pool.truncate(10)
    assert sum(map(resident, pool._regions)) == pool.nbytes


def test_growth_beyond_free_memory_is_refused(monkeypatch):
    pool = pool_of(100_000)
    written = append_random(pool, 1000)
    before = pool.capacity, pool.nbytes
    monkeypatch.setattr(available, "host_free", lambda: 2**20)
    with pytest.raises(DoesNotFitError, match=r"50,\d+ tokens.* 2\d\.\d\d MiB"):
        pool.reserve(50_000)
    with pytest.raises(DoesNotFitError):
        pool.reserve(200_000)
    assert (pool.capacity, pool.nbytes, pool.total) == (*before, 1000)
    assert all(holds(pool, layer, 0, *written[layer]) for layer in range(2))
    monkeypatch.undo()
    assert not pool.reserve(50_000)


def test_growth_takes_only_what_it_needs_if_memory_is_short(monkeypatch):
    pool = pool_of(100_000, Pins())
    pool.reserve(1000)
    page_bytes = 8 * pool.geometry.token_bytes
    monkeypatch.setattr(available, "host_free", lambda: 20 * page_bytes)
    pool.reserve(pool.capacity + 1)
    assert pool.capacity <= 1000 * 2 + 20 * 8
    with pytest.raises(DoesNotFitError):
        pool.reserve(pool.capacity + 8 * 40)


def test_a_move_needs_room_for_one_layer_twice(monkeypatch):
    pool = pool_of(0, layers=4)
    append_random(pool, 100)
    more = layer_bytes(pool.geometry, 1000) * 4 - pool.nbytes
    monkeypatch.setattr(available, "usable", lambda free: free)
    monkeypatch.setattr(available, "host_free", lambda: more + pool._regions[0].committed - 1)
    with pytest.raises(DoesNotFitError):
        pool.reserve(1000)
    monkeypatch.setattr(available, "host_free", lambda: more + pool._regions[0].committed)
    assert pool.reserve(1000)


def test_an_interrupted_move_leaves_the_pool_intact(monkeypatch):
    pins = Pins()
    pool = pool_of(0, pins, layers=3)
    written, commit, calls = append_random(pool, 100), PinnedRegion.commit, []

    def fail_at_the_second(region, size):
        calls.append(size)
        if len(calls) == 2:
            raise MemoryError
        commit(region, size)

    monkeypatch.setattr(PinnedRegion, "commit", fail_at_the_second)
    with pytest.raises(MemoryError):
        pool.reserve(1000)
    assert pool.pinned
    assert not pool.badges
    monkeypatch.undo()
    more = append_random(pool, 900, seed=1)
    for layer in range(3):
        assert holds(pool, layer, 0, *written[layer])
        assert holds(pool, layer, 100, *more[layer])


def test_scarce_address_space_is_reserved_only_as_needed(monkeypatch):
    real, requests = mmap.mmap, []

    def scarce(fileno, length, *args):
        requests.append(length)
        if length > 2**20:
            raise OSError(12, "Cannot allocate memory")
        return real(fileno, length, *args)

    monkeypatch.setattr(mmap, "mmap", scarce)
    pool = pool_of(100_000)
    assert pool.reserved == pool.capacity
    written = append_random(pool, 500)
    assert pool.reserve(pool.reserved + 1), "nothing more was reserved, so the pool moves"
    assert all(holds(pool, layer, 0, *written[layer]) for layer in range(2))
    with pytest.raises(DoesNotFitError, match="Cannot allocate memory"):
        pool.reserve(10_000)
    assert all(holds(pool, layer, 0, *written[layer]) for layer in range(2))


# ---- pinning


@settings(max_examples=40)
@given(
    layers=st.integers(1, 3),
    kv_heads=st.integers(1, 5),
    d=st.sampled_from([4, 6, 16, 40, 128]),
    d_v=st.sampled_from([None, 4]),
    page=st.sampled_from([8, 32]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    context=st.sampled_from([0, 500, 6000]),
    step=st.sampled_from([0, 2**16, 2**28]),
    growths=st.lists(st.integers(1, 700), min_size=1, max_size=12),
)
def test_pinned_segments_exactly_cover_the_used_memory(layers, kv_heads, d, d_v, page, dtype, context, step, growths):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_pool, "STEP_BYTES", step)
        pins = Pins()
        pool = HostPool(geometry(layers, kv_heads, d, page, dtype, d_v), CPU, context, pins)
        written, starts = [], []
        for seed, tokens in enumerate(growths):
            addresses = [pool.rows(layer).data_ptr() for layer in range(layers)]
            fits = pool.total + tokens <= pool.reserved
            starts.append(pool.total)
            written.append(append_random(pool, tokens, seed))
            assert fits == (addresses == [pool.rows(layer).data_ptr() for layer in range(layers)])
            assert pool.pinned
            assert pool.capacity >= pool.total
            for layer in range(layers):
                used = pool.layers[layer]
                assert pins.is_exact(used.data_ptr(), used.nbytes)
            assert sum(pins.held.values()) == pool.nbytes
        for start, new in zip(starts, written, strict=True):
            assert all(holds(pool, layer, start, *new[layer]) for layer in range(layers))
        seen = set(pins.held)
        del pool, used
        assert not pins.held
        assert len(pins.given_back) == pins.calls
        assert seen <= set(pins.given_back)


def test_growth_steps_double_up_to_a_limit(monkeypatch):
    monkeypatch.setattr(host_pool, "STEP_BYTES", 2**20)
    pool = pool_of(100_000, Pins())
    sizes = [pool.nbytes]
    for tokens in range(100, 12_000, 10):
        pool.reserve(tokens)
        if pool.nbytes != sizes[-1]:
            sizes.append(pool.nbytes)
    steps = [after - before for before, after in pairwise(sizes)]
    assert 2 * sizes[0] <= sizes[1] <= 2.2 * sizes[0]
    assert max(steps[:-1]) >= 2**20 * 0.9
    assert all(step <= min(2**20, size) * 1.1 for step, size in zip(steps[1:], sizes[1:], strict=False))


@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("fails_at", [1, 2, 3, 4, 7])
def test_a_refused_segment_makes_the_pool_pageable_until_it_grows(fails_at, elsewhere):
    pins = Pins(fails_at, elsewhere)
    pool = HostPool(geometry(), CPU, 400, pins)
    assert pool.pinned == (fails_at > 2)
    written, starts, was_pageable = [], [], not pool.pinned
    for seed in range(8):
        starts.append(pool.total)
        before = pool.pinned, [region.shift for region in pool._regions]
        held, given_back, fits = dict(pins.held), len(pins.given_back), pool.total + 100 <= pool.reserved
        changed = pool.reserve(pool.total + 100)
        assert changed == (not fits or before != (pool.pinned, [region.shift for region in pool._regions]))
        assert all(pool.pageable_reason in badge for badge in pool.badges)
        assert bool(pool.badges) != pool.pinned
        if fits and not elsewhere:
            assert len(pins.given_back) == given_back, "pinned segments stay pinned"
            assert held.items() <= pins.held.items()
        was_pageable |= not pool.pinned
        written.append(append_random(pool, 100, seed))
    assert was_pageable
    assert pool.pinned, "pinning is tried again"
    for region in pool._regions:
        assert pins.is_exact(region.bytes.data_ptr(), region.committed)
    for start, new in zip(starts, written, strict=True):
        assert all(holds(pool, layer, start, *new[layer]) for layer in range(2))


# ---- with a GPU


@pytest.fixture
def cuda():
    return torch.device("cuda", 0)


@pytest.mark.cuda
def test_a_gpu_reads_and_writes_across_segments(cuda, monkeypatch):
    monkeypatch.setattr(host_pool, "STEP_BYTES", 2**16)
    pool = HostPool(geometry(kv_heads=3, d=24, d_v=16, dtype=torch.bfloat16), cuda, 5000)
    assert pool.pinned, pool.pageable_reason
    view, address = pool.rows(0), pool.rows(0).data_ptr()
    assert address == pool._regions[0].bytes.data_ptr()
    written = [append_random(pool, 500, seed) for seed in range(9)]
    assert len(pool._regions[0]._registered) > 3
    assert pool.rows(0).data_ptr() == address
    torch.cuda.synchronize()
    for i, new in enumerate(written):
        assert all(holds(pool, layer, 500 * i, *new[layer]) for layer in range(2))
    index = pool.row_index(torch.arange(4500, device=cuda), torch.tensor(1, device=cuda))
    assert torch.equal(view.index_select(0, index).cpu(), pool.layers[0].view(-1, 24)[index.cpu()])
    assert pool.reserve(6000), "beyond the context the pool moves"
    for i, new in enumerate(written):
        assert all(holds(pool, layer, 500 * i, *new[layer]) for layer in range(2))


@pytest.mark.cuda
def test_a_captured_graph_reads_memory_pinned_later(cuda):
    pool = HostPool(geometry(), cuda, 50_000)
    append_random(pool, 100)
    out = torch.zeros(1, 16, device=cuda)
    index = torch.zeros(1, dtype=torch.int64, device=cuda)
    head = torch.zeros((), dtype=torch.int64, device=cuda)
    torch.index_select(pool.rows(0), 0, index, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.index_select(pool.rows(0), 0, index, out=out)
    new = append_random(pool, 40_000, seed=1)
    index.copy_(pool.row_index(torch.tensor([35_000], device=cuda), head))
    graph.replay()
    assert torch.equal(out[0].cpu(), new[0][0][0, 34_900])


@pytest.mark.cuda
def test_a_pageable_pool_reads_like_a_pinned_one(cuda):
    pins = Pins(fails_at=1, fails_for_good=True)
    pinned, pageable = HostPool(geometry(), cuda, 1000), HostPool(geometry(), cuda, 1000, pins)
    assert pinned.pinned
    assert not pageable.pinned
    for pool in (pinned, pageable):
        append_random(pool, 700)
    index = pinned.row_index(torch.arange(0, 700, 7, device=cuda), torch.tensor(1, device=cuda))
    for layer in range(2):
        assert all(torch.equal(a, b) for a, b in zip(pinned.dense(layer, 700), pageable.dense(layer, 700), strict=True))
        gathered = gather(pageable.rows(layer), index)
        assert gathered.device == cuda
        assert torch.equal(gather(pinned.rows(layer), index), gathered)
        first = index[:5]
        assert torch.equal(gather(pinned.blocks(layer), first), gather(pageable.blocks(layer), first))
