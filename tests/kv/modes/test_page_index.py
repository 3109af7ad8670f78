"""Page indexes: built from a prefill's keys, reading back one page at most, dropped if it fails."""

from contextlib import suppress

import pytest
import torch
from support.kv_run import Run
from support.kv_steps import prefill
from support.mode_rows import ROWS
from support.toy_model import toy

from kvchat.kv import manager as store_module
from kvchat.kv.geometry import Geometry
from kvchat.kv.memory.host_pool import HostPool
from kvchat.kv.modes import page_index
from kvchat.kv.modes.page_index import KeyCodes, PageBounds
from kvchat.kv.ops import key_codes
from kvchat.kv.prefill import StagedPrefill

CPU = torch.device("cpu")


def speculative(chunks: tuple[int, ...]) -> Run:
    run = Run(toy(("plain", "plain", "plain"), page=8), ROWS["freekv"][0], **ROWS["freekv"][1])
    for tokens in chunks:
        run.prefill(tokens, chunk=37)
        run.step(3)
    return run


def assert_bounds_match(run: Run) -> None:
    bounds, g = run.kv.mode.index, run.toy.geometry
    rebuilt = PageBounds(g, CPU, bounds.first)
    rebuilt.refresh(run.kv.state.host)
    pages = g.pages(run.kv.total)
    whole = run.kv.total // g.page  # on a CPU a page's bounds are computed when it is full
    assert whole * g.page <= bounds.tokens <= run.kv.total
    assert torch.equal(bounds.data[:, :, :whole], rebuilt.data[:, :, :whole])
    assert bool((bounds.data[:, :, pages:] == torch.finfo(g.dtype).min).all())


@pytest.mark.parametrize("chunks", [(30,), (150,), (100, 90), (64, 1, 50)])
def test_bounds_of_prefills_match_a_rebuilt_index(chunks):
    assert_bounds_match(speculative(chunks))


def test_bounds_read_at_most_one_page_back(monkeypatch):
    run, dense, read = speculative((150,)), HostPool.dense, []

    def recording(self, layer, tokens, page=0):
        read.append(tokens - page * self.geometry.page)
        return dense(self, layer, tokens, page)

    with monkeypatch.context() as patch:
        patch.setattr(store_module, "prefill_over", StagedPrefill)
        patch.setattr(HostPool, "dense", recording)
        run.prefill(100)
    assert 0 < max(read) <= run.toy.geometry.page
    assert_bounds_match(run)


@pytest.mark.parametrize("after", [0, 1, 2])
def test_bounds_of_a_failed_prefill_are_dropped(after):
    run = speculative((150,))
    start = run.kv.total
    with suppress(torch.OutOfMemoryError), prefill(run.kv, 90):
        for layer in range(after + 1):
            run.kv.attention(layer, *run.toy.qkv(layer, list(range(90)), start), run.toy.specs[layer])
        raise torch.OutOfMemoryError("no memory")
    assert run.kv.total == start
    if after % 2:
        run.kv.refill(fresh=True)
        assert_bounds_match(run)
    run.prefill(20)
    assert_bounds_match(run)


@pytest.mark.parametrize("row", ["freekv", "freekv-blocks", "freekv-bits", "speculative"])
def test_large_indexes_are_built_in_parts(row, monkeypatch):
    run = Run(toy(("plain", "plain", "plain"), page=8), ROWS[row][0], **ROWS[row][1]).begun(203)
    index = run.kv.mode.index
    expected = index.data.clone()
    monkeypatch.setattr(page_index, "MOST", 3)
    index.tokens = 0
    run.kv.refill(fresh=True)
    assert index.tokens == 203
    assert torch.allclose(index.data[:, :, :25].float(), expected[:, :, :25].float(), rtol=1e-6)  # 203 // 8 full pages
    assert torch.equal(index.data[:, :, 26:], expected[:, :, 26:])


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_key_codes_are_the_nearest_quantization_steps(bits, dtype):
    keys = (torch.randn(3, 70, 24, generator=torch.Generator().manual_seed(bits)) * 5 + 2).to(dtype)
    rows = key_codes.encode(keys, 32, bits)
    assert rows.shape == (3, 3, key_codes.words_of(24, 32, bits))
    kept = key_codes.decode(rows, 24, 32, bits, dtype)[:, :70]
    tiles = [keys[:, at : at + 32].double() for at in (0, 32, 64)]
    for tile, of in zip(tiles, kept.double().split([32, 32, 6], 1), strict=True):
        edge = torch.bfloat16 if dtype == torch.float32 else dtype
        low, high = (x.to(edge).double() for x in (tile.amin(1, keepdim=True), tile.amax(1, keepdim=True)))
        step = (high - low) / (2**bits - 1)
        nearest = low + ((tile - low) / step).clamp(0, 2**bits - 1).round() * step
        off = (of - tile).abs()
        assert (off <= (tile - nearest).abs() + step * 1e-5 + 1e-6).all()


def test_two_bit_codes_take_three_bits_per_element():
    g = Geometry(2, 8, 4, 128, 128, torch.bfloat16)
    assert KeyCodes(g, CPU).page_bytes * 8 == 3 * g.page * g.layers * g.kv_heads * g.d_k
