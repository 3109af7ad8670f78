"""8-bit pages: how near they are, and what they take."""

from __future__ import annotations

import pytest
import torch

from kvchat.kv.geometry import Geometry
from kvchat.kv.memory import eight_bit_pages
from kvchat.kv.memory.eight_bit_pages import dequantize, quantize


def geometry(dtype: torch.dtype = torch.float32) -> Geometry:
    return Geometry(layers=2, q_heads=4, kv_heads=2, d_k=16, d_v=8, dtype=dtype, page=8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_number_is_off_by_half_a_code_at_most(dtype):
    g = geometry(dtype)
    pages = torch.randn(3, 2, g.page, g.d, generator=torch.Generator().manual_seed(0)).to(dtype)
    pages[..., 0, :, 3] *= 100  # one channel of the keys is large in all tokens, and costs the others nothing
    blocks = quantize(pages, g)
    assert blocks.shape == (3, eight_bit_pages.block_bytes(g))
    off = (dequantize(blocks, g) - pages).abs().float()
    keys, values = pages.abs().float().unbind(-3)
    scales = torch.stack(
        (keys.amax(-2, keepdim=True).expand_as(keys), values.amax(-1, keepdim=True).expand_as(values)), -3
    )
    # In two bytes the scale and the product are rounded too.
    slack = 1e-5 if dtype is torch.float32 else 2 * torch.finfo(dtype).eps * eight_bit_pages.LARGEST
    assert (off <= scales / eight_bit_pages.LARGEST * (0.5 + slack)).all()


def test_zeros_stay_zeros_and_rounding_twice_changes_nothing():
    g = geometry()
    assert not dequantize(quantize(torch.zeros(1, 2, g.page, g.d), g), g).any()
    blocks = quantize(torch.randn(1, 2, g.page, g.d, generator=torch.Generator().manual_seed(1)), g)
    once = dequantize(blocks, g)
    assert torch.equal(dequantize(quantize(once, g), g), once)


def test_bytes_are_half_of_bfloat16_and_the_scales():
    g = geometry(torch.bfloat16)
    exact = 2 * g.page * g.d * g.dtype.itemsize
    assert eight_bit_pages.block_bytes(g) == exact // 2 + 2 * (g.d + g.page)
    assert eight_bit_pages.page_bytes(g) == g.kv_heads * eight_bit_pages.block_bytes(g)
