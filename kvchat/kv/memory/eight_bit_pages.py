"""8-bit pages: keys are quantized per channel of a page, values per token.

A few channels of the keys are large in all tokens, but no channel of the values is (KIVI, arXiv 2402.02750), so each
needs scales along a different axis. A scale is the largest magnitude divided by 127, in the model's dtype. Codes are
computed with the rounded scale, so that its rounding adds no error.

A block is a page of one KV head, ``block_bytes`` bytes: codes of K and V ``[2, p, d]`` (int8), scales of K's channels
``[d]`` and of V's tokens ``[p]``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvchat.kv.geometry import Geometry

LARGEST = 127


def block_bytes(g: Geometry) -> int:
    """Return the bytes of an 8-bit page of one KV head."""
    return 2 * g.page * g.d + (g.d + g.page) * g.dtype.itemsize


def page_bytes(g: Geometry) -> int:
    """Return the bytes of an 8-bit page of one layer."""
    return g.kv_heads * block_bytes(g)


def share(g: Geometry) -> float:
    """Return the bytes of an 8-bit page relative to a full-precision page."""
    return page_bytes(g) / g.page_bytes


def parts(blocks: Tensor, g: Geometry) -> tuple[Tensor, Tensor, Tensor]:
    """View ``blocks [..., block_bytes]`` as codes ``[..., 2, p, d]``, scales of K ``[..., d]``, of V ``[..., p]``."""
    codes = 2 * g.page * g.d
    scales = blocks[..., codes:].view(g.dtype)
    return (
        blocks[..., :codes].view(torch.int8).view(*blocks.shape[:-1], 2, g.page, g.d),
        scales[..., : g.d],
        scales[..., g.d :],
    )


def quantize(pages: Tensor, g: Geometry) -> Tensor:
    """Quantize full-precision ``pages [..., 2, p, d]`` to blocks ``[..., block_bytes]`` (uint8)."""
    keys, values = pages.float().unbind(-3)
    of_keys, of_values = ((x.abs().amax(dim) / LARGEST).to(g.dtype) for x, dim in ((keys, -2), (values, -1)))
    codes = torch.stack((_codes(keys, of_keys.unsqueeze(-2)), _codes(values, of_values.unsqueeze(-1))), -3)
    scales = torch.cat((of_keys, of_values), -1)
    return torch.cat((codes.flatten(-3).view(torch.uint8), scales.view(torch.uint8)), -1)


def dequantize(blocks: Tensor, g: Geometry) -> Tensor:
    """Dequantize ``blocks [..., block_bytes]`` to K/V ``[..., 2, p, d]`` in the model's dtype."""
    codes, of_keys, of_values = parts(blocks, g)
    keys, values = codes.unbind(-3)
    return torch.stack((scaled(keys, of_keys.unsqueeze(-2)), scaled(values, of_values.unsqueeze(-1))), -3)


def scaled(codes: Tensor, scales: Tensor) -> Tensor:
    """Return the values of ``codes`` (int8), in the dtype of their ``scales`` (broadcast)."""
    return (codes.float() * scales.float()).to(scales.dtype)


def _codes(x: Tensor, scales: Tensor) -> Tensor:
    scales = scales.float()
    # A scale of 0 means that all values are 0. Halves are rounded up, as in every other kernel.
    return (x / scales.where(scales > 0, 1.0) + 0.5).floor_().clamp_(-LARGEST, LARGEST).to(torch.int8)
