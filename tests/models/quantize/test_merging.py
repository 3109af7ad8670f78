"""Weights that become one matrix."""

from __future__ import annotations

import torch
from torch import nn

from kvchat.models.quantize.rows import merge
from kvchat.models.reading import lay_out


def test_what_lies_together_is_merged_without_a_copy():
    laid_out = nn.ModuleList([nn.Linear(16, rows, bias=False) for rows in (3, 2, 2)])
    lay_out(laid_out)
    weights = [linear.weight for linear in laid_out]
    expected = torch.cat([weight.data for weight in weights])
    merged = merge(weights)
    assert merged.data_ptr() == weights[0].data_ptr()
    assert torch.equal(merged, expected)
    apart = merge([weights[0], weights[2]])
    assert apart.data_ptr() != merged.data_ptr()
    assert torch.equal(apart, expected[[0, 1, 2, 5, 6]])
    assert weights[2].data_ptr() == apart[3:].data_ptr()
