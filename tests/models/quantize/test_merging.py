"""Weights that become one matrix."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kvchat.models.quantize import int4_rows, int8_rows
from kvchat.models.quantize.rows import all_rows, merge, weight_of
from kvchat.models.reading import defragment


def test_what_lies_together_is_merged_without_a_copy():
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
def test_packed_weights_are_not_kept_where_they_were_before(kind):
    """Of an 8B that would be some gigabytes."""
    layer = nn.ModuleList([nn.Linear(64, 64, bias=False) for _ in range(3)])
    for linear in layer:
        kind.pack(linear)
    x = torch.randn(1, 64, generator=torch.Generator().manual_seed(0))
    before = torch.cat([linear(x) for linear in layer], -1)
    defragment(layer)
    assert [rows._known for _, rows in all_rows(layer)] == [(0, None)] * 3
    assert torch.equal(torch.cat([linear(x) for linear in layer], -1), before)
    merged = weight_of(layer[0]).merged(layer)
    assert [rows._known for _, rows in all_rows(layer)] == [(0, None)] * 3
    assert torch.equal(merged.multiply(x), before)
