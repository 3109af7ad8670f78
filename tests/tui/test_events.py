"""What the engine reports, without a screen."""

from __future__ import annotations

from typing import get_args

import pytest
from support.message import lacks

from kvchat.config.modes import beside
from kvchat.protocol import messages
from kvchat.protocol.client import Crashed
from kvchat.protocol.figures import Snapshot, Stats
from kvchat.protocol.messages import (
    Failed,
    Finished,
    Loading,
    Peeked,
    Prefilled,
    Preparing,
    Rebuilt,
    Recovered,
    Started,
    Switch,
    Switched,
    SwitchRefused,
    Text,
)
from kvchat.tui import events
from kvchat.tui.events import describe_exit
from kvchat.tui.state import Phase


def test_every_event_of_the_protocol_is_handled(chat):
    assert set(chat.controller._events._handlers) == {*get_args(messages.Event), Crashed}


async def test_loading_shows_stages_then_notes(chat):
    await chat.controller.handle(Loading("reading the weights"))
    assert chat.controller.state.stage == "reading the weights"
    await chat.load(mode="streaming", params={"budget": 512}, notes=("no GPU",))
    state = chat.controller.state
    assert (state.mode, state.params, state.phase, state.stage) == ("streaming", {"budget": 512}, Phase.READY, "")
    assert chat.view.notes == ["no GPU"]


async def test_a_snapshot_shows_the_parameters_in_force(chat):
    await chat.load(mode="streaming", params={"budget": None})
    old = Snapshot("full", {}, 0, 0, 0, 0, 0)
    new = Snapshot("streaming", {"budget": 512}, 0, 0, 0, 0, 0)
    for snapshot in (old, new):
        await chat.controller.handle(snapshot)
    assert chat.view.snapshots == [old, new]
    assert chat.controller.state.params == {"budget": 512}


async def test_a_switch_brings_the_values_that_the_engine_was_given(chat):
    await chat.load()
    chat.controller.state.is_stored = True
    await chat.controller.handle(Snapshot("full", {}, 0, 0, 0, 0, 0, tokens_per_s=41.0))
    chat.controller.switch("streaming", {"budget": 128, "sigma": 8})
    assert chat.controller.state.pending == {"streaming": {"budget": 128, "sigma": 8}}
    given = {"streaming": {"budget": 128, "sigma": 8}}
    await chat.controller.handle(Switched("full", "streaming", {"budget": 128, "sigma": 8}, 10, 0, 0.0, given=given))
    state = chat.controller.state
    assert (state.mode, state.wanted, state.given, state.pending) == ("streaming", "streaming", given, {})
    assert chat.view.switches[0].speed == 41.0


async def test_what_auto_chooses_is_shown_and_told_once(chat):
    await chat.load(auto="auto: full, 12 ms a token")
    state, slow = chat.controller.state, "auto: speculative 512, because full would take 200 ms a token"
    assert (state.mode, state.asked) == ("full", "auto")
    await chat.controller.handle(Switched("full", "speculative", {"budget": 512}, 10, 0, 0.0, auto=slow))
    assert (state.mode, state.asked, state.conversation.mode) == ("speculative", "auto", "auto")
    await chat.controller.handle(Switched("speculative", "speculative", {"budget": 512}, 10, 0, 0.0, auto=slow))
    assert chat.view.notes.count(slow) == 1
    later = Snapshot("speculative", {"budget": 512}, 0, 0, 0, 0, 0, auto="auto: speculative 512, 90 ms a token")
    await chat.controller.handle(later)
    assert state.auto == later.auto


async def test_f6_counts_from_what_auto_chose_and_ends_it(chat):
    await chat.load(mode="speculative", params={}, auto="auto: speculative 512, 90 ms a token")
    chat.controller.switch_by(1)
    assert chat.client.sent[-1].mode == beside("speculative")
    await chat.controller.handle(Switched("speculative", "full", {}, 10, 0, 0.0))
    assert (chat.controller.state.asked, chat.controller.state.conversation.mode) == ("full", "full")
    chat.controller.switch("auto", {"tokens_per_s": 20})
    assert chat.client.sent[-1] == Switch("auto", {"tokens_per_s": 20})


async def test_the_speed_asked_for_changes_at_once_in_auto_and_else_with_it(chat):
    await chat.load()
    chat.controller.set_for_mode("auto", "tokens_per_s", 5)
    assert not chat.client.sent
    chat.controller.switch("auto")
    assert chat.client.sent == [Switch("auto", {"tokens_per_s": 5})]
    await chat.controller.handle(Switched("full", "full", {}, 10, 0, 0.0, auto="auto: full, 12 ms a token"))
    chat.controller.set_for_mode("auto", "tokens_per_s", 7)
    assert chat.client.sent[-1] == Switch("auto", {"tokens_per_s": 7})


async def test_a_refused_switch_keeps_the_mode_and_the_next_step_goes_past_it(chat):
    await chat.load()
    chat.controller.switch_by(1)
    await chat.controller.handle(SwitchRefused("full", "too small"))
    assert chat.controller.state.mode == "full"
    assert chat.controller.state.pending == {}
    assert chat.view.errors[0].detail == "too small"
    chat.controller.switch_by(1)
    first, second = chat.client.sent
    assert first.mode != second.mode


async def test_notes_of_the_engine(chat):
    await chat.load()
    await chat.controller.handle(Recovered("RR", "entropy", 3.42, 1200))
    await chat.controller.handle(Rebuilt(1200, 0.25, 34))
    recovered, rebuilt = chat.view.notes
    assert not lacks(recovered, "RR", "1,200 tok", "entropy 3.4")
    assert not lacks(rebuilt, "1,200 tokens", "250 ms", "34")
    await chat.controller.handle(Preparing("sync"))
    assert "sync mode" in chat.view.events[-1]
    await chat.controller.handle(Peeked(32, 64, "text"))
    assert chat.view.page_texts == [(32, "text")]


async def test_a_refused_question_is_given_back(chat):
    await chat.load()
    await chat.ask("one")
    await chat.controller.handle(Failed("The prompt is too long.", "9 tokens", "Shorten it."))
    assert chat.view.errors[0].hint == "Shorten it."
    assert (chat.view.prompt, chat.turns, chat.phase) == ("one", [], Phase.READY)


@pytest.mark.parametrize("fatal", [True, False])
async def test_without_a_model_the_engine_is_down(chat, fatal):
    if fatal:
        await chat.load()
    await chat.controller.handle(Failed("The model cannot be read.", fatal=fatal))
    assert chat.phase is Phase.DOWN


@pytest.mark.parametrize(("reason", "logged"), [("eos", "answered: 63 tok"), ("stopped", "answered: 63 tok, stopped")])
async def test_the_log_says_of_an_answer_how_long_it_is_and_how_it_ended(chat, reason, logged):
    await chat.load()
    await chat.ask("hello")
    stats = Stats(generated_tokens=63, decode_tokens_per_s=58.2, ttft_s=0.2, read_share=0.5, total_tokens=90)
    await chat.controller.handle(messages.Finished(reason, "hi", stats))
    assert chat.view.events[-1] == logged


async def test_a_crash_restarts_once_until_an_answer_is_finished(chat):
    await chat.load()
    await chat.ask("one")
    await chat.controller.handle(Text("half", 1))
    await chat.controller.handle(Crashed(3, ("last words",)))
    error = chat.view.errors[0]
    assert "exit code 3" in error.title
    assert error.detail == "last words"
    await chat.engine_ended()
    assert (chat.client.starts, chat.phase, chat.turns) == (1, Phase.LOADING, ["one", "half"])
    await chat.controller.handle(Crashed(3, ()))
    assert (chat.client.starts, chat.phase) == (1, Phase.DOWN)
    await chat.ask("two")
    await chat.load()
    await chat.controller.handle(messages.Finished("eos", "ok", Stats()))
    await chat.controller.handle(Crashed(-9, ()))
    await chat.engine_ended()
    assert chat.client.starts == 3
    assert "SIGKILL" in chat.view.errors[-1].title


@pytest.mark.parametrize(
    ("code", "words"), [(3, "exit code 3"), (-9, "killed by SIGKILL"), (-200, "killed by signal 200")]
)
def test_exit_codes_in_words(code, words):
    assert describe_exit(code) == words


async def test_while_a_prompt_is_read_its_rate_and_the_time_left_are_told(chat, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(events, "monotonic", lambda: now[0])
    await chat.load()
    await chat.ask("one")
    await chat.controller.handle(Started(4096, 96))
    now[0] += 2.0
    await chat.controller.handle(Prefilled(1000, 4000))
    assert "1,000 of 4,000" in chat.view.answers[0].waiting
    assert "500 tok/s" in chat.view.answers[0].waiting
    assert "6.0 s" in chat.view.answers[0].waiting


async def test_the_context_warns_once_at_each_level_before_it_ends(chat):
    await chat.load(context=1000)
    await chat.ask("one")
    seen = []
    for total in (500, 799, 800, 850, 949, 950, 999, 300, 800):
        await chat.controller.handle(Text("a", 1))
        before = len(chat.view.toasts)
        await chat.controller.handle(Snapshot("full", {}, 1.0, total, 1000, 0, 0))
        seen += [total] * (len(chat.view.toasts) - before)
    assert seen == [800, 950, 800]
    assert "800 of 1,000 tokens" in chat.view.toasts[-1]


async def test_a_server_that_counts_only_at_the_end_has_the_context_warned_of_once(chat):
    await chat.load(context=100, server="Ollama", mode="server")
    for tokens in (90, 93):
        await chat.ask("hello")
        for event in (Started(0, 0), Text("Hi", 1), counted(0), counted(tokens)):
            await chat.controller.handle(event)
        await chat.controller.handle(Finished("eos", "Hi", Stats(prompt_tokens=tokens)))
    assert len([toast for toast in chat.view.toasts if "context" in toast]) == 1


def counted(tokens: int) -> Snapshot:
    return Snapshot("server", {}, tokens, tokens, 100, 0, 0)
