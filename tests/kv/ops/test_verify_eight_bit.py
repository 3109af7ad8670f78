"""The kernels over 8-bit pages against stock torch, which test_eight_bit_ops holds against numpy."""

from __future__ import annotations

import pytest
import torch
from support.random_kv import ROUNDED_CELLS

from kvchat.kv.geometry import Geometry
from kvchat.kv.ops import verify
from kvchat.kv.ops.eight_bit_ops import EightBitOps
from kvchat.kv.ops.triton_ops import EightBitTritonOps

# Triton's interpreter cuts off where it makes bfloat16: one unit in the last place, and codes of scales that are so.
TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 1.5e-2}


@pytest.mark.parametrize(("group", "d", "dtype"), ROUNDED_CELLS, ids=str)
def test_every_kernel_is_stock_torch_at_heads_of_todays_models(group, d, dtype, device):
    """Three of the forty cells, all of them in the long form."""
    g = Geometry(1, 2 * group, 2, d, d, dtype, headroom=32)
    with torch.inference_mode():
        expected, measured = (verify.outcomes(kind, g, device) for kind in (EightBitOps, EightBitTritonOps))
    off = {name: verify.error(measured[name], expected[name]) for name in expected}
    assert {name: error for name, error in off.items() if error > TOLERANCE[dtype]} == {}
    assert measured["move_pages"][2] > 0


def test_rows_that_are_narrower_and_small_pages(device):
    g = Geometry(1, 6, 3, 24, 16, torch.float16, page=8, headroom=8)
    with torch.inference_mode():
        assert verify.kernel_failure(g, device, quantizes=True) == ""
