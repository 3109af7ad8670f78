from __future__ import annotations

import pytest
import torch

from kvchat.kv.rope import Rotation, cos_sin, rotate

FREQUENCIES = 10000.0 ** -(torch.arange(0, 16, 2, dtype=torch.float64) / 16)
LAYOUTS = [(False, 0), (True, 0), (False, 8), (True, 4)]


def at_position(keys: torch.Tensor, rotation: Rotation, position: int) -> torch.Tensor:
    """The textbook definition: every pair is a complex number times e^(i·position·frequency)."""
    turning = keys[..., rotation.offset : rotation.offset + 16].double()
    pairs = turning.unflatten(-1, (8, 2)) if rotation.interleaved else turning.unflatten(-1, (2, 8)).transpose(-1, -2)
    angle = position * rotation.inv_freq
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angle), angle))
    flat = turned.flatten(-2) if rotation.interleaved else turned.transpose(-1, -2).flatten(-2)
    before, after = keys[..., : rotation.offset], keys[..., rotation.offset + 16 :]
    return torch.cat([before.double(), flat, after.double()], -1)


def keys(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(2, 5, 24, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize(("interleaved", "offset"), LAYOUTS)
def test_a_key_moved_forward_is_the_key_of_the_later_position(interleaved, offset):
    rotation = Rotation(FREQUENCIES, interleaved, offset)
    stored = at_position(keys(), rotation, 7).float()
    moved = rotate(stored, rotation, *cos_sin(rotation, 1000))
    torch.testing.assert_close(moved.double(), at_position(keys(), rotation, 1007), atol=2e-6, rtol=0)


@pytest.mark.parametrize("delta", [100_000, 10_000_000])
def test_angles_stay_exact_far_from_the_start(delta):
    rotation = Rotation(FREQUENCIES)
    moved = rotate(keys(), rotation, *cos_sin(rotation, delta))
    torch.testing.assert_close(moved.double(), at_position(keys(), rotation, delta), atol=2e-6, rtol=0)


@pytest.mark.parametrize(("interleaved", "offset"), LAYOUTS)
def test_dimensions_that_do_not_turn_are_unchanged(interleaved, offset):
    rotation = Rotation(FREQUENCIES, interleaved, offset)
    moved = rotate(keys(), rotation, *cos_sin(rotation, 5))
    still = [i for i in range(24) if not offset <= i < offset + 16]
    assert torch.equal(moved[..., still], keys()[..., still])
    assert not torch.equal(moved, keys())


def test_half_precision_keys_are_rounded_once():
    rotation = Rotation(FREQUENCIES)
    stored = keys(torch.bfloat16)
    moved = rotate(stored, rotation, *cos_sin(rotation, 300))
    assert moved.dtype == torch.bfloat16
    assert torch.equal(moved, rotate(stored.float(), rotation, *cos_sin(rotation, 300)).bfloat16())


def test_no_move_changes_nothing():
    rotation = Rotation(FREQUENCIES)
    assert torch.equal(rotate(keys(), rotation, *cos_sin(rotation, 0)), keys())


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_tensor_moves_as_its_number_does_and_is_not_read_back(dtype):
    rotation = Rotation(FREQUENCIES)
    for given, number in zip(cos_sin(rotation, torch.tensor(123, dtype=dtype)), cos_sin(rotation, 123), strict=True):
        assert torch.equal(given, number)
    on_meta = Rotation(FREQUENCIES.to("meta"))  # a meta tensor has no value to read back
    assert rotate(keys().to("meta"), on_meta, *cos_sin(on_meta, torch.tensor(3, device="meta"))).shape == (2, 5, 24)
