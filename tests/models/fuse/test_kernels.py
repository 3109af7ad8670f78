"""The fast path's Triton kernels compared with torch, under Triton's interpreter if there is no GPU."""

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")
from kvchat.models.fuse import kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
EPS = 1e-5


def random(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def assert_near(measured, expected):
    """``expected`` is float32; relative to its norm."""
    assert measured.shape == expected.shape
    assert (measured.float() - expected).norm() / expected.norm() < TOLERANCE[measured.dtype]


def projected(x, weight, bias=None, norm=None, residual=None):
    x, weight, bias, norm, residual = (None if t is None else t.float() for t in (x, weight, bias, norm, residual))
    x = x if norm is None else F.rms_norm(x, x.shape[-1:], norm, EPS)
    return F.linear(x, weight, bias) + (0 if residual is None else residual)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("n_rows", "size"), [(3, 64), (128, 96), (70, 256), (5, 1030), (6, 2048), (4100, 64)])
def test_projections_of_one_token_match_torch(n_rows, size, dtype):
    x, weight = random(1, 1, size, dtype=dtype), random(n_rows, size, dtype=dtype)
    assert_near(kernels.project(x, weight), projected(x, weight))


@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("size", [64, 96])
def test_projections_apply_bias_norm_and_residual(size, with_bias, with_norm, with_residual):
    x, weight = 3 * random(1, 1, size), random(70, size)
    bias = random(70) if with_bias else None
    norm = random(size) if with_norm else None
    residual = random(1, 1, 70, seed=1) if with_residual else None
    measured = kernels.project(x, weight, bias, norm, EPS, residual)
    assert_near(measured, projected(x, weight, bias, norm, residual))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize("size", [64, 96])
def test_gated_products_match_torch(size, with_norm, dtype):
    x, merged = random(1, 1, size, dtype=dtype), random(140, size, dtype=dtype) / 8
    norm = random(size, dtype=dtype) if with_norm else None
    gate, up = merged.split(70)
    expected = F.silu(projected(x, gate, None, norm)) * projected(x, up, None, norm)
    assert_near(kernels.gated(x, merged, norm, EPS), expected)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("size", [64, 96, 1030])
def test_8_bit_weights_match_torch(size, dtype):
    x, norm, residual = (random(*shape, dtype=dtype) for shape in ((1, 1, size), (size,), (1, 1, 140)))
    codes = (40 * random(140, size)).clamp(-127, 127).to(torch.int8)
    scales = random(140).abs() / 300
    weight = codes.float() * scales[:, None]
    measured = kernels.project(x, codes, None, norm, EPS, residual, scales)
    assert_near(measured, projected(x, weight, None, norm, residual))
    gate, up = weight.split(70)
    expected = F.silu(projected(x, gate, None, norm)) * projected(x, up, None, norm)
    assert_near(kernels.gated(x, codes, norm, EPS, scales), expected)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("q_heads", "heads", "tokens", "size"), [(4, 2, 1, 16), (5, 5, 3, 24), (8, 1, 7, 128)])
def test_rotation_matches_transformers(q_heads, heads, tokens, size, dtype):
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    merged = random(1, tokens, q_heads + heads, size, dtype=dtype)  # as a merged projection returns them
    query, key = (part.transpose(1, 2) for part in merged.split([q_heads, heads], 2))
    angle = random(1, tokens, size // 2)
    cos, sin = (torch.cat([turn, turn], -1).to(dtype) for turn in (angle.cos(), angle.sin()))
    expected = apply_rotary_pos_emb(query.float(), key.float(), cos.float(), sin.float())
    measured = kernels.rotate(query, key, cos, sin)
    for turned, right in zip(measured, expected, strict=True):
        assert turned.is_contiguous()
        assert_near(turned, right)
    assert torch.equal(merged, random(1, tokens, q_heads + heads, size, dtype=dtype)), "the inputs do not change"


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("q_heads", "heads", "tokens", "size"), [(4, 2, 1, 16), (5, 3, 3, 24)])
def test_heads_are_normalized_before_rotation(q_heads, heads, tokens, size, dtype):
    merged = random(1, tokens, q_heads + heads, size, dtype=dtype)
    query, key = (part.transpose(1, 2) for part in merged.split([q_heads, heads], 2))
    norms = [(random(size, dtype=dtype, seed=seed), eps) for seed, eps in enumerate((1e-5, 0.1))]
    cos, sin = random(1, tokens, size, dtype=dtype), random(1, tokens, size, dtype=dtype, seed=1)
    parts = zip((query, key), norms, strict=True)
    normed = [F.rms_norm(part.float(), (size,), weight.float(), eps) for part, (weight, eps) in parts]
    expected = kernels.rotate(*normed, cos.float(), sin.float())
    for turned, right in zip(kernels.rotate(query, key, cos, sin, norms), expected, strict=True):
        assert_near(turned, right)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("heads", "turned", "size"), [(6, 4, 16), (3, 3, 24), (5, 1, 80)])
def test_projections_rotate_heads(heads, turned, size, dtype):
    x, weight, bias, norm = (
        random(*shape, dtype=dtype) for shape in ((1, 1, 64), (heads * size, 64), (heads * size,), (64,))
    )
    angle = random(1, 1, size // 2)
    cos, sin = (torch.cat([turn, turn], -1).to(dtype) for turn in (angle.cos(), angle.sin()))
    plain = projected(x, weight, bias, norm).view(1, heads, 1, size)
    rotated = kernels.rotate(plain[:, :turned].contiguous(), plain[:, turned:turned], cos.float(), sin.float())[0]
    expected = torch.cat((rotated, plain[:, turned:]), 1).view(1, 1, -1)
    assert_near(kernels.project(x, weight, bias, norm, EPS, None, None, (turned * size, cos, sin)), expected)


@pytest.mark.cuda
@pytest.mark.parametrize(("n_rows", "size"), [(4096, 4096), (6144, 4096), (4096, 14336), (128256, 4096)])
def test_projections_of_an_8b_model_match_torch(n_rows, size):
    x, weight, norm = (random(*shape, dtype=torch.bfloat16) for shape in [(1, 1, size), (n_rows, size), (size,)])
    assert_near(kernels.project(x, weight, None, norm, EPS), projected(x, weight, None, norm))
