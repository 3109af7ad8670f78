"""Indices of a pool: the lowest free ones first, as a set that grows would give them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvchat.kv.memory.eight_bit_pool import FreeList


@given(steps=st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=30))
def test_the_lowest_free_indices_are_taken_and_given_back(steps):
    free, used = FreeList(3), {0, 1, 2}
    for gives_back, number in steps:
        if gives_back:
            returned = sorted(used)[::2][:number]
            free.give_back(returned)
            used -= set(returned)
            continue
        lowest = free.lowest(number)
        assert lowest == [index for index in range(100) if index not in used][:number]
        longest = free.after(number)
        free.take(lowest)
        used |= set(lowest)
        assert longest == free.after(0) > max(used, default=-1)
