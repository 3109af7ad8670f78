"""What a comparison compares: as it is written, completed and with one seed."""

from __future__ import annotations

import pytest

from kvchat.errors import UsageError
from kvchat.protocol.messages import MAX_VARIANTS, Sampling, Variant
from kvchat.tui.comparisons import completed, parse_variants, seeded


def test_each_mode_is_followed_by_its_parameters():
    assert parse_variants([]) == []
    parsed = parse_variants(["streaming", "budget=256", "R=8", "speculative", "first_full=no", "full"])
    assert parsed == [
        Variant("streaming", {"budget": 256, "R": 8}),
        Variant("speculative", {"first_full": False}),
        Variant("full"),
    ]


@pytest.mark.parametrize("line", ["budget=256", "full " * (MAX_VARIANTS + 1)])
def test_what_makes_no_sense_is_refused(line):
    with pytest.raises(UsageError):
        parse_variants(line.split())


def test_the_beginning_of_a_mode_stands_for_it():
    assert [one.mode for one in parse_variants(["spec", "budget=256", "ful"])] == ["speculative", "full"]


def test_at_least_two_different_variants():
    full, speculative, sync = Variant("full"), Variant("speculative"), Variant("sync")
    assert completed([], "full") == (full, speculative)
    assert completed([], "sync") == (full, sync)
    assert completed([sync], "full") == (full, sync)
    assert completed([full], "sync") == (full, sync)
    assert completed([sync, speculative], "full") == (sync, speculative)
    for wrong in ([sync, sync], [Variant("frezee")], [sync, Variant("full", {"budget": 99})]):
        with pytest.raises(UsageError):
            completed(wrong, "full")


def test_a_seed_is_drawn_where_none_is_given():
    assert seeded(Sampling(seed=3)) == Sampling(seed=3)
    assert seeded(Sampling()).seed is not None
