"""Weights of 8 bits on a CPU: products compared with those of the unpacked weights."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from kvchat.models.fuse.modules import merge_weights
from kvchat.models.probe import relative_error
from kvchat.models.quantize import int8_rows
from kvchat.models.reading import defragment

BFLOAT16 = torch.finfo(torch.bfloat16).eps


def packed(rows: int, columns: int, dtype: torch.dtype = torch.float32, bias: bool = False) -> nn.Linear:
    with torch.random.fork_rng():
        torch.manual_seed(rows + columns)
        linear = nn.Linear(columns, rows, bias=bias, dtype=dtype)
    int8_rows.pack(linear)
    return linear


def unpacked(linear: nn.Linear) -> Tensor:
    """The unpacked weights of a packed Linear."""
    scale = linear.packed_rows.scales.double().view(len(linear.weight), -1)
    return linear.weight.double() * scale.repeat_interleave(linear.weight.shape[1] // scale.shape[1], 1)


@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(1, 70),
    columns=st.integers(1, 70),
    tokens=st.integers(0, 5),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    bias=st.booleans(),
)
def test_products_are_those_of_the_weights_they_stand_for(rows, columns, tokens, dtype, bias):
    linear = packed(rows, columns, dtype, bias)
    x = torch.randn(1, tokens, columns, generator=torch.Generator().manual_seed(tokens)).to(dtype)
    added = 0 if linear.bias is None else linear.bias.double()
    expected = x.double() @ unpacked(linear).T + added
    with torch.inference_mode():
        assert linear(x).shape == (1, tokens, rows)
        torch.testing.assert_close(linear(x).double(), expected, rtol=0, atol=8 * BFLOAT16)


def test_a_token_that_does_not_lie_in_one_piece():
    linear, x = packed(8, 64), torch.randn(1, 1, 128).bfloat16()
    assert torch.equal(linear(x[..., ::2]), linear(x[..., ::2].contiguous()))


@pytest.mark.parametrize("rows", [1, 5, 8])
def test_rows_that_lie_anywhere_in_a_file(rows):
    linear, x = packed(rows, 64), torch.randn(1, 1, 64)
    memory = torch.empty(linear.weight.numel() + 128, dtype=torch.int8)
    start = 8 - memory.data_ptr() % 64 + 64
    data = memory[start : start + linear.weight.numel()].view(rows, 64).copy_(linear.weight)
    mapped = nn.Linear(64, rows, bias=False)
    int8_rows.install(mapped, data, linear.packed_rows.scales)
    assert mapped.weight.data_ptr() % 64 == 0, "the kernel would end the process"
    assert torch.equal(mapped(x), linear(x))


def test_rows_that_are_laid_out_behind_others():
    linears = [packed(rows, 96, bias=True) for rows in (19, 130, 19)]
    x = torch.randn(1, 1, 96)
    before = [linear(x) for linear in linears]
    defragment(nn.ModuleList(linears))
    assert all(linear.weight.data_ptr() % 64 == 0 for linear in linears), "the kernel would end the process"
    assert all(torch.equal(linear(x), product) for linear, product in zip(linears, before, strict=True))


def test_rows_merge_only_where_each_matrix_still_begins_as_the_kernel_needs_it():
    """Restored Linears multiply by the views that merging made of their weights."""
    assert packed(18, 32).packed_rows.mergeable
    assert not packed(19, 32).packed_rows.mergeable


def test_a_weight_is_off_by_half_a_step_at_most_and_zeros_stay():
    linear = nn.Linear(64, 16, bias=False)
    linear.weight.data[3] = 0
    before = linear.weight.detach().double()
    int8_rows.pack(linear)
    groups = before.view(16, 2, 32)
    off = (unpacked(linear) - before).abs().view(16, 2, 32)
    assert (off <= groups.abs().amax(-1, keepdim=True) / 254 * (1 + 2**-10) + 1e-8).all()
    assert not unpacked(linear)[3].any()


def test_weights_that_had_8_bits_in_groups_of_32_keep_their_values():
    torch.manual_seed(0)
    levels = torch.randint(-127, 128, (16, 4, 32))
    levels[..., 0] = 127  # as Q8_0 has them: the largest of a group
    linear = nn.Linear(128, 16, bias=False)
    linear.weight.data = (levels * torch.rand(16, 4, 1).half().float()).view(16, 128)
    before = linear.weight.detach().clone()
    int8_rows.pack(linear)
    torch.testing.assert_close(unpacked(linear).float(), before, rtol=1e-6, atol=0)


@pytest.mark.parametrize("rows", [1, 3, 4, 7, 64])
@pytest.mark.parametrize("threads", [1, 2])
def test_one_token_is_multiplied_in_16_bits(rows, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    linear, x = packed(rows, 96), torch.randn(96, generator=torch.Generator().manual_seed(2))
    groups = x.double().view(-1, 32)
    steps = groups.abs().amax(1, keepdim=True) / (127 * 256)
    expected = unpacked(linear) @ ((groups / steps).round() * steps).flatten()
    torch.testing.assert_close(linear(x).double(), expected, rtol=1e-5, atol=1e-5)
    torch.set_num_threads(before)


def test_more_rows_than_are_quantized_at_once(monkeypatch):
    whole = packed(100, 64)
    monkeypatch.setattr(int8_rows, "CHUNK", 64 * 64)
    assert torch.equal(packed(100, 64).weight, whole.weight)
    assert torch.equal(packed(100, 64).packed_rows.scales, whole.packed_rows.scales)


@pytest.mark.parametrize("bias", [False, True])
def test_more_rows_than_are_unpacked_at_once(monkeypatch, bias):
    linear, x = packed(200, 70, bias=bias), torch.randn(2, 3, 70, generator=torch.Generator().manual_seed(1))
    whole = linear(x)
    monkeypatch.setattr(int8_rows, "UNPACKED", 64 * 70)
    assert linear(x).shape == (2, 3, 200)
    torch.testing.assert_close(linear(x), whole)


def test_merged_rows_are_one_matrix_and_theirs_are_views_of_it():
    linears = [packed(rows, 64) for rows in (24, 8, 8)]
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    before = [linear(x) for linear in linears]
    merged = merge_weights(linears)
    torch.testing.assert_close(merged.multiply(x), torch.cat(before, -1))
    assert merged.scales.untyped_storage().data_ptr() == linears[0].packed_rows.scales.untyped_storage().data_ptr()
    for linear, product in zip(linears, before, strict=True):
        assert torch.equal(linear(x), product)
        assert linear.weight.untyped_storage().data_ptr() == merged.data.untyped_storage().data_ptr()


def test_rows_of_a_checkpoint_that_torchao_made():
    torchao = pytest.importorskip("torchao.quantization")
    linear = nn.Linear(64, 16)
    torchao.quantize_(linear, torchao.Int8WeightOnlyConfig())
    expected = linear.weight.dequantize()
    int8_rows.install(linear, linear.weight.qdata, linear.weight.scale.flatten())
    assert relative_error(unpacked(linear), expected.double()) < 1e-6


class Scaled(nn.Embedding):
    """As Gemma's."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 3


@pytest.mark.parametrize("kind", [nn.Embedding, Scaled])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [64, 33])  # with scales of groups, of rows
def test_embeddings_tied_to_a_packed_head_are_its_rows(kind, dtype, columns):
    table, head = kind(50, columns, padding_idx=2, dtype=dtype), nn.Linear(columns, 50, bias=False, dtype=dtype)
    nn.init.normal_(table.weight)
    head.weight = table.weight
    int8_rows.pack(head)
    int8_rows.look_up(table, head)
    ids = torch.tensor([[7, 2, 49], [0, 7, 31]])
    expected = unpacked(head)[ids].to(dtype) * (3 if kind is Scaled else 1)
    found = table(ids)
    assert (found.dtype, found.shape) == (dtype, (2, 3, columns))
    torch.testing.assert_close(found, expected, rtol=torch.finfo(dtype).eps, atol=0)
    assert table.weight is head.weight
