"""A few tokens at once: their attention and their products with weights are those in float64."""

from __future__ import annotations

import pytest
import torch
from support.grids import pairwise

from kvchat.kv.attention import AttentionSpec
from kvchat.kv.ops import cpu_ops
from kvchat.models.quantize import rows

CLOSE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def exact(query, keys, values, start, spec):
    """Attention in float64, written out."""
    group, n = len(query) // len(keys), query.shape[1]
    keys, values = (stored.double().repeat_interleave(group, 0) for stored in (keys, values))
    scores = query.double() @ keys.transpose(1, 2) * spec.scaling
    if spec.softcap:
        scores = torch.tanh(scores / spec.softcap) * spec.softcap
    position, token = torch.arange(start, start + n)[:, None], torch.arange(start + n)
    closed = token > position
    if spec.window:
        closed |= token <= position - spec.window
    scores = scores.masked_fill(closed, float("-inf"))
    if spec.sinks is not None:
        scores = torch.cat((scores, spec.sinks.double()[:, None, None].expand(-1, n, 1)), -1)
    return scores.softmax(-1)[..., : start + n] @ values


SHAPES = [(4, 2, 64, 64), (1, 3, 20, 16), (2, 7, 128, 96)]  # heads, queries of each, d_k, d_v
LAYERS = [(None, None, False), (100, None, True), (1, 5.0, False), (4000, None, True), (2050, 3.0, True)]


@pytest.mark.parametrize(("layer", "shape", "dtype"), pairwise(LAYERS, SHAPES, [*cpu_ops.KNOWN]), ids=str)
def test_rows_attend_to_what_each_of_them_sees(layer, shape, dtype):
    (window, softcap, has_sinks), (heads, group, d_k, d_v) = layer, shape
    draw = torch.Generator().manual_seed(1)
    spec = AttentionSpec(d_k**-0.5, window, softcap, torch.randn(heads * group, generator=draw) if has_sinks else None)
    for n, start in ((1, 2048), (2, 2559), (5, 2049), (8, 3000), (32, 2100)):
        room = torch.randn((2, heads, start + n + 9, max(d_k, d_v) + 3), generator=draw).to(dtype)
        keys, values = room[0, :, 5 : 5 + start + n, :d_k], room[1, :, 5 : 5 + start + n, :d_v]
        query = torch.randn((heads * group, n, d_k), generator=draw).to(dtype)
        found = cpu_ops.attended_rows(query, keys, values, start, spec)
        assert found.dtype == dtype
        assert (found.double() - exact(query, keys, values, start, spec)).abs().max() < CLOSE[dtype]


def test_what_lies_behind_the_last_token_is_not_read():
    draw = torch.Generator().manual_seed(2)
    room = torch.randn((2, 2, 2200, 32), generator=draw)
    room[:, :, 2103:] = float("nan")
    query, spec = torch.randn((4, 3, 32), generator=draw), AttentionSpec(0.2)
    keys, values = room[0, :, :2103], room[1, :, :2103]
    found = cpu_ops.attended_rows(query, keys, values, 2100, spec)
    assert (found.double() - exact(query, keys, values, 2100, spec)).abs().max() < 1e-5


@pytest.mark.parametrize("count", [2, 3, 4, 8, 13, 16])
def test_rows_are_multiplied_together(monkeypatch, count):
    monkeypatch.setattr(rows, "in_blocks", lambda: True)
    draw = torch.Generator().manual_seed(3)
    for outputs, size in ((20, 48), (512, 1536)):
        x, weight = torch.randn((1, count, size), generator=draw), torch.randn((outputs, size), generator=draw)
        bias = torch.randn(outputs, generator=draw)
        found = rows._of_a_few(x, weight, bias)
        assert (found.double() - (x.double() @ weight.double().t() + bias.double())).abs().max() < 1e-4
        assert torch.equal(rows.linear(x, weight, bias), found)


def test_other_shapes_are_left_to_torch(monkeypatch):
    monkeypatch.setattr(rows, "in_blocks", lambda: True)
    for outputs, size in ((10, 48), (20, 50)):
        x, weight = torch.randn(3, size), torch.randn(outputs, size)
        assert rows._of_a_few(x, weight, None) is None
        assert (rows.linear(x, weight) - x @ weight.t()).abs().max() < 1e-4
