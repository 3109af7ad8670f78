"""The product of packed weights with one token, and the layer's operations around it, compared with float64."""

import numba
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from kvchat.models.quantize import product_loops
from kvchat.models.quantize.rows import GATES, GELU, SILU

K, EPS = 96, 1e-5
NOTHING = np.empty(0, np.float32)


def rounded(x: torch.Tensor) -> torch.Tensor:
    """``x [K]`` in 16 bits, float64."""
    groups = x.double().view(-1, 32)
    steps = groups.abs().amax(1, keepdim=True) / (127 * 256)
    return (torch.where(steps > 0, groups / steps, 0).round() * steps).flatten()


def four_bits(width: int, rows: int) -> tuple[np.ndarray, np.ndarray, torch.Tensor]:
    """``rows`` rows in torch's packing, and their unpacked weights ``[N, K]`` in float64."""
    draw = torch.Generator().manual_seed(width + rows)
    levels = torch.randint(16, (rows, K), generator=draw)
    scales = torch.randn(K // 32, rows, 2, generator=draw).bfloat16()
    low, high = levels.view(-1, 2, width, K).transpose(2, 3).unbind(1)
    data = (low | high << 4).to(torch.uint8).reshape(rows, K // 2)
    scale, zero = (each.T.double().repeat_interleave(32, 1) for each in scales.unbind(-1))
    return data.numpy(), scales.view(torch.int32).squeeze(-1).numpy(), (levels - 8) * scale + zero


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(9))


@pytest.mark.parametrize("width", [16, 32])
@pytest.mark.parametrize("x", [normal(K), torch.full((K,), 3.0), -torch.full((K,), 3.0), torch.zeros(K)])
def test_four_bit_products_match_float64(width, x):
    data, scales, weights = four_bits(width, 4 * width)
    out = np.empty(len(data), np.float32)
    product_loops.four_bit_product(data, scales, width, x.numpy(), NOTHING, NOTHING, 0.0, NOTHING, 0, out)
    torch.testing.assert_close(torch.from_numpy(out).double(), weights @ rounded(x), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("pairs", [False, product_loops.PAIRS])
@pytest.mark.parametrize("width", [16, 32])
def test_products_without_special_instructions_match_float64(width, pairs, monkeypatch):
    monkeypatch.setattr(product_loops, "PAIRS", pairs)
    monkeypatch.setattr(product_loops, "FOURS", False)
    four, eight, halves = product_loops._four_bit_rows(width), product_loops._eight_bit_rows(1), product_loops._halves

    @numba.njit
    def both(data, scales, bytes_, scale, levels, steps, sums, out):
        upper, lower = halves(levels)
        four(data, scales, upper, lower, steps, sums, out[0], 0)
        for row in range(len(bytes_)):
            eight(bytes_, scale, levels, steps, out[1], row)

    x = normal(K)
    data, scales, weights = four_bits(width, 2 * width)
    bytes_ = torch.randint(-127, 128, (2 * width, K), dtype=torch.int8, generator=torch.Generator().manual_seed(1))
    scale = torch.rand(2 * width, K // 32, generator=torch.Generator().manual_seed(2)).half()
    steps = x.view(-1, 32).abs().amax(1) / (127 * 256)
    levels = (x.view(-1, 32) / steps[:, None]).round().to(torch.int16)
    sums, out = levels.sum(1, dtype=torch.int32).numpy(), np.empty((2, 2 * width), np.float32)
    stored = scale.view(torch.uint16).numpy()
    both(data, scales, bytes_.numpy(), stored, levels.flatten().numpy(), steps.numpy(), sums, out)
    expected = bytes_.double() * scale.double().repeat_interleave(32, 1) @ rounded(x)
    torch.testing.assert_close(torch.from_numpy(out[0]).double(), weights @ rounded(x), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(torch.from_numpy(out[1]).double(), expected, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("gate", [0, SILU, GELU])
def test_norm_bias_residual_and_gate_match_float64(gate):
    data, scales, weights = four_bits(16, 64)
    x, norm, bias, residual = normal(K), normal(2, K)[1], normal(64), normal(2, 64)[1]
    out = np.empty(32 if gate else 64, np.float32)
    arrays = [each.numpy() for each in (x, bias, norm, residual)]
    product_loops.four_bit_product(data, scales, 16, *arrays[:3], EPS, arrays[3], gate, out)
    row = rounded(F.rms_norm(x, (K,), norm, EPS))
    expected = weights @ row + bias.double() + residual.double()
    if gate:
        first, up = expected.chunk(2)
        expected = GATES[gate - 1](first) * up
    # Normalizing in another order changes the last bit of a row, and with it a level.
    torch.testing.assert_close(torch.from_numpy(out).double(), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("width", [16, 32])
def test_four_bit_weights_are_unpacked(width):
    data, scales, weights = four_bits(width, 4 * width)
    out = np.empty((4 * width, K), np.float32)
    pairs = torch.from_numpy(scales.copy()).unsqueeze(-1).view(torch.bfloat16).float().numpy()
    product_loops.unpack_four_bits(data, pairs, width, out)
    torch.testing.assert_close(torch.from_numpy(out).double(), weights, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("with_norm", [False, True])
def test_non_finite_inputs_give_non_finite_outputs(wrong, with_norm):
    """Otherwise the answer would continue with meaningless numbers."""
    data, scales, _ = four_bits(16, 32)
    x = normal(K)
    x[40] = wrong
    out, norm = np.empty(32, np.float32), np.ones(K, np.float32) if with_norm else NOTHING
    product_loops.four_bit_product(data, scales, 16, x.numpy(), NOTHING, norm, EPS, NOTHING, 0, out)
    assert not np.isfinite(out).any()
    bytes_, scale = np.ones((5, K), np.int8), np.full((5, K // 32), 1.0, np.float16).view(np.uint16)
    out = np.empty(5, np.float32)
    product_loops.eight_bit_product(bytes_, scale, x.numpy(), NOTHING, norm, EPS, NOTHING, 0, out)
    assert not np.isfinite(out).any()


def eight_bits(rows: int, columns: int) -> tuple[tuple[np.ndarray, np.ndarray], torch.Tensor]:
    """A matrix as the loops take it, and its weights in float64."""
    draw = torch.Generator().manual_seed(rows)
    levels = torch.randint(-127, 128, (rows, columns), dtype=torch.int8, generator=draw)
    scale = (torch.rand(rows, columns // 32, generator=draw) / 500).half()
    weights = levels.double() * scale.double().repeat_interleave(32, 1)
    return (levels.numpy(), scale.view(torch.uint16).numpy()), weights


@pytest.mark.parametrize("gate", [SILU, GELU])
@pytest.mark.parametrize("with_norms", [False, True])  # as in Gemma: per head, and before each sum
def test_layers_without_attention_match_float64(with_norms, gate):
    size, heads, inner = 32, 3, 64
    qkv, qkv_weights = eight_bits(heads * size, K)
    out, out_weights = eight_bits(K, size)
    up, up_weights = eight_bits(2 * inner, K)
    down, down_weights = eight_bits(K, inner)
    hidden, attended, angle = normal(K), normal(size), normal(size // 2).repeat(2)
    first, second, bias = normal(3, K)
    cos, sin = angle.cos(), angle.sin()
    found = np.empty((heads, size), np.float32)
    qkv_bias = normal(heads * size)
    before = [each.numpy() for each in (qkv_bias, first)]
    of_heads = normal(2, size) if with_norms else torch.empty(0, size)
    angles = cos.numpy(), sin.numpy()
    product_loops.begin_layer(qkv, *before, EPS, of_heads.numpy(), EPS, EPS, hidden.numpy(), *angles, 1, 1, found)
    row = F.rms_norm(hidden, (K,), first, EPS).double()
    expected = (qkv_weights @ row + qkv_bias.double()).view(heads, size)
    for head, norm in enumerate(of_heads):
        expected[head] = F.rms_norm(expected[head], (size,), norm.double(), EPS)
    turned = torch.cat((-expected[:2, size // 2 :], expected[:2, : size // 2]), 1)
    expected[:2] = expected[:2] * cos.double() + turned * sin.double()
    torch.testing.assert_close(torch.from_numpy(found).double(), expected, rtol=1e-3, atol=1e-3)

    result = np.empty(K, np.float32)
    norms = normal(2, K) if with_norms else torch.empty(2, 0)
    of_mlp = second.numpy(), EPS, gate, down, bias.numpy()
    after = out, NOTHING, norms[0].numpy(), EPS, up, *of_mlp, norms[1].numpy(), EPS
    product_loops.end_layer(*after, attended.numpy(), hidden.numpy(), result)

    def added(product, norm):
        return F.rms_norm(product, (K,), norm.double(), EPS) if len(norm) else product

    state = added(out_weights @ attended.double(), norms[0]) + hidden.double()
    first_half, up_half = (up_weights @ F.rms_norm(state.float(), (K,), second, EPS).double()).chunk(2)
    expected = added(down_weights @ (GATES[gate - 1](first_half) * up_half) + bias.double(), norms[1]) + state
    torch.testing.assert_close(torch.from_numpy(result).double(), expected, rtol=1e-3, atol=1e-3)
