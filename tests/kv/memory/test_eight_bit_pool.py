"""8-bit pages: their places, memory and accuracy, and running out of memory without losses."""

import random

import pytest
import torch
from support.eight_bit_run import EightBitRun, in_8_bits
from support.memory_faults import NO_MEMORY, MemoryRunsOut
from support.toy_model import toy

from kvchat.kv.geometry import Geometry
from kvchat.kv.memory import available, eight_bit_pages
from kvchat.kv.memory.eight_bit_pages import dequantize, quantize
from kvchat.kv.memory.eight_bit_pool import EightBitPool
from kvchat.kv.memory.host_pool import HostPool, layer_bytes, pool_tokens
from kvchat.kv.memory.pages import has_quantized
from kvchat.kv.state import KVState

G = Geometry(layers=2, q_heads=4, kv_heads=2, d_k=24, d_v=16, dtype=torch.float32, page=8, unified=True)


def noise(tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, tokens, 24, generator=generator), torch.randn(2, tokens, 16, generator=generator)


def store(pool: EightBitPool, tokens: int, seed: int) -> None:
    pool.reserve(pool.total + tokens)
    for layer in range(2):
        pool.append(layer, pool.total, *noise(tokens, seed + layer))
    pool.total += tokens


def test_pages_never_overlap():
    dice, pool = random.Random(0), EightBitPool(HostPool(G, torch.device("cpu"), 400))
    kept = [torch.zeros(2, 0, 24) for _ in range(2)]
    full_precision_again = 0
    for turn in range(300):
        if not (pool.quantizes or has_quantized(pool)):
            full_precision_again += pool.total > 8
            pool = EightBitPool(pool.full_precision_pool())
        if dice.random() < 0.7 or not pool.total:
            pool.quantizes = dice.random() < 0.6
            count, first = dice.choice([1, 1, 3, 8, 21]), pool.total // 8
            kept = [
                torch.cat((keys[:, : pool.total], noise(count, 2 * turn + layer)[0]), 1)
                for layer, keys in enumerate(kept)
            ]
            store(pool, count, 2 * turn)
            for page in range(first, pool.total // 8):
                if pool.quantizes:
                    for keys in kept:
                        keys[:, page * 8 : page * 8 + 8] = in_8_bits(keys[:, page * 8 : page * 8 + 8], True)
        else:
            pool.truncate(dice.randrange(pool.total))
        assert len(set(pool._pages)) == len(pool._pages) == G.pages(pool.total)
        assert has_quantized(pool) == pool.has_quantized == bool(pool.quantized_pages)
        if not (pool.total % 8 and pool.quantized[-1]):  # a truncated 8-bit page would become full-precision
            pool.reserve(pool.total + 1)
            assert pool.places[: len(pool._pages)].tolist() == pool._pages
        for layer in range(2):
            assert torch.equal(pool.dense(layer, pool.total)[0], kept[layer][:, : pool.total])
    assert full_precision_again > 5


def test_put_updates_the_pages_places():
    pool = EightBitPool(HostPool(G, torch.device("cpu"), 400))
    store(pool, 33, 0)
    pool.reserve(34)
    pool.put(1, pool.copied(0))
    pool.total = 41
    pool.reserve(42)
    assert pool.places[: len(pool._pages)].tolist() == pool._pages


def test_a_pool_without_8_bit_pages_becomes_full_precision():
    run = EightBitRun(toy(page=8), "full").begun(10)
    state = run.kv.state
    run.set(False)
    run.prefill(20)
    assert isinstance(state.host, EightBitPool)
    run.truncate(0)
    run.prefill(20)
    assert not isinstance(state.host, EightBitPool)
    run.set(True)
    run.step(3)
    assert isinstance(state.host, EightBitPool)
    run.set(False)
    assert not isinstance(state.host, EightBitPool)
    assert not run.kv.mode.report().badges


def test_pages_survive_growth_beyond_the_context():
    pool = EightBitPool(HostPool(G, torch.device("cpu"), 40))
    reserved = pool.eight_bit.reserved
    store(pool, 40, 0)
    before = pool.dense(0, 40)
    for turn in range(10):
        store(pool, reserved // 4, turn)
    assert pool.eight_bit.reserved > reserved
    for found, stored in zip(pool.dense(0, 40), before, strict=True):
        assert torch.equal(found, stored)


def test_8_bit_pages_take_a_quarter_of_float32_and_half_of_bfloat16():
    for dtype, share in ((torch.float32, 0.28), (torch.bfloat16, 0.53)):
        g = Geometry(2, 8, 4, 64, 64, dtype, unified=True)
        pool = EightBitPool(HostPool(g, torch.device("cpu"), 10_000))
        exact = HostPool(g, torch.device("cpu"), 10_000)
        pool.reserve(8192)
        exact.reserve(8192)
        planned = g.layers * layer_bytes(g, g.grown(0), pool_tokens(g, 8192, 0))
        assert pool.nbytes == pytest.approx(planned, rel=0.01)
        held = g.layers * layer_bytes(g, g.grown(0))  # of the full-precision pool, whatever the length
        assert pool.nbytes - held < share * exact.nbytes


def test_quantizing_without_free_memory_is_refused(monkeypatch):
    from kvchat.errors import DoesNotFitError

    state = KVState(G, torch.device("cpu"), 400)
    monkeypatch.setattr(available, "host_free", lambda: 0)
    with pytest.raises(DoesNotFitError):
        state.quantize_pages(True)
    assert not state.quantizes
    assert type(state.host) is HostPool


@pytest.mark.parametrize("mode", ["full", "speculative"])
def test_no_tokens_are_lost_if_memory_runs_out(mode):
    params = {"budget": 80, "sink": 8, "window": 24} if mode == "speculative" else {}
    run = EightBitRun(toy(("plain", "plain"), page=8, unified=True), mode, **params).begun(93, 2)
    dice = random.Random(0)
    for place in dice.sample(range(1, 60), 6):
        _with_a_fault(run, place, lambda: run.step(1))
        _with_a_fault(run, place, lambda: run.truncate(len(run.ids) - 3))
        _with_a_fault(run, place, lambda: run.prefill(9))
        run.check()
    run.step(10)
    run.check()


def _with_a_fault(run: EightBitRun, place: int, work) -> None:
    """Do ``work`` while memory runs out at one operation; if it fails, do it again."""
    ids, keys, values, stored, full = list(run.ids), list(run.keys), list(run.values), list(run.stored), run.full
    try:
        with MemoryRunsOut(place):
            work()
    except NO_MEMORY:
        run.ids[:], run.keys, run.values, run.stored, run.full = ids, keys, values, stored, full
        if run.kv.total > len(ids) or run.kv.total < len(ids) - 3:
            raise
        if run.kv.total == len(ids):
            work()
        else:  # the truncation was done; only its slots are refilled later
            EightBitRun.truncate(run, run.kv.total)


# ---- 8-bit pages: accuracy


def geometry(dtype: torch.dtype = torch.float32) -> Geometry:
    return Geometry(layers=2, q_heads=4, kv_heads=2, d_k=16, d_v=8, dtype=dtype, page=8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dequantized_values_are_within_half_a_code(dtype):
    g = geometry(dtype)
    pages = torch.randn(3, 2, g.page, g.d, generator=torch.Generator().manual_seed(0)).to(dtype)
    pages[..., 0, :, 3] *= 100  # one key channel is large in all tokens, which does not affect the others
    blocks = quantize(pages, g)
    assert blocks.shape == (3, eight_bit_pages.block_bytes(g))
    off = (dequantize(blocks, g) - pages).abs().float()
    keys, values = pages.abs().float().unbind(-3)
    scales = torch.stack(
        (keys.amax(-2, keepdim=True).expand_as(keys), values.amax(-1, keepdim=True).expand_as(values)), -3
    )
    # With 16-bit dtypes the scale and the product are rounded too.
    slack = 1e-5 if dtype is torch.float32 else 2 * torch.finfo(dtype).eps * eight_bit_pages.LARGEST
    assert (off <= scales / eight_bit_pages.LARGEST * (0.5 + slack)).all()


def test_quantization_keeps_zeros_and_is_idempotent():
    g = geometry()
    assert not dequantize(quantize(torch.zeros(1, 2, g.page, g.d), g), g).any()
    blocks = quantize(torch.randn(1, 2, g.page, g.d, generator=torch.Generator().manual_seed(1)), g)
    once = dequantize(blocks, g)
    assert torch.equal(dequantize(quantize(once, g), g), once)
