"""Attention products on a CPU match torch's wherever the tokens are stored."""

import os
import subprocess
import sys

import pytest
import torch
from support.dense_attention import causal
from support.grids import pairwise

from kvchat.kv.attention import AttentionSpec, attend, products
from kvchat.kv.geometry import Geometry
from kvchat.kv.memory import eight_bit_pages
from kvchat.kv.ops import cpu_ops
from kvchat.models.quantize import rows


def unrounded(blocks, g):
    """``eight_bit_pages.dequantize``, in float32 whatever the dtype."""
    codes, *scales = (part.float() for part in eight_bit_pages.parts(blocks, g))
    return torch.stack(
        (codes[..., 0, :, :] * scales[0].unsqueeze(-2), codes[..., 1, :, :] * scales[1].unsqueeze(-1)), -3
    )


def check(computed, query, weights, keys, values):
    """Compare the products ``computed`` with those of ``keys`` and ``values`` in float64."""
    exact = products(keys.double(), values.double())
    sums = computed.sums(weights)
    torch.testing.assert_close(computed.scores(query).double(), exact.scores(query.double()), rtol=1e-5, atol=1e-3)
    last = max(1e-5, torch.finfo(sums.dtype).eps)
    torch.testing.assert_close(sums.double(), exact.sums(weights.double()), rtol=last, atol=1e-3)


@pytest.mark.parametrize("dtype", cpu_ops.KNOWN, ids=str)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("n", [2048, 2561, 3071])
@pytest.mark.parametrize(("heads", "group", "d"), [(1, 1, 1), (4, 2, 64), (2, 7, 20), (3, 1, 80)])
def test_products_over_many_tokens(heads, group, d, n, threads, dtype):
    """In a larger buffer, of which only some tokens and some numbers of each are read."""
    assert n >= cpu_ops.MANY
    draw = torch.Generator().manual_seed(n)
    rows = torch.randn((heads, n + 9, d + 3), generator=draw).to(dtype)[:, 5 : 5 + n, :d]
    query, weights = (torch.randn((heads, group, size), generator=draw) for size in (d, n))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        check(cpu_ops.in_a_row(rows, rows), query, weights, rows, rows)
    finally:
        torch.set_num_threads(before)


def test_products_with_learned_sinks():
    """The weights are then only part of the softmax, so they are not contiguous."""
    draw, n = torch.Generator().manual_seed(3), cpu_ops.MANY
    keys, values = torch.randn((2, 2, n, 8), generator=draw)
    query, sinks = torch.randn((2, 3, 8), generator=draw), torch.randn((2, 3), generator=draw) + 9
    spec = AttentionSpec(0.3)
    found, _ = attend(query, cpu_ops.in_a_row(keys, values), None, spec, sinks)
    exact, _ = attend(query.double(), products(keys.double(), values.double()), None, spec, sinks.double())
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", cpu_ops.KNOWN, ids=str)
@pytest.mark.parametrize("tokens", [1, 17, 700])
@pytest.mark.parametrize(
    ("heads", "group", "d", "room"), [(1, 1, 5, 5), (2, 4, 24, 40), (4, 2, 64, 64), (2, 7, 96, 99)]
)
def test_attention_over_scattered_tokens_returns_weights(heads, group, d, room, tokens, dtype):
    """Heads are apart, rows are wider than what is read, and the tokens have gaps."""
    draw, spec = torch.Generator().manual_seed(tokens + d), AttentionSpec(0.3)
    keys, values = (torch.randn(heads, 1000, room, generator=draw).to(dtype)[:, :900, :d] for _ in range(2))
    table = torch.randperm(900, generator=draw)[:tokens].sort().values.to(torch.int32).expand(heads, -1)
    query, sinks = torch.randn((heads, group, d), generator=draw), torch.randn((heads, group), generator=draw)
    for learned in (None, sinks):
        output, weights = torch.empty(heads, group, d + 1), torch.empty(heads, group, tokens)
        stored = *cpu_ops._rows(keys), *cpu_ops._rows(values)
        loops = cpu_ops.loops_over(dtype, cpu_ops.TOKENS)
        request = cpu_ops._asked(query, spec, learned)
        loops.attend_tokens(*request, *stored, table.numpy(), output.numpy(), 1, weights.numpy())
        held = products(*(rows[:, table[0].long()].double() for rows in (keys, values)))
        exact = attend(query.double(), held, None, spec, None if learned is None else learned.double())
        for found, expected in zip((output[..., :-1], weights), exact, strict=True):
            torch.testing.assert_close(found.double(), expected.double(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", cpu_ops.KNOWN, ids=str)
@pytest.mark.parametrize(("first", "last"), [(0, 300), (37, 300), (64, 257), (290, 291)])
@pytest.mark.parametrize(
    ("heads", "group", "d_k", "d_v", "page"), [(1, 1, 4, 4, 4), (2, 3, 32, 24, 8), (4, 2, 64, 64, 32)]
)
def test_products_over_full_precision_and_8_bit_pages(heads, group, d_k, d_v, page, first, last, dtype):
    g = Geometry(1, heads * group, heads, d_k, d_v, dtype, page, unified=True)
    draw, pages = torch.Generator().manual_seed(page), -(-last // page)
    exact = torch.randn(2, heads, (pages + 3) * page, d_k, generator=draw).to(dtype)
    by_page = exact.view(2, heads, -1, page, d_k).permute(2, 1, 0, 3, 4)
    quantized = eight_bit_pages.quantize(by_page.flip(0), g)
    # Every other page is full-precision, from the pool's third page on; the rest are in 8 bits, from the last on.
    places = torch.tensor([at + 2 if at % 2 else ~(at + 1) for at in range(pages)])
    held = torch.stack([by_page[at] if at >= 0 else unrounded(quantized[~at], g) for at in places.tolist()])
    keys, values = held.permute(2, 1, 0, 3, 4).reshape(2, heads, -1, d_k)
    some = (torch.rand(last, generator=draw) < 0.7).nonzero().flatten()
    table = some[some >= first].to(torch.int32)
    mixed = cpu_ops.mixed(exact, quantized, places, table[None], g)
    assert mixed.sums(torch.ones(heads, group, len(table))).dtype == dtype
    query, weights = (torch.randn((heads, group, size), generator=draw) for size in (d_k, len(table)))
    keys, values = (rows[:, table.long()] for rows in (keys, values[..., :d_v]))
    check(mixed, query, weights, keys, values)


def test_misaligned_8_bit_pages_are_left_to_torch():
    g = Geometry(1, 4, 2, 5, 5, torch.float32, page=5, unified=True)
    table = torch.zeros(1, 3, dtype=torch.int32)
    pages = torch.zeros(2, 2, 10, 5), torch.zeros(2, 2, eight_bit_pages.block_bytes(g)), torch.zeros(2)
    assert eight_bit_pages.block_bytes(g) % 4
    assert cpu_ops.mixed(*pages, table, g) is None  # scales would be misaligned


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("dtype", cpu_ops.KNOWN, ids=str)
def test_partial_attention_returns_its_logsumexp(dtype, softcap):
    draw, spec = torch.Generator().manual_seed(1), AttentionSpec(0.3, softcap=softcap)
    query, keys, values = (torch.randn(2, n, d, generator=draw).to(dtype) for n, d in ((3, 20), (700, 20), (700, 24)))
    table, sinks = torch.arange(9, 700, dtype=torch.int32).expand(2, -1), torch.randn(2, 3, generator=draw)
    logits = 0.3 * query.double() @ keys[:, 9:].double().transpose(1, 2)
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    for learned in (None, sinks):
        part = cpu_ops.attended_part(query, keys, values, table, spec, learned)
        all_logits = logits if learned is None else torch.cat((logits, learned.double()[..., None]), -1)
        expected = all_logits.softmax(-1)[..., : logits.shape[-1]] @ values[:, 9:].double()
        expected = torch.cat((expected, all_logits.logsumexp(-1, keepdim=True)), -1)
        torch.testing.assert_close(part.double(), expected, rtol=1e-5, atol=1e-5)


def test_few_tokens_do_not_use_numba(monkeypatch):
    monkeypatch.setattr(cpu_ops, "compiled_loops", lambda *_: pytest.fail("numba was used"))
    rows = torch.ones((2, cpu_ops.MANY - 1, 8))
    assert cpu_ops.in_a_row(rows, rows).scores(rows[:, :3]).shape == (2, 3, cpu_ops.MANY - 1)


def test_numba_does_not_change_torchs_threads():
    """Both share one OpenMP, which numba sets to every processor; next to busy processes torch would wait."""
    script = (
        "import torch; from kvchat.kv.ops.cpu_ops import MANY, in_a_row; rows = torch.ones((1, MANY, 8));"
        "in_a_row(rows, rows).scores(rows[:, :1]); print(torch.get_num_threads())"
    )
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, text=True, timeout=120)
    assert done.stdout == "1\n", done.stderr


# ---- A few tokens at once: attention and products with weights against float64


CLOSE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


SHAPES = [(4, 2, 64, 64), (1, 3, 20, 16), (2, 7, 128, 96)]  # heads, queries of each, d_k, d_v
LAYERS = [(None, None, False), (100, None, True), (1, 5.0, False), (4000, None, True), (2050, 3.0, True)]


@pytest.mark.parametrize(("layer", "shape", "dtype"), pairwise(LAYERS, SHAPES, [*cpu_ops.KNOWN]), ids=str)
def test_each_row_attends_to_the_tokens_it_sees(layer, shape, dtype):
    (window, softcap, has_sinks), (heads, group, d_k, d_v) = layer, shape
    draw = torch.Generator().manual_seed(1)
    spec = AttentionSpec(d_k**-0.5, window, softcap, torch.randn(heads * group, generator=draw) if has_sinks else None)
    for n, start in ((1, 2048), (2, 2559), (5, 2049), (8, 3000), (32, 2100)):
        buffer = torch.randn((2, heads, start + n + 9, max(d_k, d_v) + 3), generator=draw).to(dtype)
        keys, values = buffer[0, :, 5 : 5 + start + n, :d_k], buffer[1, :, 5 : 5 + start + n, :d_v]
        query = torch.randn((heads * group, n, d_k), generator=draw).to(dtype)
        found = cpu_ops.attended_rows(query, keys, values, start, spec)
        assert found.dtype == dtype
        assert (found.double() - causal(query, keys, values, start, spec)).abs().max() < CLOSE[dtype]


def test_memory_after_the_last_token_is_not_read():
    draw = torch.Generator().manual_seed(2)
    buffer = torch.randn((2, 2, 2200, 32), generator=draw)
    buffer[:, :, 2103:] = float("nan")
    query, spec = torch.randn((4, 3, 32), generator=draw), AttentionSpec(0.2)
    keys, values = buffer[0, :, :2103], buffer[1, :, :2103]
    found = cpu_ops.attended_rows(query, keys, values, 2100, spec)
    assert (found.double() - causal(query, keys, values, 2100, spec)).abs().max() < 1e-5


@pytest.mark.parametrize("count", [2, 3, 4, 8, 13, 16])
def test_a_few_rows_are_multiplied_together(monkeypatch, count):
    monkeypatch.setattr(rows, "in_blocks", lambda: True)
    draw = torch.Generator().manual_seed(3)
    for outputs, size in ((20, 48), (512, 1536)):
        x, weight = torch.randn((1, count, size), generator=draw), torch.randn((outputs, size), generator=draw)
        bias = torch.randn(outputs, generator=draw)
        found = rows._multiply_few(x, weight, bias)
        assert (found.double() - (x.double() @ weight.double().t() + bias.double())).abs().max() < 1e-4
        assert torch.equal(rows.linear(x, weight, bias), found)


def test_unsupported_shapes_are_left_to_torch(monkeypatch):
    monkeypatch.setattr(rows, "in_blocks", lambda: True)
    for outputs, size in ((10, 48), (20, 50)):
        x, weight = torch.randn(3, size), torch.randn(outputs, size)
        assert rows._multiply_few(x, weight, None) is None
        assert (rows.linear(x, weight) - x @ weight.t()).abs().max() < 1e-4
