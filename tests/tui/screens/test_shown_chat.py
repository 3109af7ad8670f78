"""Where on the screen the controller's reports are shown."""

from __future__ import annotations

import pytest
from support.app_driver import answers

from kvchat.protocol.messages import Switched, Text
from kvchat.tui.widgets.messages import SwitchNote
from kvchat.tui.widgets.transcript import Transcript


@pytest.mark.parametrize(("said", "is_note"), [("", True), ("A word ", False)])
async def test_a_switch_before_the_first_word_stands_before_the_answer(running, said, is_note):
    async with running() as (app, _pilot, _until):
        await app.controller.answers.begin()
        if said:
            await app.controller.handle(Text(said, 2))
        await app.controller.handle(Switched("full", "streaming", {"budget": 512}, 10, 0, 0.0))
        notes = app.chat.query(SwitchNote)
        assert bool(notes) is is_note
        children = list(app.chat.query_one(Transcript).children)
        assert not notes or children.index(notes.first()) == children.index(answers(app)[-1]) - 1
