"""A prefill's attention against dense attention in float64, on every kernel a device may choose."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.dense_attention import TOLERANCE, dense

from kvchat.kv import attention
from kvchat.kv.attention import AttentionSpec, Kernel, attend_prefill

SIZES = st.integers(1, 48)


def drawn(heads: int, group: int, n: int, start: int, d_k: int, d_v: int, dtype: torch.dtype) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    shapes = (heads * group, n, d_k), (heads, start + n, d_k), (heads, start + n, d_v)
    # As the model gives them: tokens first in memory, heads first in shape.
    return [torch.randn(n, h, d, generator=random).to(dtype).transpose(0, 1) for h, n, d in shapes]


def expected(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int, spec: AttentionSpec) -> torch.Tensor:
    keys = torch.arange(k.shape[1])
    rows = []
    for i in range(q.shape[1]):
        mask = keys <= start + i
        if spec.window is not None:
            mask &= keys > start + i - spec.window
        rows.append(dense(q[:, i], k, v, mask.expand(len(k), -1), spec))
    return torch.stack(rows, 1)


def spec_of(window: int | None, softcap: float | None, sinks: bool, q_heads: int) -> AttentionSpec:
    return AttentionSpec(0.3, window, softcap, torch.linspace(-1, 1, q_heads) if sinks else None)


@given(
    heads=st.integers(1, 3),
    group=st.integers(1, 4),
    n=SIZES,
    start=st.integers(0, 60),
    window=st.none() | SIZES,
    softcap=st.sampled_from([None, 2.0]),
    sinks=st.booleans(),
    width=st.sampled_from([(16, 16), (20, 20), (16, 8)]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    block=st.sampled_from([2**22, 700, 1]),
)
@settings(max_examples=60)
@example(2, 2, 30, 0, None, None, False, (16, 16), torch.float32, 2**22)
def test_every_kernel_is_dense_attention(heads, group, n, start, window, softcap, sinks, width, dtype, block):
    spec = spec_of(window, softcap, sinks, heads * group)
    q, k, v = drawn(heads, group, n, start, *width, dtype)
    plain = softcap is None and not sinks
    kernels = [None, Kernel.SCORES] + [Kernel.MASKED] * plain
    unbounded = plain and (window is None or window >= start + n)
    kernels += [Kernel.FLASH] * unbounded + [Kernel.SPLIT] * (unbounded and width[0] == width[1])
    wanted = expected(q, k, v, start, spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "MASK_BLOCK", block)
        patch.setattr(attention, "SCORE_BLOCK", block)
        for kernel in kernels:
            output = attend_prefill(q, k, v, start, spec, kernel)
            assert (output.shape, output.dtype) == ((heads * group, n, width[1]), dtype)
            assert float((output.double() - wanted).abs().max()) <= TOLERANCE[dtype], kernel


@pytest.mark.parametrize("kernel", [Kernel.MASKED, Kernel.SCORES])
@pytest.mark.parametrize("window", [None, 100])
def test_masks_and_scores_are_bounded_whatever_is_stored(kernel, window, monkeypatch):
    sizes = []
    bias = attention._causal_bias

    def noted(*args):
        made = bias(*args)
        sizes.append(made.numel())
        return made

    monkeypatch.setattr(attention, "_causal_bias", noted)
    monkeypatch.setattr(attention, "MASK_BLOCK", 4000)
    monkeypatch.setattr(attention, "SCORE_BLOCK", 16000)
    q, k, v = drawn(2, 2, 150, 3000, 8, 8, torch.float32)
    attend_prefill(q, k, v, 3000, spec_of(window, None, False, 4), kernel)
    assert max(sizes) <= 4000  # SCORE_BLOCK counts all four heads' scores
    assert min(sizes[:-1]) > 2000 or window is None  # and blocks are as large as they may be


def test_a_block_reads_only_the_keys_that_some_query_of_it_sees(monkeypatch):
    seen = []
    masked = attention._masked

    def noted(query, keys, *args):
        seen.append((query.shape[1], keys.shape[1]))
        return masked(query, keys, *args)

    monkeypatch.setattr(attention, "_masked", noted)
    monkeypatch.setitem(attention.ROWS, "cpu", 40)
    q, k, v = drawn(1, 1, 100, 500, 8, 8, torch.float32)
    attend_prefill(q, k, v, 500, spec_of(64, None, False, 1))
    attend_prefill(q, k, v, 500, spec_of(None, None, False, 1), Kernel.MASKED)
    assert seen == [(40, 103), (40, 103), (20, 83), (40, 540), (40, 580), (20, 600)]


def test_the_mask_of_flash_attention_takes_no_memory():
    """torch's own constructor allocates 2 * n * total float32: for a prompt of 128K tokens 128 GiB."""
    q, k, v = drawn(1, 1, 3, 4, 8, 8, torch.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            attention.F, "scaled_dot_product_attention", lambda *args, **_: [args[3].untyped_storage().nbytes()]
        )
        assert attention._flash(q, k, v, 1.0) == 0


@pytest.mark.cuda
@pytest.mark.parametrize("start", [0, 3000])
@pytest.mark.parametrize("d", [64, 128, 80, 20])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("spec", [(None, None, False), (300, None, False), (None, 2.0, False), (300, None, True)])
def test_a_gpu_is_exact_and_takes_no_more_than_it_says(start, d, dtype, spec):
    layer = spec_of(*spec, 8)
    q, k, v = (x.cuda() for x in drawn(2, 4, 1500, start, d, d, dtype))
    sinks = None if layer.sinks is None else layer.sinks.cuda()
    on_device = AttentionSpec(layer.scaling, layer.window, layer.softcap, sinks)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    output = attend_prefill(q, k, v, start, on_device)
    torch.cuda.synchronize()
    padded = 3 * max(x.numel() for x in (q, k, v)) * 2 if d % 8 else 0
    taken = torch.cuda.max_memory_allocated() - before
    assert taken <= attention.PREFILL_WORKSPACE + 2 * output.nbytes + padded
    for i in (0, 700, 1499):
        stored = (x[:, : start + i + 1].cpu() for x in (k, v))
        wanted = expected(q[:, i : i + 1].cpu(), *stored, start + i, layer)
        assert float((output[:, i : i + 1].cpu().double() - wanted).abs().max()) <= TOLERANCE[dtype]
