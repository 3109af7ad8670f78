"""Attention over scattered tokens against torch's over a copy of them."""

from __future__ import annotations

import pytest
import torch

from kvchat.kv.memory.device_slots import EMPTY
from kvchat.kv.ops import compiled_scattered


def memory(rows: torch.Tensor):
    """The numbers from the first to the last of ``rows [H, n, d]``."""
    last = sum((size - 1) * stride for size, stride in zip(rows.shape, rows.stride(), strict=True))
    return rows.as_strided((last + 1,), (1,)).numpy()


@pytest.mark.parametrize("first", [0, 250])
@pytest.mark.parametrize("tokens", [1, 17, 700])
@pytest.mark.parametrize(
    ("heads", "group", "d", "width"), [(1, 1, 5, 5), (2, 4, 24, 40), (4, 2, 64, 64), (2, 7, 96, 128)]
)
def test_products_are_those_of_the_tokens_in_the_table(heads, group, d, width, tokens, first):
    """Heads lie apart, rows are wider than they are read, and the table has gaps and an end."""
    draw = torch.Generator().manual_seed(tokens + d)
    stored = torch.randn(heads, 1000, width, generator=draw)[:, :900, :d]
    table = torch.full((tokens + 40,), EMPTY, dtype=torch.int32)
    table[:tokens] = torch.randperm(900, generator=draw)[:tokens].sort().values.to(torch.int32)
    table[tokens // 2 :: 7] = EMPTY
    query = torch.randn(heads, group, d, generator=draw)
    read = table >= first
    copied = stored[:, table.clamp(min=0).long()] * read[:, None]

    scores = torch.full((heads, group, len(table)), torch.nan)
    rows = memory(stored), *stored.stride()[:2], table.numpy(), first
    compiled_scattered.scores(query.numpy(), *rows, scores.numpy())
    assert torch.allclose(scores, query @ copied.transpose(1, 2), atol=1e-4)

    weights = torch.rand(heads, group, len(table), generator=draw)
    sums = torch.full((heads, -(-len(table) // compiled_scattered.TOKENS), group, d), torch.nan)
    compiled_scattered.sums(weights.numpy(), *rows, sums.numpy())
    assert torch.allclose(sums.sum(1), weights @ copied, atol=1e-3)
