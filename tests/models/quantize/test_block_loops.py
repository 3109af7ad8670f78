"""The compiled loops over blocks of weights give the same bits as the gguf package and torch."""

import numpy as np
import pytest
import torch
from torch import nn

from kvchat.models import gguf, gguf_file
from kvchat.models.quantize import int4_rows, int8_rows
from kvchat.models.quantize.rows import all_rows, block_loops, merge, weight_of
from kvchat.models.reading import defragment

TYPE_NUMBERS = {name: kind for kind, (name, _, _) in gguf_file.TYPES.items()}
SCALES_AT = {"Q6_K": 208}


def blocks_of(name: str, count: int) -> np.ndarray:
    """Blocks with random levels and scales that are not NaN."""
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (count, gguf_file.TYPES[TYPE_NUMBERS[name]][2]), np.uint8)
    scales = rng.normal(0, 0.01, (count, 2)).astype(np.float16).view(np.uint8)
    at = SCALES_AT.get(name, 0)
    blocks[:, at : at + 2] = scales[:, :2]
    if name == "MXFP4":
        blocks[:, 0] //= 2  # powers of two: twelve times the largest is infinite
    if name in ("Q4_1", "Q5_1", "Q4_K", "Q5_K"):
        blocks[:, 2:4] = scales[:, 2:]
    return blocks


@pytest.mark.parametrize("name", sorted(gguf.LOOPED))
def test_loops_unpack_blocks_like_the_gguf_package(tmp_path, name):
    blocks = blocks_of(name, 20_000)
    elements = gguf_file.TYPES[TYPE_NUMBERS[name]][1]
    (tmp_path / "x").write_bytes(bytes(32) + blocks.tobytes())
    tensor = gguf_file.Tensor("x", TYPE_NUMBERS[name], (100, 200 * elements), tmp_path / "x", 32, blocks.nbytes)
    expected = np.empty((len(blocks), elements), np.float32)
    gguf.unpack_by_package(tensor.kind, blocks, expected)
    assert np.array_equal(gguf.values(tensor).numpy(), expected.reshape(100, -1))


def test_a_type_without_a_loop_is_unpacked(tmp_path):
    blocks = blocks_of("Q2_K", 64)
    blocks[:, 80:84] = 0  # scales: else some are NaN
    (tmp_path / "x").write_bytes(blocks.tobytes())
    tensor = gguf_file.Tensor("x", TYPE_NUMBERS["Q2_K"], (64, 256), tmp_path / "x", 0, blocks.nbytes)
    assert not gguf.values(tensor).any()


@pytest.mark.parametrize("of_4_bits", [True, False])
@pytest.mark.parametrize("shape", [(16, 32), (1536, 576), (2048, 2048)])
def test_4_bit_levels_match_torch(shape, of_4_bits):
    torch.manual_seed(0)
    steps = torch.randint(0, 16, shape) * torch.rand(shape[0], 1) - 0.3  # some rows on a few levels, some not
    weight = torch.where(torch.rand(shape[0], 1) < 0.5, steps, torch.randn(shape))
    weight[0] = 0
    found = int4_rows._quantize_by_loops(block_loops(), weight, of_4_bits)
    assert all(map(torch.equal, found, int4_rows.quantize_by_torch(weight, of_4_bits)))


# ---- Merging weights into one matrix


def test_adjacent_weights_are_merged_without_a_copy():
    defragmented = nn.ModuleList([nn.Linear(16, rows, bias=False) for rows in (3, 2, 2)])
    defragment(defragmented)
    weights = [linear.weight for linear in defragmented]
    expected = torch.cat([weight.data for weight in weights])
    merged = merge(weights)
    assert merged.data_ptr() == weights[0].data_ptr()
    assert torch.equal(merged, expected)
    apart = merge([weights[0], weights[2]])
    assert apart.data_ptr() != merged.data_ptr()
    assert torch.equal(apart, expected[[0, 1, 2, 5, 6]])
    assert weights[2].data_ptr() == apart[3:].data_ptr()


@pytest.mark.parametrize("kind", [int4_rows, int8_rows])
def test_defragmenting_and_merging_free_the_old_weights(kind):
    """They take some gigabytes in an 8B model."""
    layer = nn.ModuleList([nn.Linear(64, 64, bias=False) for _ in range(3)])
    for linear in layer:
        kind.pack(linear)
    x = torch.randn(1, 64, generator=torch.Generator().manual_seed(0))
    before = torch.cat([linear(x) for linear in layer], -1)
    defragment(layer)
    assert [rows._cached for _, rows in all_rows(layer)] == [(0, None)] * 3
    assert torch.equal(torch.cat([linear(x) for linear in layer], -1), before)
    merged = weight_of(layer[0]).merged(layer)
    assert [rows._cached for _, rows in all_rows(layer)] == [(0, None)] * 3
    assert torch.equal(merged.multiply(x), before)
