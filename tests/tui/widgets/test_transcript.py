"""How many answers stay alive."""

from __future__ import annotations

from kvchat.tui.widgets.messages import Answer
from kvchat.tui.widgets.transcript import LIVE_ANSWERS, LIVE_WIDGETS, recent


def answers(*weights: int) -> list[Answer]:
    made = [Answer() for _ in weights]
    for answer, weight in zip(made, weights, strict=True):
        answer.weight = weight
    return made


def test_short_answers_stay_up_to_a_number():
    assert recent(answers(*[1] * 100)) == LIVE_ANSWERS
    assert recent(answers(1, 1)) == 2
    assert recent([]) == 0


def test_heavy_answers_stay_up_to_a_weight_but_two_at_least():
    assert recent(answers(*[LIVE_WIDGETS // 4] * 10)) == 4
    assert recent(answers(*[LIVE_WIDGETS * 2] * 10)) == 2
