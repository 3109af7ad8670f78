"""How many answers stay alive, and the chip for new lines."""

from __future__ import annotations

import asyncio

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
        transcript = app.chat.query_one(Transcript)
        await until(lambda: transcript.scroll_y == transcript.scroll_target_y < transcript.max_scroll_y)
        place, before = transcript.scroll_y, texts([chip])
        await until(lambda: texts([chip]) != before)
        assert transcript.scroll_y == place
        press(app, "ctrl+end")
        await until(lambda: not chip.display)


async def test_old_answers_are_collapsed_and_come_back_when_read(running, monkeypatch):
    monkeypatch.setattr("kvchat.tui.widgets.transcript.LIVE_ANSWERS", 3)
    async with running(size=(80, 24)) as (app, _pilot, until):
        for number in range(1, 9):
            await app.controller.ask("hello")
            await until(lambda number=number: finished(app, number))
            await until(lambda: answers(app)[-1].query_one(".receipt").region.height)  # a layout has seen all of it
        first, transcript = answers(app)[0], app.chat.query_one(Transcript)
        await until(lambda: first.collapsed)
        height = first.size.height
        assert not answers(app)[-1].collapsed
        transcript.scroll_home(animate=False)
        heights = set()  # also while it comes back: nothing below it may move

        def revived() -> bool:
            heights.add(first.size.height)
            return first.styles.height.is_auto and any(fence.region.height for fence in first.query("MarkdownFence"))

        await until(revived)
        laid_out = asyncio.Event()
        first.call_after_refresh(laid_out.set)
        await until(laid_out.is_set)
        assert heights | {first.size.height} == {height}
        assert not first.collapsed


async def test_an_answer_that_no_layout_has_seen_is_not_collapsed(running):
    async with running(size=(80, 24)) as (app, _pilot, until):
        typed(app, "hello")
        await until(lambda: finished(app))
        first = answers(app)[0]
        first.display = False
        await until(lambda: not first.size.height)
        await first.set_collapsed(True)
        assert not first.collapsed
