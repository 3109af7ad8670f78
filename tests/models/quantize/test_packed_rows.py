"""8-bit and 4-bit weights on a CPU: their products match those of the unpacked weights."""

import copy
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import tiny_models
from torch import Tensor, nn

from kvchat.models.fuse.modules import is_attention, merge_weights, sample_logits
from kvchat.models.probe import relative_error
from kvchat.models.quantize import int4_rows, int8_rows
from kvchat.models.quantize.rows import weight_of
from kvchat.models.reading import defragment

BFLOAT16 = torch.finfo(torch.bfloat16).eps  # the kernels multiply in it
# The sizes that each kind packs, and the allowed error of a product.
SIZES = {
    int8_rows: (st.integers(1, 70), st.integers(1, 70)),
    int4_rows: (st.integers(1, 20).map(lambda n: 16 * n), st.integers(1, 12).map(lambda n: 32 * n)),
}
WITHIN = {int8_rows: 8 * BFLOAT16, int4_rows: 4 * BFLOAT16}
both = pytest.mark.parametrize("kind", SIZES, ids=["int8", "int4"])


def packed(
    kind: ModuleType, rows: int, columns: int, dtype: torch.dtype = torch.float32, bias: bool = False
) -> nn.Linear:
    with torch.random.fork_rng():
        torch.manual_seed(rows + columns)
        linear = nn.Linear(columns, rows, bias=bias, dtype=dtype)
    kind.pack(linear)
    return linear


def unpacked(linear: nn.Linear) -> Tensor:
    """The unpacked weights of a packed Linear; 4-bit ones are found by multiplying the identity."""
    rows = weight_of(linear)
    if isinstance(rows, int4_rows.Int4Rows):
        return rows.multiply(torch.eye(linear.in_features)).T
    scale = rows.scales.double().view(len(linear.weight), -1)
    return linear.weight.double() * scale.repeat_interleave(linear.weight.shape[1] // scale.shape[1], 1)


# ---- both kinds


@both
@settings(max_examples=30, deadline=None)
@given(
    data=st.data(),
    tokens=st.integers(0, 5),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    bias=st.booleans(),
)
def test_products_match_the_unpacked_weights(kind, data, tokens, dtype, bias):
    rows, columns = map(data.draw, SIZES[kind])
    linear = packed(kind, rows, columns, dtype, bias)
    x = torch.randn(1, tokens, columns, generator=torch.Generator().manual_seed(tokens)).to(dtype)
    expected = x.double() @ unpacked(linear).double().T + (0 if linear.bias is None else linear.bias.double())
    with torch.inference_mode():
        assert linear(x).shape == (1, tokens, rows)
        torch.testing.assert_close(linear(x).double(), expected, rtol=0, atol=WITHIN[kind])


ONE_TOKEN, THREE = torch.randn(1, 1, 128).bfloat16()[..., ::2], torch.randn(64, 3).T


@pytest.mark.parametrize(("kind", "x"), [(int8_rows, ONE_TOKEN), (int4_rows, ONE_TOKEN), (int4_rows, THREE)])
def test_non_contiguous_tokens_give_the_same_product(kind, x):
    linear = packed(kind, 16, 64)
    assert torch.equal(linear(x), linear(x.contiguous()))


@both
def test_rows_quantized_in_chunks_are_the_same(kind, monkeypatch):
    whole = packed(kind, 208, 64)
    monkeypatch.setattr(kind, "CHUNK", 64 * 64)
    assert torch.equal(packed(kind, 208, 64).weight, whole.weight)
    assert torch.equal(packed(kind, 208, 64).packed_rows.scales, whole.packed_rows.scales)


@both
def test_merged_rows_are_views_of_one_matrix(kind):
    linears = [packed(kind, rows, 64) for rows in (128, 64, 64)]
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    before = [linear(x) for linear in linears]
    merged = merge_weights(linears)
    near = torch.equal if kind is int4_rows else torch.allclose
    assert near(merged.multiply(x), torch.cat(before, -1))
    for linear, product in zip(linears, before, strict=True):
        assert torch.equal(linear(x), product)
        assert linear.weight.untyped_storage().data_ptr() == merged.data.untyped_storage().data_ptr()
        assert linear.packed_rows.scales.untyped_storage().data_ptr() == merged.scales.untyped_storage().data_ptr()


# ---- 8 bits


@pytest.mark.parametrize("rows", [1, 5, 8])
def test_rows_at_any_file_offset_become_aligned(rows):
    linear, x = packed(int8_rows, rows, 64), torch.randn(1, 1, 64)
    memory = torch.empty(linear.weight.numel() + 128, dtype=torch.int8)
    start = 8 - memory.data_ptr() % 64 + 64
    data = memory[start : start + linear.weight.numel()].view(rows, 64).copy_(linear.weight)
    mapped = nn.Linear(64, rows, bias=False)
    int8_rows.install(mapped, data, linear.packed_rows.scales)
    assert mapped.weight.data_ptr() % 64 == 0, "the kernel would crash the process"
    assert torch.equal(mapped(x), linear(x))


def test_defragmented_rows_stay_aligned():
    linears = [packed(int8_rows, rows, 96, bias=True) for rows in (19, 130, 19)]
    x = torch.randn(1, 1, 96)
    before = [linear(x) for linear in linears]
    defragment(nn.ModuleList(linears))
    assert all(linear.weight.data_ptr() % 64 == 0 for linear in linears), "the kernel would crash the process"
    assert all(torch.equal(linear(x), product) for linear, product in zip(linears, before, strict=True))


def test_rows_merge_only_if_each_matrix_stays_aligned():
    """A restored Linear multiplies by the view that merging made of its weight."""
    assert packed(int8_rows, 18, 32).packed_rows.mergeable
    assert not packed(int8_rows, 19, 32).packed_rows.mergeable


def test_int8_errs_by_at_most_half_a_step():
    linear = nn.Linear(64, 16, bias=False)
    linear.weight.data[3] = 0
    before = linear.weight.detach().double()
    int8_rows.pack(linear)
    groups = before.view(16, 2, 32)
    off = (unpacked(linear) - before).abs().view(16, 2, 32)
    assert (off <= groups.abs().amax(-1, keepdim=True) / 254 * (1 + 2**-10) + 1e-8).all()
    assert not unpacked(linear)[3].any()


def test_weights_from_q8_0_keep_their_values():
    torch.manual_seed(0)
    levels = torch.randint(-127, 128, (16, 4, 32))
    levels[..., 0] = 127  # as in Q8_0: the largest of a group
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
    linear, x = packed(int8_rows, rows, 96), torch.randn(96, generator=torch.Generator().manual_seed(2))
    groups = x.double().view(-1, 32)
    steps = groups.abs().amax(1, keepdim=True) / (127 * 256)
    expected = unpacked(linear) @ ((groups / steps).round() * steps).flatten()
    torch.testing.assert_close(linear(x).double(), expected, rtol=1e-5, atol=1e-5)
    torch.set_num_threads(before)


@pytest.mark.parametrize("bias", [False, True])
def test_rows_unpacked_in_chunks_give_the_same_product(monkeypatch, bias):
    linear, x = packed(int8_rows, 200, 70, bias=bias), torch.randn(2, 3, 70, generator=torch.Generator().manual_seed(1))
    whole = linear(x)
    monkeypatch.setattr(int8_rows, "UNPACKED", 64 * 70)
    assert linear(x).shape == (2, 3, 200)
    torch.testing.assert_close(linear(x), whole)


def test_torchao_rows_keep_their_values():
    torchao = pytest.importorskip("torchao.quantization")
    linear = nn.Linear(64, 16)
    torchao.quantize_(linear, torchao.Int8WeightOnlyConfig())
    expected = linear.weight.dequantize()
    int8_rows.install(linear, linear.weight.qdata, linear.weight.scale.flatten())
    assert relative_error(unpacked(linear), expected.double()) < 1e-6


class Scaled(nn.Embedding):
    """Like Gemma's."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 3


@pytest.mark.parametrize("kind", [nn.Embedding, Scaled])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [64, 33])  # with scales per group, per row
def test_embeddings_tied_to_a_packed_head_look_up_its_rows(kind, dtype, columns):
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


# ---- 4 bits


def rounded_in_python(weight: Tensor) -> Tensor:
    """``weight`` rounded as packing does, one group at a time in plain Python."""
    return torch.tensor([[rounded for group in row.split(32) for rounded in rounded_group(group)] for row in weight])


def rounded_group(group: Tensor) -> list[float]:
    low, high = group.min().item(), group.max().item()
    scale = bfloat16((high - low) / 15)
    zero = bfloat16(low + 8 * scale)
    return [(min(15, max(0, round((value - zero) / scale + 8))) - 8) * scale + zero for value in group.tolist()]


def bfloat16(value: float) -> float:
    return torch.tensor(value).bfloat16().item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("rows", "columns"), [(16, 32), (48, 96), (80, 64)])  # less than a block of 64 rows, and more
def test_int4_weights_match_plain_python(rows, columns, dtype):
    linear = nn.Linear(columns, rows, bias=False, dtype=dtype)
    expected = rounded_in_python(linear.weight.detach().float())
    int4_rows.pack(linear)
    torch.testing.assert_close(unpacked(linear), expected, rtol=BFLOAT16 / 2, atol=1e-6)
    x = torch.randn(5, columns)
    assert relative_error(linear(x), x @ expected.T) < BFLOAT16


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_the_int4_kernel_gets_bfloat16(dtype):
    """With other dtypes it is not vectorized and takes 10 to 40 times as long."""
    linear, x = packed(int4_rows, 16, 64), torch.randn(3, 64).to(dtype)
    assert torch.equal(linear(x), linear(x.bfloat16().to(dtype)))
    assert linear(x).dtype == dtype


def test_int4_groups_keep_their_range_and_constants():
    linear = nn.Linear(64, 16, bias=False)
    linear.weight.data = torch.linspace(-1, 1, 64).expand(16, 64).clone()
    linear.weight.data[3] = 0.25
    before = linear.weight.detach().clone()
    int4_rows.pack(linear)
    assert (unpacked(linear) - before).abs().max() < 1 / 15  # half a step
    assert (unpacked(linear)[3] - 0.25).abs().max() < 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_from_q4_0_keep_their_values(dtype):
    levels = torch.randint(-8, 8, (64, 8, 32), generator=torch.Generator().manual_seed(0))
    levels[:, :4] = levels[:, :4].clamp(-8, 5)  # Q4_0 uses its last level only by chance
    before = (levels * torch.linspace(0.01, 0.02, 8)[:, None].half()).view(64, 256).to(dtype)
    linear = nn.Linear(256, 64, bias=False, dtype=dtype)
    linear.weight.data = before.clone()
    as_others = copy.deepcopy(linear)
    int4_rows.pack(linear, of_4_bits=True)
    int4_rows.pack(as_others)
    assert relative_error(unpacked(linear), before.float()) < 0.004  # bfloat16 scales
    assert relative_error(unpacked(as_others), before.float()) > 0.01


def test_weights_from_q4_k_keep_their_values():
    """Each 32 weights have a scale and a minimum, as in ``int4_rows``, but in 6 bits, times a factor for all 256."""
    quants, draw = pytest.importorskip("gguf.quants"), np.random.default_rng(0)
    blocks = draw.integers(0, 256, (16, 2, 144), dtype=np.uint8)  # of 256 weights
    blocks[..., :4] = np.array([0.01, 0.05], np.float16).view(np.uint8)  # the first factors; random ones could be huge
    before = torch.from_numpy(quants.Q4_K.dequantize_rows(blocks.reshape(16, -1)))
    linear = nn.Linear(512, 16, bias=False)
    linear.weight.data = before.clone()
    int4_rows.pack(linear, of_4_bits=True)
    assert before.unique().numel() > 1000
    assert relative_error(unpacked(linear), before) < 0.004  # bfloat16 scales


@pytest.mark.parametrize(("rows", "mergeable"), [(64, True), (48, False)])
def test_only_whole_blocks_of_rows_are_merged(rows, mergeable):
    attention = nn.Module()
    attention.q_proj, attention.k_proj, attention.v_proj = (packed(int4_rows, n, 64) for n in (128, rows, rows))
    assert is_attention(attention) == mergeable


def test_linears_of_unsupported_sizes_stay_unpacked():
    model = tiny_models.fresh("llama")
    layer = model.model.layers[0]
    layer.mlp.up_proj = nn.Linear(64, 24, bias=False)
    layer.mlp.down_proj = nn.Linear(24, 64, bias=False)
    for linear in int4_rows.chosen(model):
        int4_rows.pack(linear)
    assert layer.mlp.up_proj.weight.dtype == layer.mlp.down_proj.weight.dtype == torch.float32


def test_a_packed_model_matches_its_unpacked_weights():
    plain = tiny_models.fresh("llama")
    model = copy.deepcopy(plain)
    elements = plain.num_parameters()
    for name, linear in list(plain.named_modules()):
        if linear in set(int4_rows.chosen(plain)):
            int4_rows.pack(model.get_submodule(name))
            linear.weight.data = unpacked(model.get_submodule(name))
    assert int4_rows.unpacked_elements(model) == elements
    assert relative_error(sample_logits(model), sample_logits(plain)) < 0.02
