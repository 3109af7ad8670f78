"""Positions beyond the context: bases in steps of half of it, and prompts cut where one begins."""

from __future__ import annotations

import pytest
import torch

from kvchat.kv.modes.base import ContextPolicy
from kvchat.kv.modes.moving_base import MovingBase

CONTEXT, CHUNK = 100, 30


@pytest.fixture
def moving() -> MovingBase:
    return MovingBase(CONTEXT, (None,), CHUNK)


def test_no_position_is_beyond_the_context_and_bases_move_by_half_of_it(moving):
    positions = torch.arange(1000)
    bases = moving.bases(positions)
    rotated = positions - bases
    assert int(rotated.max()) == CONTEXT - 1
    assert (rotated[CONTEXT:] >= CONTEXT // 2).all()
    assert [int(position) for position in positions[1:] if bases[position] != bases[position - 1]] == [
        *range(CONTEXT, 1000, CONTEXT // 2)
    ]
    assert [position for position in range(1, 1000) if moving.begins_base(position)] == [*range(CONTEXT, 1000, 50)]
    assert [moving.base_of(position) for position in (0, 99, 100, 149, 150)] == [0, 0, 50, 50, 100]


def test_a_prompt_is_cut_where_the_context_ends_and_a_base_begins(moving):
    total, ends = 20, []
    while total < 400:
        chunk = moving.prompt_tokens(total)
        assert len(set(moving.bases(torch.arange(total, total + chunk)).tolist())) == 1
        assert moving.limits_prompt(total + chunk) == (total >= CONTEXT)
        total += chunk
        ends.append(total)
    assert ends[:5] == [100, 130, 150, 180, 200]


def test_where_the_context_is_final_nothing_is_cut_or_moved():
    end = ContextPolicy()
    assert end.is_final
    assert not MovingBase.is_final
    assert end.base_of(10**6) == end.begin_prompt(10**6) == 0
    assert end.prompt_tokens(5) > 10**9
    assert not end.limits_prompt(10**6)
