"""Prefill attention against dense attention in float64, with every kernel a device may choose."""

import errno
import os

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.dense_attention import TOLERANCE, causal, rotated
from support.tiny_runner import load_tiny

from kvchat.engine.session import Session
from kvchat.errors import DoesNotFitError, OutOfMemoryError
from kvchat.kv import attention, prefill
from kvchat.kv.attention import PREFILL_WORKSPACE, AttentionSpec, Kernel, attend_prefill
from kvchat.kv.geometry import Geometry
from kvchat.kv.manager import explained, is_out_of_memory
from kvchat.kv.memory import available
from kvchat.kv.rope import Rotation, cos_sin, rotate

SIZES = st.integers(1, 48)


def draw_qkv(heads: int, group: int, n: int, start: int, d_k: int, d_v: int, dtype: torch.dtype) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    shapes = (heads * group, n, d_k), (heads, start + n, d_k), (heads, start + n, d_v)
    # As the model gives them: tokens first in memory, heads first in shape.
    return [torch.randn(n, h, d, generator=random).to(dtype).transpose(0, 1) for h, n, d in shapes]


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
def test_every_kernel_matches_dense_attention(heads, group, n, start, window, softcap, sinks, width, dtype, block):
    spec = spec_of(window, softcap, sinks, heads * group)
    q, k, v = draw_qkv(heads, group, n, start, *width, dtype)
    plain = softcap is None and not sinks
    kernels = [None, Kernel.SCORES] + [Kernel.MASKED] * plain
    unbounded = plain and (window is None or window >= start + n)
    kernels += [Kernel.FLASH] * unbounded + [Kernel.SPLIT] * (unbounded and width[0] == width[1])
    wanted = causal(q, k, v, start, spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "MASK_BLOCK", block)
        patch.setattr(attention, "SCORE_BLOCK", block)
        for kernel in kernels:
            output = attend_prefill(q, k, v, start, spec, kernel)
            assert (output.shape, output.dtype) == ((heads * group, n, width[1]), dtype)
            assert float((output.double() - wanted).abs().max()) <= TOLERANCE[dtype], kernel


@pytest.mark.parametrize("kernel", [Kernel.MASKED, Kernel.SCORES])
@pytest.mark.parametrize("window", [None, 100])
def test_mask_and_score_memory_is_bounded(kernel, window, monkeypatch):
    sizes = []
    bias = attention.causal_bias

    def recording(*args):
        result = bias(*args)
        sizes.append(result.numel())
        return result

    monkeypatch.setattr(attention, "causal_bias", recording)
    monkeypatch.setattr(attention, "MASK_BLOCK", 4000)
    monkeypatch.setattr(attention, "SCORE_BLOCK", 16000)
    q, k, v = draw_qkv(2, 2, 150, 3000, 8, 8, torch.float32)
    attend_prefill(q, k, v, 3000, spec_of(window, None, False, 4), kernel)
    assert max(sizes) <= 4000  # SCORE_BLOCK counts all four heads' scores
    assert min(sizes[:-1]) > 2000 or window is None  # and blocks are as large as allowed


def test_a_block_reads_only_keys_visible_to_its_queries(monkeypatch):
    seen = []
    masked = attention._masked

    def recording(query, keys, *args):
        seen.append((query.shape[1], keys.shape[1]))
        return masked(query, keys, *args)

    monkeypatch.setattr(attention, "_masked", recording)
    monkeypatch.setitem(attention.ROWS, "cpu", 40)
    q, k, v = draw_qkv(1, 1, 100, 500, 8, 8, torch.float32)
    attend_prefill(q, k, v, 500, spec_of(64, None, False, 1))
    attend_prefill(q, k, v, 500, spec_of(None, None, False, 1), Kernel.MASKED)
    assert seen == [(40, 103), (40, 103), (20, 83), (40, 540), (40, 580), (20, 600)]


def test_the_flash_attention_mask_takes_no_memory():
    """torch's own constructor allocates 2 * n * total float32: for a prompt of 128K tokens 128 GiB."""
    q, k, v = draw_qkv(1, 1, 3, 4, 8, 8, torch.float32)
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
def test_gpu_attention_is_exact_within_its_workspace(start, d, dtype, spec):
    layer = spec_of(*spec, 8)
    q, k, v = (x.cuda() for x in draw_qkv(2, 4, 1500, start, d, d, dtype))
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
        wanted = causal(q[:, i : i + 1].cpu(), *stored, start + i, layer)
        assert float((output[:, i : i + 1].cpu().double() - wanted).abs().max()) <= TOLERANCE[dtype]


# ---- Out-of-memory errors of every library


OUT_OF_MEMORY = [
    MemoryError(),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB."),
    RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 64 bytes."),
    RuntimeError("std::bad_alloc"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    torch.AcceleratorError("CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA`"),
    OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)),
]
OTHERS = [
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    ValueError("the page is out of memory's range"),
    OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
]


@pytest.fixture
def session():
    opened = Session(load_tiny("llama", num_hidden_layers=2))
    yield opened
    opened.close()


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=repr)
def test_out_of_memory_errors_are_explained(session, error):
    assert is_out_of_memory(error)
    with pytest.raises(OutOfMemoryError) as caught, explained(session._kv, "answering"):
        raise error
    assert caught.value.hint


@pytest.mark.parametrize("error", OTHERS, ids=repr)
def test_other_errors_are_not_changed(session, error):
    assert not is_out_of_memory(error)
    with pytest.raises(type(error)), explained(session._kv, "answering"):
        raise error


# ---- The plan of a prefill: its bytes, the largest chunk that fits, and refusals


GEOMETRY_8B = Geometry(32, 32, 8, 128, 128, torch.bfloat16)


def planned(free: int, stored: int = 0, new: int = 20_000, token_bytes: int = 100_000) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(available, "free_bytes", lambda device: free)
        return prefill.prefill_chunk(GEOMETRY_8B, stored, new, token_bytes, [torch.device("cpu")])


def test_prefill_bytes_of_an_8b_model():
    """32K tokens: 134 MB of K/V for one layer, held at most twice for any number of layers."""
    layer = 32768 * 8 * 2 * 128 * 2
    assert prefill.staging_bytes(GEOMETRY_8B, 0, 32768) == 2 * layer
    assert prefill.staging_bytes(GEOMETRY_8B, 32768 - 512, 512) == 2 * layer
    both = prefill.prefill_bytes(GEOMETRY_8B, 24576, 8192, 140_000)
    assert both == 2 * layer + 8192 * 140_000 + PREFILL_WORKSPACE


def test_the_plan_takes_the_largest_chunk_that_fits_twice():
    sizes = {free: planned(free * 10**9) for free in (1, 2, 3, 4, 6, 80)}
    assert sizes == {1: 512, 2: 4096, 3: 8192, 4: 8192, 6: 16384, 80: 16384}


@given(free=st.integers(10**8, 10**11), stored=st.integers(0, 10**5), new=st.integers(1, 10**5))
def test_planned_chunks_fit_in_free_memory(free, stored, new):
    try:
        chunk = planned(free, stored, new)
    except DoesNotFitError:
        return
    last = min(chunk, new)
    assert prefill.prefill_bytes(GEOMETRY_8B, stored + new - last, last, 100_000) <= free
    # Earlier chunks need less: they come after fewer tokens.
    first = prefill.prefill_bytes(GEOMETRY_8B, stored, last, 100_000)
    assert first <= prefill.prefill_bytes(GEOMETRY_8B, stored + new - last, last, 100_000)


def test_short_prompts_need_memory_only_for_their_tokens():
    assert planned(310 * 10**6, new=10) == 512
    with pytest.raises(DoesNotFitError):
        planned(310 * 10**6, new=512)


def test_refusals_state_the_numbers():
    with pytest.raises(DoesNotFitError) as refused:
        planned(5 * 10**8, stored=30_000)
    message = str(refused.value)
    assert "20,000 tokens after 30,000" in message
    assert [number for number in ("696 MiB", "512 at a time", "391 MiB", "448 MiB") if number not in message] == []


@pytest.mark.parametrize("delta", [100_000, 10_000_000])
def test_rotation_stays_exact_at_large_offsets(delta):
    rotation = Rotation(10000.0 ** -(torch.arange(0, 16, 2, dtype=torch.float64) / 16))
    keys = torch.randn(2, 5, 24, generator=torch.Generator().manual_seed(0))
    moved = rotate(keys, rotation, *cos_sin(rotation, delta))
    expected = rotated(keys, rotation, torch.full((5,), delta))
    torch.testing.assert_close(moved.double(), expected, atol=2e-6, rtol=0)


def test_half_precision_keys_are_rounded_once():
    rotation = Rotation(10000.0 ** -(torch.arange(0, 16, 2, dtype=torch.float64) / 16))
    keys = torch.randn(2, 5, 24, generator=torch.Generator().manual_seed(0)).bfloat16()
    turn = cos_sin(rotation, 300)
    assert torch.equal(rotate(keys, rotation, *turn), rotate(keys.float(), rotation, *turn).bfloat16())
