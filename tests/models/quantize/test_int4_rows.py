"""Weights of 4 bits on a CPU: products compared with those of the unpacked weights."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import tiny_models
from torch import nn

from kvchat.models.fuse.modules import is_attention, merge_weights, sample_logits
from kvchat.models.probe import relative_error
from kvchat.models.quantize import int4_rows
from kvchat.models.quantize.rows import weight_of

BFLOAT16 = torch.finfo(torch.bfloat16).eps  # in which the kernel multiplies


def packed(rows: int, columns: int, dtype: torch.dtype = torch.float32, bias: bool = False) -> nn.Linear:
    with torch.random.fork_rng():
        torch.manual_seed(rows + columns)
        linear = nn.Linear(columns, rows, bias=bias, dtype=dtype)
    int4_rows.pack(linear)
    return linear


def unpacked(linear: nn.Linear) -> torch.Tensor:
    """The unpacked weights of a packed Linear, found by multiplying the identity."""
    return weight_of(linear).multiply(torch.eye(linear.in_features)).T


def in_numbers(weight: torch.Tensor) -> torch.Tensor:
    """``weight`` rounded as by the packing, a group at a time in plain Python."""
    return torch.tensor([[rounded for group in row.split(32) for rounded in of_group(group)] for row in weight])


def of_group(group: torch.Tensor) -> list[float]:
    low, high = group.min().item(), group.max().item()
    scale = bfloat16((high - low) / 15)
    zero = bfloat16(low + 8 * scale)
    return [(min(15, max(0, round((value - zero) / scale + 8))) - 8) * scale + zero for value in group.tolist()]


def bfloat16(value: float) -> float:
    return torch.tensor(value).bfloat16().item()


@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(1, 20).map(lambda n: 16 * n),
    columns=st.integers(1, 12).map(lambda n: 32 * n),
    tokens=st.integers(0, 5),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    bias=st.booleans(),
)
def test_products_are_those_of_the_weights_they_stand_for(rows, columns, tokens, dtype, bias):
    linear = packed(rows, columns, dtype, bias)
    x = torch.randn(1, tokens, columns, generator=torch.Generator().manual_seed(tokens)).to(dtype)
    expected = nn.functional.linear(x.float(), unpacked(linear), None if linear.bias is None else linear.bias.float())
    with torch.inference_mode():
        assert linear(x).shape == (1, tokens, rows)
        torch.testing.assert_close(linear(x).float(), expected, rtol=0, atol=4 * BFLOAT16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("rows", "columns"), [(16, 32), (48, 96), (80, 64)])  # one block of 64 rows, less and more
def test_packed_weights_are_those_of_plain_numbers(rows, columns, dtype):
    linear = nn.Linear(columns, rows, bias=False, dtype=dtype)
    expected = in_numbers(linear.weight.detach().float())
    int4_rows.pack(linear)
    torch.testing.assert_close(unpacked(linear), expected, rtol=BFLOAT16 / 2, atol=1e-6)
    x = torch.randn(5, columns)
    assert relative_error(linear(x), x @ expected.T) < BFLOAT16


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_the_kernel_is_given_bfloat16(dtype):
    """With other dtypes it is not vectorized and takes 10 to 40 times as long."""
    linear, x = packed(16, 64), torch.randn(3, 64).to(dtype)
    assert torch.equal(linear(x), linear(x.bfloat16().to(dtype)))
    assert linear(x).dtype == dtype


def test_tokens_that_are_not_contiguous():
    linear, x = packed(16, 64), torch.randn(64, 3).T
    assert torch.equal(linear(x), linear(x.contiguous()))


def test_a_group_keeps_its_range_and_its_constants():
    linear = nn.Linear(64, 16, bias=False)
    linear.weight.data = torch.linspace(-1, 1, 64).expand(16, 64).clone()
    linear.weight.data[3] = 0.25
    before = linear.weight.detach().clone()
    int4_rows.pack(linear)
    assert (unpacked(linear) - before).abs().max() < 1 / 15  # half a step
    assert (unpacked(linear)[3] - 0.25).abs().max() < 1e-3


def test_more_rows_than_are_quantized_at_once(monkeypatch):
    whole = packed(192, 64)
    monkeypatch.setattr(int4_rows, "CHUNK", 64 * 64)
    assert torch.equal(packed(192, 64).weight, whole.weight)
    assert torch.equal(packed(192, 64).packed_rows.scales, whole.packed_rows.scales)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_that_had_4_bits_already_keep_their_values(dtype):
    levels = torch.randint(-8, 8, (64, 8, 32), generator=torch.Generator().manual_seed(0))
    levels[:, :4] = levels[:, :4].clamp(-8, 5)  # Q4_0 reaches its last level by chance only
    before = (levels * torch.linspace(0.01, 0.02, 8)[:, None].half()).view(64, 256).to(dtype)
    linear = nn.Linear(256, 64, bias=False, dtype=dtype)
    linear.weight.data = before.clone()
    as_others = copy.deepcopy(linear)
    int4_rows.pack(linear, of_4_bits=True)
    int4_rows.pack(as_others)
    assert relative_error(unpacked(linear), before.float()) < 0.004  # bfloat16 scales
    assert relative_error(unpacked(as_others), before.float()) > 0.01


def test_weights_of_a_q4_k_file_keep_their_values():
    """Every 32 have a scale and a minimum, as in ``int4_rows``, but of 6 bits, times one for all 256."""
    quants, draw = pytest.importorskip("gguf.quants"), np.random.default_rng(0)
    blocks = draw.integers(0, 256, (16, 2, 144), dtype=np.uint8)  # of 256 weights
    blocks[..., :4] = np.array([0.01, 0.05], np.float16).view(np.uint8)  # the first factors; random ones could be huge
    before = torch.from_numpy(quants.Q4_K.dequantize_rows(blocks.reshape(16, -1)))
    linear = nn.Linear(512, 16, bias=False)
    linear.weight.data = before.clone()
    int4_rows.pack(linear, of_4_bits=True)
    assert before.unique().numel() > 1000
    assert relative_error(unpacked(linear), before) < 0.004  # bfloat16 scales


def test_merged_rows_are_one_matrix_and_theirs_are_views_of_it():
    linears = [packed(rows, 64) for rows in (128, 64, 64)]
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    before = [linear(x) for linear in linears]
    merged = merge_weights(linears)
    assert torch.equal(merged.multiply(x), torch.cat(before, -1))
    for linear, product in zip(linears, before, strict=True):
        assert torch.equal(linear(x), product)
        assert linear.weight.untyped_storage().data_ptr() == merged.data.untyped_storage().data_ptr()
        assert linear.packed_rows.scales.untyped_storage().data_ptr() == merged.scales.untyped_storage().data_ptr()


@pytest.mark.parametrize(("rows", "mergeable"), [(64, True), (48, False)])
def test_only_whole_blocks_of_rows_are_merged(rows, mergeable):
    attention = nn.Module()
    attention.q_proj, attention.k_proj, attention.v_proj = (packed(n, 64) for n in (128, rows, rows))
    assert is_attention(attention) == mergeable


def test_a_linear_that_does_not_fit_stays():
    model = tiny_models.fresh("llama")
    layer = model.model.layers[0]
    layer.mlp.up_proj = nn.Linear(64, 24, bias=False)
    layer.mlp.down_proj = nn.Linear(24, 64, bias=False)
    for linear in int4_rows.chosen(model):
        int4_rows.pack(linear)
    assert layer.mlp.up_proj.weight.dtype == layer.mlp.down_proj.weight.dtype == torch.float32


def test_a_packed_model_computes_what_one_of_the_same_weights_does():
    plain = tiny_models.fresh("llama")
    model = copy.deepcopy(plain)
    elements = plain.num_parameters()
    for name, linear in list(plain.named_modules()):
        if linear in set(int4_rows.chosen(plain)):
            int4_rows.pack(model.get_submodule(name))
            linear.weight.data = unpacked(model.get_submodule(name))
    assert int4_rows.unpacked_elements(model) == elements
    assert relative_error(sample_logits(model), sample_logits(plain)) < 0.02
