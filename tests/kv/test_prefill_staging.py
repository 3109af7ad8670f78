"""Prefill through buffers on the device: the same results as on the host, in the planned memory."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvchat.kv import prefill as prefill_module
from kvchat.kv.geometry import Geometry
from kvchat.kv.memory.eight_bit_pool import EightBitPool
from kvchat.kv.memory.host_pool import HostPool
from kvchat.kv.prefill import DirectPrefill, StagedPrefill, prefill_over

CPU = torch.device("cpu")


def geometry(d_k: int = 8, d_v: int = 8, layers: int = 3, dtype: torch.dtype = torch.float32) -> Geometry:
    return Geometry(layers, 4, 2, d_k, d_v, dtype, 8)


def new_kv(g: Geometry, tokens: int, seed: int, device: torch.device = CPU) -> list[tuple[torch.Tensor, torch.Tensor]]:
    random = torch.Generator().manual_seed(seed)

    def sample(d: int) -> torch.Tensor:
        return torch.randn(tokens, g.kv_heads, d, generator=random).to(device, g.dtype).transpose(0, 1)

    return [(sample(g.d_k), sample(g.d_v)) for _ in range(g.layers)]


def run(kind: type, host: HostPool, kv: list[tuple[torch.Tensor, torch.Tensor]]) -> list[tuple[torch.Tensor, ...]]:
    """Prefill one forward's tokens; returns copies of what attention was given."""
    tokens = kv[0][0].shape[1]
    host.reserve(host.total + tokens)
    prefill = kind(host, tokens) if kind is StagedPrefill else kind(host)
    seen = [tuple(x.clone() for x in prefill.extended(layer, *each)) for layer, each in enumerate(kv)]
    prefill.close()
    host.total += tokens
    return seen


def contents(host: HostPool) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [host.dense(layer, host.total) for layer in range(host.geometry.layers)]


@given(turns=st.lists(st.integers(1, 40), min_size=1, max_size=5), back=st.integers(0, 30), d_v=st.sampled_from([8, 4]))
@settings(max_examples=50)
@example([8, 8], 0, 8)
@example([1, 1, 1], 0, 8)
def test_staged_prefill_equals_direct_prefill(turns, back, d_v):
    """With turns of any length, truncations between them, and any segments of the pool."""
    g = geometry(d_v=d_v)
    staged, direct = HostPool(g, CPU, context=150), HostPool(g, CPU)
    for seed, tokens in enumerate(turns):
        kv = new_kv(g, tokens, seed)
        for ours, theirs in zip(run(StagedPrefill, staged, kv), run(DirectPrefill, direct, kv), strict=True):
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
        for ours, theirs in zip(contents(staged), contents(direct), strict=True):
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
        for host in (staged, direct):
            host.truncate(max(0, host.total - back))


@pytest.mark.parametrize("first", [0, 3, 8, 21, 60])
def test_pages_before_the_first_token_read_are_not_copied(first):
    g = geometry()
    hosts = HostPool(g, CPU), HostPool(g, CPU)
    before, kv = new_kv(g, 61, 0), new_kv(g, 30, 1)
    for host, kind in zip(hosts, (StagedPrefill, DirectPrefill), strict=True):
        run(kind, host, before)
        host.reserve(91)
    staged, direct = StagedPrefill(hosts[0], 30, first), DirectPrefill(hosts[1], first)
    for layer, each in enumerate(kv):
        for ours, theirs in zip(staged.extended(layer, *each), direct.extended(layer, *each), strict=True):
            assert ours.shape[1] == 91 - first
            assert torch.equal(ours, theirs)
    staged.close()
    assert len(staged.earlier) == g.pages(61) - first // g.page
    for host in hosts:
        host.total = 91
    for ours, theirs in zip(*map(contents, hosts), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("first", [0, 3, 8, 21, 60, 61])
def test_direct_prefill_reads_8_bit_pages(first):
    g, host = geometry(), EightBitPool(HostPool(geometry(), CPU))
    run(DirectPrefill, host, new_kv(g, 61, 0))
    host.reserve(91)
    stored, prefill = contents(host), prefill_over(host, 30, first)
    assert type(prefill) is DirectPrefill
    for layer, new in enumerate(new_kv(g, 30, 1)):
        for seen, before, each in zip(prefill.extended(layer, *new), stored[layer], new, strict=True):
            assert torch.equal(seen, torch.cat((before[:, first:], each), 1))


def test_the_tail_of_the_last_page_stays_finite():
    g = geometry()
    host = HostPool(g, CPU)
    run(StagedPrefill, host, new_kv(g, 13, 0))
    assert all(bool(torch.isfinite(layer[:2]).all()) for layer in host.layers)
    assert not bool(host.layers[0][1].flatten(0, 1)[:, 5:].any())


def test_copies_do_not_cross_pool_segments():
    g = geometry()
    host = HostPool(g, CPU, context=5000)
    starts = {0}
    for tokens in (500, 3000):
        starts.add(host._regions[0].committed)
        host.reserve(tokens)
    pieces = host.segments(1, 2, 375)
    first = host.layers[1].data_ptr()
    assert {piece.data_ptr() - first for piece in pieces} == {2 * g.token_bytes * g.page // g.layers, *starts - {0}}
    assert torch.equal(torch.cat(pieces), host.layers[1][2:375].flatten().view(torch.uint8))


def test_layers_out_of_order_get_their_own_keys():
    g = geometry()
    host = HostPool(g, CPU)
    run(StagedPrefill, host, new_kv(g, 20, 0))
    earlier = [keys.clone() for keys, _ in contents(host)]
    host.reserve(23)
    prefill, kv = StagedPrefill(host, 3), new_kv(g, 3, 1)
    for layer in (2, 0, 1):
        keys, _ = prefill.extended(layer, *kv[layer])
        assert torch.equal(keys[:, :20], earlier[layer])


def test_prefill_on_the_host_uses_no_buffers():
    assert type(prefill_over(HostPool(geometry(), CPU), 5)) is DirectPrefill


@pytest.mark.parametrize(("stored", "new"), [(0, 1), (0, 64), (5, 1), (64, 30), (61, 70)])
def test_the_plan_predicts_the_buffer_bytes(stored, new):
    g = geometry(d_v=4, dtype=torch.bfloat16)
    host = HostPool(g, CPU)
    host.reserve(stored + new)
    host.total = stored
    staged = StagedPrefill(host, new)
    assert staged.all.nbytes + staged.earlier.nbytes + staged.new.nbytes == prefill_module.staging_bytes(g, stored, new)


# ---- on a GPU; the fake one detects races between streams


@pytest.mark.cuda
@pytest.mark.parametrize("late", ["neither", "aside", "main"])
def test_late_streams_do_not_change_a_prefill(late, monkeypatch):
    device, g = torch.device("cuda"), geometry(16, 16, dtype=torch.bfloat16)
    if late == "aside":
        plain = prefill_module.copy_segments

        def delayed(*args, **kwargs):
            torch.cuda._sleep(20_000_000)
            plain(*args, **kwargs)

        monkeypatch.setattr(prefill_module, "copy_segments", delayed)
    staged, direct = HostPool(g, device), HostPool(g, CPU)
    for seed, tokens in enumerate((700, 1, 45, 2000)):
        on_host = new_kv(g, tokens, seed)
        theirs = run(DirectPrefill, direct, on_host)
        staged.reserve(staged.total + tokens)
        prefill = StagedPrefill(staged, tokens)
        for layer, each in enumerate(on_host):
            if late == "main":
                torch.cuda._sleep(20_000_000)
            seen = prefill.extended(layer, *(x.to(device, non_blocking=True) for x in each))
            assert all(torch.equal(a.cpu(), b) for a, b in zip(seen, theirs[layer], strict=True))
        prefill.close()
        staged.total += tokens
    for ours, theirs_ in zip(contents(staged), contents(direct), strict=True):
        assert all(torch.equal(a.cpu(), b) for a, b in zip(ours, theirs_, strict=True))
