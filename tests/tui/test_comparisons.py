"""Comparisons without a screen: what is asked of the engine, and what becomes of its events."""

from __future__ import annotations

import pytest

from kvchat.config.modes import mode_names
from kvchat.errors import UsageError
from kvchat.protocol.figures import Run, Snapshot, Stats
from kvchat.protocol.messages import (
    MAX_VARIANTS,
    Compare,
    Compared,
    Comparing,
    Failed,
    Finished,
    HideNeedle,
    NeedleHidden,
    Prefilled,
    Stop,
    Turn,
    Variant,
)
from kvchat.tui.client import Crashed
from kvchat.tui.state import Phase

SNAPSHOT = Snapshot("streaming", {}, 1.0, 2, 3, 4, 5)


@pytest.fixture
async def talk(chat):
    """Two questions, answered."""
    await chat.load()
    chat.controller.set_system("be brief")
    for question, answer in (("one", "1"), ("two", "2")):
        await chat.ask(question)
        await chat.controller.handle(Finished("eos", answer, Stats(generated_tokens=1)))
    return chat


async def test_an_engine_that_is_restarted_ends_the_comparison(talk):
    talk.controller.comparisons.begin([])
    shown = talk.view.comparisons[-1]
    await talk.controller.restart()
    assert shown.is_over
    assert shown.error
    assert talk.view.comparisons[-1] is shown


async def test_the_last_question_is_compared_with_one_seed(talk):
    talk.controller.comparisons.begin([Variant("streaming", {"budget": 256})])
    sent = talk.client.sent[-1]
    assert isinstance(sent, Compare)
    assert [turn.content for turn in sent.turns] == ["be brief", "one", "1", "two"]
    assert sent.variants == (Variant("full"), Variant("streaming", {"budget": 256}))
    assert sent.sampling.seed is not None
    assert talk.controller.state.sampling.seed is None
    assert talk.phase is Phase.COMPARING
    with pytest.raises(UsageError, match="busy"):
        talk.controller.comparisons.begin([])


async def test_the_chosen_question_is_compared(talk):
    talk.view.chosen = talk.controller.state.conversation.path[1].id
    talk.controller.comparisons.begin([])
    assert talk.client.sent[-1].turns[-1] == Turn("user", "one")


async def test_progress_and_result_are_shown_and_the_chat_stays_as_it_was(talk):
    handle, shown = talk.controller.handle, len(talk.view.snapshots)
    talk.controller.comparisons.begin([])
    await handle(Prefilled(3, 9))
    running = talk.view.comparisons[-1]
    assert "3 of 9" in running.stage
    await handle(SNAPSHOT)
    await handle(Comparing(1, "text", 2, 5))
    assert "5 tok" in running.stage
    await handle(Comparing(7, "of no variant", 2))
    assert not running.is_over
    await handle(Compared((Run("full", {}),), 9))
    assert running.is_over
    assert running.result.prompt_tokens == 9
    assert len(talk.view.snapshots) == shown, "the figures of a variant are not the conversation's"
    assert talk.turns == ["one", "1", "two", "2"]
    assert talk.phase is Phase.READY


async def test_a_question_typed_meanwhile_is_asked_afterwards(talk):
    talk.controller.comparisons.begin([])
    await talk.ask("three")
    await talk.controller.handle(Compared(()))
    assert talk.client.sent[-1].turns[-1] == Turn("user", "three")


@pytest.mark.parametrize("end", [Failed("Memory is short."), Crashed(-9, ())])
async def test_a_failure_ends_it_with_a_reason(talk, end):
    talk.controller.comparisons.begin([])
    await talk.controller.handle(end)
    running = talk.view.comparisons[-1]
    assert running.is_over
    assert running.error
    assert talk.controller.comparisons.running is None
    assert talk.view.errors


async def test_a_needle_is_hidden_and_every_mode_asked_for_it(talk):
    talk.controller.comparisons.search_needle(2000)
    hide = talk.client.sent[-1]
    assert isinstance(hide, HideNeedle)
    assert hide.tokens == 2000
    turns = (Turn("user", "long"), Turn("assistant", "ok"), Turn("user", "What is the passkey?"))
    await talk.controller.handle(NeedleHidden(turns, "12345", 24))
    sent = talk.client.sent[-1]
    assert sent.turns == turns
    assert [variant.mode for variant in sent.variants] == mode_names()[:MAX_VARIANTS]
    assert (sent.sampling.temperature, sent.sampling.max_new_tokens) == (0.0, 24)
    assert talk.view.comparisons[-1].fact == "12345"
    await talk.controller.handle(Compared(()))
    assert talk.phase is Phase.READY


async def test_a_needle_stopped_before_it_is_hidden_is_not_asked_for(talk):
    talk.controller.comparisons.search_needle(2000)
    talk.controller.comparisons.stop()
    await talk.controller.handle(NeedleHidden((Turn("user", "What?"),), "12345", 24))
    assert talk.client.sent[-1] == Stop()
    assert talk.view.comparisons[-1].is_over
    assert talk.phase is Phase.READY


async def test_esc_asks_the_engine_to_stop(talk):
    talk.controller.comparisons.begin([])
    talk.controller.comparisons.stop()
    assert talk.client.sent[-1] == Stop()
