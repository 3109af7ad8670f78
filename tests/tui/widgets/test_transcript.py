"""How many answers stay alive, and the chip for new lines."""

from __future__ import annotations

from support.app_driver import answers, finished, press, texts, typed

from kvchat.tui.state import Phase
from kvchat.tui.widgets.answer import Answer
from kvchat.tui.widgets.transcript import LIVE_ANSWERS, LIVE_WIDGETS, NewLines, Transcript, recent


def weighted(*weights: int) -> list[Answer]:
    made = [Answer() for _ in weights]
    for answer, weight in zip(made, weights, strict=True):
        answer.weight = weight
    return made


def test_short_answers_stay_up_to_a_number():
    assert recent(weighted(*[1] * 100)) == LIVE_ANSWERS
    assert recent(weighted(1, 1)) == 2
    assert recent([]) == 0


def test_heavy_answers_stay_up_to_a_weight_but_two_at_least():
    assert recent(weighted(*[LIVE_WIDGETS // 4] * 10)) == 4
    assert recent(weighted(*[LIVE_WIDGETS * 2] * 10)) == 2


async def test_new_lines_below_while_the_reader_is_elsewhere(running):
    async with running(size=(80, 24)) as (app, _pilot, until):
        typed(app, "hello")
        await until(lambda: finished(app))
        typed(app, "slow")
        await until(lambda: app.controller.state.phase is Phase.ANSWERING)
        press(app, "pageup")
        chip = app.chat.query_one(NewLines)
        await until(lambda: chip.display)
        place = app.chat.query_one(Transcript).scroll_y
        before = texts([chip])
        await until(lambda: texts([chip]) != before)
        assert app.chat.query_one(Transcript).scroll_y == place
        press(app, "ctrl+end")
        await until(lambda: not chip.display)


async def test_old_answers_are_collapsed_and_come_back_when_read(running, monkeypatch):
    monkeypatch.setattr("kvchat.tui.widgets.transcript.LIVE_ANSWERS", 3)
    async with running(size=(80, 24)) as (app, _pilot, until):
        for number in range(1, 9):
            await app.controller.ask("hello")
            await until(lambda number=number: finished(app, number))
        await until(lambda: answers(app)[0].collapsed)
        height = answers(app)[0].size.height
        assert not answers(app)[-1].collapsed
        app.chat.query_one(Transcript).scroll_home(animate=False)
        await until(lambda: not answers(app)[0].collapsed)
        await until(lambda: answers(app)[0].query("MarkdownFence"))
        assert answers(app)[0].size.height == height
