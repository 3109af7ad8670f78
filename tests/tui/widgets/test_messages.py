"""The line a live switch writes."""

from __future__ import annotations

from kvchat.protocol.messages import Switched
from kvchat.tui.widgets.messages import SETTLED_TOKENS, SwitchNote


def note(speed: float | None = 41.0, **changes: object) -> SwitchNote:
    return SwitchNote(Switched("full", "speculative", {}, 14203, 0, 0.0, **changes), speed)


def test_the_second_figure_comes_after_64_tokens():
    line = note()
    assert str(line.content) == "── full -> speculative · 14,203 tok · 41 tok/s ──"
    line.count(1, now=10.0)
    line.count(SETTLED_TOKENS - 1, now=11.0)
    assert not line.settled
    line.count(1, now=12.0)
    assert str(line.content) == "── full -> speculative · 14,203 tok · 41 -> 32 tok/s ──"


def test_an_answer_that_ends_earlier_fills_it_in():
    line = note()
    line.close(now=5.0)
    assert not line.settled
    line.count(1, now=10.0)
    line.count(29, now=10.5)
    line.close(now=10.5)
    assert "41 -> 58 tok/s" in str(line.content)


def test_text_that_comes_all_at_once_tells_no_speed():
    line = note()
    line.count(1, now=10.0)
    line.count(SETTLED_TOKENS, now=10.00001)
    line.close(now=10.00002)
    assert not line.settled
    assert "tok/s" in str(line.content)
    assert "->" not in str(line.content).split("tok ·")[1]


def test_nothing_known_nothing_said_and_what_was_reduced_is():
    assert str(note(None).content) == "── full -> speculative · 14,203 tok ──"
    assert "120 tok computed with less context" in str(note(reduced_tokens=120).content)
