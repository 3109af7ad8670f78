"""The reference attention against loops over single numbers: it is what everything else is compared with."""

from __future__ import annotations

import math

import pytest
import torch

from kvchat.kv.attention import AttentionSpec
from kvchat.models.attention_hook import DenseManager, attend, weights

SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])
SPECS = [
    AttentionSpec(0.5),
    AttentionSpec(0.3, window=3),
    AttentionSpec(0.5, softcap=1.5),
    AttentionSpec(0.5, sinks=SINKS),
    AttentionSpec(0.7, window=2, softcap=2.0, sinks=SINKS),
]


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def by_hand(query, key, spec):
    """One exponential at a time."""
    (heads, n, _), total = query.shape, key.shape[1]
    result = torch.zeros(heads, n, total)
    for head in range(heads):
        for row in range(n):
            at, terms = total - n + row, {}
            for position in range(total):
                if position > at or (spec.window is not None and position <= at - spec.window):
                    continue
                score = float(query[head, row] @ key[head * len(key) // heads, position]) * spec.scaling
                score = score if spec.softcap is None else spec.softcap * math.tanh(score / spec.softcap)
                terms[position] = math.exp(score)
            sink = 0.0 if spec.sinks is None else math.exp(float(spec.sinks[head]))
            for position, term in terms.items():
                result[head, row, position] = term / (sum(terms.values()) + sink)
    return result


@pytest.mark.parametrize("n", [1, 4, 7])
@pytest.mark.parametrize("spec", SPECS, ids=["plain", "window", "softcap", "sinks", "all"])
def test_weights(spec, n):
    query, key = random(4, n, 8), random(2, 7, 8)
    torch.testing.assert_close(weights(query, key, spec), by_hand(query, key, spec), atol=1e-6, rtol=1e-5)


def test_the_result_is_the_weighted_mean_of_the_groups_values():
    query, key, value = random(4, 3, 8), random(2, 5, 8), random(2, 5, 6)
    attended, shares = attend(query.bfloat16(), key.bfloat16(), value.bfloat16(), SPECS[0])
    assert (attended.shape, attended.dtype, shares.dtype) == ((4, 3, 6), torch.bfloat16, torch.float32)
    for head in range(4):
        expected = shares[head] @ value[head // 2].bfloat16().float()
        torch.testing.assert_close(attended[head].float(), expected, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("spec", SPECS, ids=["plain", "window", "softcap", "sinks", "all"])
def test_chunks_of_a_conversation_equal_one_forward(spec):
    query, key, value = random(4, 7, 8), random(2, 7, 8, seed=1), random(2, 7, 6)
    manager, parts = DenseManager(), []
    for chunk in (slice(0, 4), slice(4, 5), slice(5, 7)):
        parts.append(manager.attention(3, query[:, chunk], key[:, chunk], value[:, chunk], spec))
    torch.testing.assert_close(torch.cat(parts, 1), attend(query, key, value, spec)[0])
