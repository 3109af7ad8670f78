"""The line a live switch writes."""

from __future__ import annotations

import pytest

from kvchat.protocol.messages import Switched
from kvchat.tui.state import SETTLED_TOKENS
from kvchat.tui.widgets.messages import SwitchNote


def note(speed: float | None = 41.0, **changes: object) -> SwitchNote:
    return SwitchNote(Switched("full", "speculative", {}, 14203, 0, 0.0, **changes), speed)


def test_the_second_figure_comes_after_64_tokens():
    line = note()
    assert str(line.content) == "full -> speculative · 14,203 tok · 41 tok/s"
    line.count(1, now=10.0)
    line.count(SETTLED_TOKENS - 1, now=11.0)
    assert not line.settled
    line.count(1, now=12.0)
    assert str(line.content) == "full -> speculative · 14,203 tok · 41 -> 32 tok/s"


def test_an_answer_that_ends_earlier_fills_it_in():
    line = note()
    line.close(now=5.0)
    assert not line.settled
    line.count(1, now=10.0)
    line.count(29, now=10.5)
    line.close(now=10.5)
    assert "41 -> 58 tok/s" in str(line.content)


def test_a_speed_after_it_alone_is_told_from_one_before_it():
    line = note(None)
    line.count(1, now=10.0)
    line.count(29, now=10.5)
    line.close(now=10.5)
    assert str(line.content).endswith(" · then 58 tok/s")


@pytest.mark.parametrize("tokens", [0, SETTLED_TOKENS])
def test_too_few_tokens_or_too_little_time_tell_no_speed_and_those_of_the_next_answer_do_not_count(tokens):
    line = note()
    line.count(1, now=10.0)
    line.count(tokens, now=10.00001)
    line.close(now=10.00002)
    line.count(SETTLED_TOKENS, now=20.0)
    assert str(line.content) == str(note().content)


def test_nothing_known_nothing_said_and_what_was_reduced_is():
    assert str(note(None).content) == "full -> speculative · 14,203 tok"
    assert "120 tok computed with less context" in str(note(reduced_tokens=120).content)
