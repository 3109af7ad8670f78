"""Comparisons without a screen: what is asked of the engine, and what becomes of its events."""

from __future__ import annotations

import pytest
from support.message import lacks

from kvchat.config.modes import mode_names
from kvchat.errors import UsageError
from kvchat.protocol.client import Crashed
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
    Sampling,
    Stop,
    Turn,
    Variant,
)
from kvchat.tui.comparisons import completed, parse_variants, seeded
from kvchat.tui.state import Phase, RunningComparison

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


# ---- What a comparison compares: as it is written, completed and with one seed


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


# ---- A comparison while it is made: what it says is being done, and when it is over


def test_the_stage_follows_the_engine_until_the_result_is_there():
    shown = RunningComparison("What?", "bundled", (Variant("full"), Variant("sync", {"budget": 128})), Sampling())
    assert "waiting" in shown.stage
    shown.read(1000, 2000)
    assert "1,000 of 2,000" in shown.stage
    shown.note(Comparing(1, "It is", 4))
    assert not lacks(shown.stage, "sync budget=128", "4 tok")
    shown.note(Comparing(1, "It is", 4, checked=3))
    assert not lacks(shown.stage, "sync budget=128", "3 tok")
    assert shown.progress[1].text == "It is"
    assert not shown.is_over
    runs = (Run("full", {}), Run("sync", {"budget": 128}))
    shown.finish(Compared(runs, 2000))
    assert shown.is_over
    assert (shown.result.question, shown.result.prompt_tokens, shown.result.runs) == ("What?", 2000, runs)


def test_an_error_ends_it_too():
    assert RunningComparison("What?", "bundled", (), Sampling(), error="stopped").is_over
