"""Every key and command, driven by the pilot over the fake engine."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from textual import events
from textual.widgets import Markdown, Static

from kvchat.config.modes import PARAMETERS
from kvchat.protocol.messages import Load, Turn
from kvchat.tui.app import KvchatApp
from kvchat.tui.screens.help import HelpScreen
from kvchat.tui.state import Phase
from kvchat.tui.widgets.bars import ModeBar, StatusBar
from kvchat.tui.widgets.messages import Answer, Note, Problem, Question, SwitchNote
from kvchat.tui.widgets.panels import DetailColumn, KvColumn, Rowed
from kvchat.tui.widgets.prompt import Prompt
from kvchat.tui.widgets.ribbon import Ribbon
from kvchat.tui.widgets.timeline import Timeline
from kvchat.tui.widgets.transcript import NewLines, Transcript, Welcome


def texts(widgets: Iterable[Static]) -> list[str]:
    return [str(widget.content) for widget in widgets]


def prompt(app: KvchatApp) -> Prompt:
    return app.chat.query_one(Prompt)


def answers(app: KvchatApp) -> list[Answer]:
    return app.chat.query_one(Transcript).answers()


def finished(app: KvchatApp, count: int = 1) -> bool:
    return len(app.chat.state.stats) == count and app.chat.state.phase is Phase.READY and answers(app)[-1].finished


async def typed(pilot, text: str) -> None:
    """A line in the prompt and Enter; single key presses cost the pilot 50 ms each."""
    prompt(pilot.app).insert(text)
    await pilot.press("enter")


async def test_keys_typed_fast_arrive_in_order(running):
    async with running() as (app, _pilot, until):
        for character in "hello there":
            app.post_message(events.Key({" ": "space"}.get(character, character), character))
        app.post_message(events.Key("enter", "\r"))
        await until(lambda: finished(app))
        assert app.chat.state.conversation.turns[0].content == "hello there"


async def test_a_question_is_answered_as_markdown_with_a_receipt(running):
    async with running() as (app, pilot, until):
        assert app.chat.query(Welcome)
        await typed(pilot, "hello there")
        await until(lambda: finished(app))
        answer = answers(app)[0]
        assert "| 2     |    30.23 |" in answer.query_one(Markdown).source
        assert {"MarkdownFence", "MarkdownTable"} <= {type(block).__name__ for block in answer.query("*")}
        assert answer.receipt.startswith("58 tok · ")
        assert "TTFT 0.41 s · full · mean active " in answer.receipt
        assert texts(app.chat.query(Question)) == ["❯ hello there"]
        assert not app.chat.query(Welcome)
        assert [turn.role for turn in app.chat.state.conversation.turns] == ["user", "assistant"]


async def test_settings_that_could_not_be_used_are_told(running, config):
    async with running(replace(config, problems=("profiles/a.toml:1: wrong.",))) as (app, _pilot, _until):
        assert "profiles/a.toml:1: wrong." in [toast.message for toast in app._notifications]


async def test_an_empty_prompt_is_refused_with_a_message(running):
    async with running() as (app, pilot, until):
        await pilot.press("space", "enter")
        await until(lambda: app._notifications)
        assert "nothing to send" in next(iter(app._notifications)).message
        assert not app.chat.query(Question)


async def test_escape_stops_and_keeps_the_partial_answer(running):
    async with running() as (app, pilot, until):
        await typed(pilot, "hold")
        await until(lambda: answers(app) and answers(app)[0].text == "the ")
        await pilot.press("escape")
        await until(lambda: finished(app))
        assert app.chat.state.conversation.turns == [Turn("user", "hold"), Turn("assistant", "the ")]
        assert answers(app)[0].receipt.endswith("stopped")
        assert prompt(app).has_focus


async def test_ctrl_c_stops_then_quits_when_pressed_twice(running):
    async with running() as (app, pilot, until):
        await typed(pilot, "hold")
        await until(lambda: app.chat.state.phase is Phase.ANSWERING)
        await pilot.press("ctrl+c")
        await until(lambda: finished(app))
        await pilot.press("ctrl+c")
        await until(lambda: app._notifications)
        assert app.is_running
        await pilot.press("ctrl+c")
        await until(lambda: app._exit)


async def test_ctrl_c_copies_a_selection(running):
    async with running() as (app, pilot, _until):
        prompt(app).load_text("copy me")
        prompt(app).select_all()
        await pilot.press("ctrl+c")
        assert app.clipboard == "copy me"
        assert prompt(app).text == "copy me"


async def test_f5_answers_the_last_question_again(running):
    async with running() as (app, pilot, until):
        await typed(pilot, "hello")
        await until(lambda: finished(app))
        first = answers(app)[0]
        await pilot.press("f5")
        await until(lambda: finished(app, 2))
        assert len(answers(app)) == 1
        assert answers(app)[0] is not first
        assert len(app.chat.state.conversation.turns) == 2


async def test_withdrawn_text_is_struck_and_no_part_of_the_answer(running):
    async with running() as (app, pilot, until):
        await typed(pilot, "waver")
        await until(lambda: finished(app))
        notes = [str(note.content) for note in app.chat.query(Note)]
        assert any("recovery RR at 40 tok: entropy 3.4" in note for note in notes)
        struck = next(note.content for note in app.chat.query(Note) if "withdrawn" in str(note.content))
        assert "and then it goes wrong" in str(struck)
        assert any("strike" in str(span.style) for span in struck.spans)
        assert answers(app)[0].text == "It begins well | and ends well."
        assert "wrong" not in answers(app)[0].query_one(Markdown).source
        assert app.chat.state.conversation.turns[-1].content == "It begins well | and ends well."


async def test_rebuild_says_what_was_computed_anew(running):
    async with running() as (app, pilot, until):
        await typed(pilot, "hello there")
        await until(lambda: finished(app))
        await typed(pilot, "/rebuild")
        await until(lambda: any("12 tokens anew in 250 ms" in text for text in texts(app.chat.query(Note))))
        await until(lambda: app.chat.state.phase is Phase.READY)


async def test_the_next_modes_price_is_shown_before_f6(running):
    async with running() as (app, pilot, until):
        await typed(pilot, "hello there")
        await until(lambda: finished(app))
        rows = dict(app.chat.query_one("#mode-rows", Rowed).rows)
        assert rows["F6 → streaming"] == "3.0 MiB · 4 ms"
        await typed(pilot, "/mode")
        await until(lambda: any("(3.0 MiB · 4 ms)" in text for text in texts(app.chat.query(Note))))


async def test_f6_switches_in_the_middle_of_an_answer(running):
    async with running() as (app, pilot, until):
        await typed(pilot, "slow")
        await until(lambda: app.chat.state.phase is Phase.ANSWERING)
        await pilot.press("f6")
        await until(lambda: app.chat.state.mode == "streaming")
        await pilot.press("shift+f6", "shift+f6")
        await until(lambda: app.chat.state.mode == "speculative")
        assert app.chat.state.phase is Phase.ANSWERING
        await until(lambda: app.chat.query(SwitchNote).last().settled)
        await pilot.press("escape")
        await until(lambda: finished(app))
        line = texts(app.chat.query(SwitchNote))[-1]
        assert line.startswith("── full -> speculative · budget 512 · ")
        assert line.endswith("tok/s ──")
        assert " -> " in line.split(" · ")[-1]
        assert app.chat.query_one(ModeBar).mode == "speculative"
        assert len(app.chat.query_one(Ribbon).ticks) == 3
        assert any(point.switched for point in app.chat.query_one(Timeline).points)


async def test_a_refused_switch_says_why_and_changes_nothing(running):
    async with running() as (app, pilot, until):
        await typed(pilot, "/mode speculative budget=64")
        await until(lambda: app.chat.query(Problem))
        assert "smaller than sink 16 plus window 64" in app.chat.query_one(Problem).error.detail
        assert app.chat.state.mode == "full"


@pytest.mark.parametrize("mode", ["freeze", "sync"])
async def test_modes_to_come_are_listed_and_never_entered(running, mode):
    async with running() as (app, pilot, until):
        await typed(pilot, f"/mode {mode}")
        await until(lambda: app.chat.query(Problem))
        assert "not available yet" in app.chat.query_one(Problem).error.title
        await typed(pilot, "/mode")
        await until(lambda: app.chat.query(Note))
        assert any(mode in line and "not available yet" in line for line in texts(app.chat.query(Note))[0].split("\n"))


async def test_mode_parameters_by_command(running):
    async with running() as (app, pilot, until):
        await typed(pilot, "/mode speculative tau=0.7")
        await until(lambda: app.chat.state.params.get("tau") == 0.7)
        await typed(pilot, "/budget 1024")
        await until(lambda: app.chat.state.params["budget"] == 1024)
        await typed(pilot, "/sink 32")
        await until(lambda: app.chat.state.params["sink"] == 32)
        await typed(pilot, "/window 128")
        await until(lambda: app.chat.state.params["window"] == 128)
        await typed(pilot, "/set tau 0.9")
        await until(lambda: app.chat.state.params["tau"] == 0.9)
        assert app.chat.query_one(ModeBar).params["budget"] == 1024


async def test_sampling_by_command(running):
    async with running() as (app, pilot, until):
        await typed(pilot, "/set temperature 0.2")
        await until(lambda: app.chat.state.sampling.temperature == 0.2)
        await typed(pilot, "/set temprature 1")
        await until(lambda: app.chat.query(Problem))
        assert 'Did you mean "temperature"?' in app.chat.query_one(Problem).error.detail


async def test_unknown_command_names_the_nearest(running):
    async with running() as (app, pilot, until):
        await typed(pilot, "/hepl")
        await until(lambda: app.chat.query(Problem))
        assert 'Did you mean "help"?' in app.chat.query_one(Problem).error.detail


async def test_system_stats_theme_copy_panels(running):
    async with running() as (app, pilot, until):
        await typed(pilot, "/system be brief")
        await until(lambda: app.chat.state.conversation.system == "be brief")
        await typed(pilot, "hello")
        await until(lambda: finished(app))
        assert app.chat.state.conversation.command(app.chat.state.sampling).turns[0] == Turn("system", "be brief")
        await typed(pilot, "/copy")
        await until(lambda: app.clipboard.startswith("Section 3"))
        await typed(pilot, "/stats")
        await until(lambda: any("generated" in text for text in texts(app.chat.query(Note))))
        await typed(pilot, "/theme kvchat-light")
        await until(lambda: app.theme == "kvchat-light")
        assert app.chat.query_one(KvColumn).display
        await typed(pilot, "/panels")
        await until(lambda: not app.chat.query_one(KvColumn).display)
        await pilot.press("f7")
        await until(lambda: app.chat.query_one(KvColumn).display)


async def test_new_conversation_forgets_and_drops_what_still_comes(running):
    async with running() as (app, pilot, until):
        await typed(pilot, "slow")
        await until(lambda: app.chat.state.phase is Phase.ANSWERING)
        await pilot.press("ctrl+n")
        await until(lambda: app.chat.state.phase is Phase.READY)
        assert app.chat.state.conversation.turns == []
        assert not answers(app)
        assert app.chat.query(Welcome)


async def test_help_and_palette(running):
    async with running() as (app, pilot, until):
        await pilot.press("f1")
        await until(lambda: isinstance(app.screen, HelpScreen))
        await pilot.press("escape")
        await until(lambda: app.screen is app.chat)
        await pilot.press("ctrl+p")
        await until(lambda: app.screen is not app.chat)
        await pilot.press(*"streaming")
        await until(lambda: app.screen.query("CommandList").first().option_count)
        await pilot.press("enter")
        await until(lambda: app.chat.state.mode == "streaming")


async def test_newlines_and_history(running):
    async with running() as (app, pilot, until):
        await pilot.press("a", "ctrl+j", "b", "enter")
        await until(lambda: finished(app))
        assert app.chat.state.conversation.turns[0].content == "a\nb"
        await pilot.press("d", "up")
        assert prompt(app).text == "a\nb"
        await pilot.press("down")
        assert prompt(app).text == "d"


async def test_a_prompt_waits_while_the_model_loads_and_while_it_answers(running):
    async with running(ready=False) as (app, pilot, until):
        await typed(pilot, "hello")
        await until(lambda: finished(app))
        await typed(pilot, "hold")
        await until(lambda: app.chat.state.phase is Phase.ANSWERING)
        await typed(pilot, "next")
        await until(lambda: app.chat.queued)
        await typed(pilot, "third")
        assert prompt(app).text == "third"
        await pilot.press("escape")
        await until(lambda: finished(app, 3))
        assert [turn.content for turn in app.chat.state.conversation.turns if turn.role == "user"] == [
            "hello",
            "hold",
            "next",
        ]


async def test_an_engine_that_becomes_ready_while_a_question_is_shown_answers_it(running, monkeypatch):
    async with running() as (app, pilot, until):
        loaded, add = app.chat.state.info, Transcript.add

        async def slowly(transcript, widget):
            await add(transcript, widget)
            if isinstance(widget, Question):
                await app.chat.events.handle(loaded)
            return widget

        monkeypatch.setattr(Transcript, "add", slowly)
        app.chat.show_phase(Phase.LOADING)
        await typed(pilot, "hello")
        await until(lambda: finished(app))
        assert app.chat.queued is None
        assert [type(child) for child in app.chat.query_one(Transcript).children] == [Question, Answer]


async def test_what_the_engine_refuses_is_shown_and_given_back(running):
    async with running() as (app, pilot, until):
        await typed(pilot, "fail")
        await until(lambda: app.chat.query(Problem))
        assert app.chat.query_one(Problem).error.hint == "Shorten it."
        assert app.chat.state.conversation.turns == []
        assert prompt(app).text == "fail"
        assert not app.chat.query(Question)
        assert app.chat.state.phase is Phase.READY


async def test_a_crash_is_shown_and_the_conversation_goes_on(running):
    async with running() as (app, pilot, until):
        await typed(pilot, "hello")
        await until(lambda: finished(app))
        await pilot.press("f6")
        await until(lambda: app.chat.state.mode == "streaming")
        await typed(pilot, "crash")
        await until(lambda: app.chat.query(Problem))
        error = app.chat.query_one(Problem).error
        assert error.title == "The engine stopped: exit code 3."
        assert "told to crash" in error.detail
        await until(lambda: app.chat.state.phase is Phase.READY)
        assert app.chat.state.mode == "streaming"
        assert len(app.chat.state.conversation.turns) == 2
        prompt(app).load_text("")
        await typed(pilot, "and now")
        await until(lambda: finished(app, 2))
        assert len(app.chat.state.conversation.turns) == 4


async def test_a_budget_given_in_full_counts_from_the_next_mode_on(running):
    async with running() as (app, pilot, until):
        await until(lambda: app.chat.state.phase is Phase.READY)
        await typed(pilot, "/budget 96")
        await until(lambda: any("96 counts from the next mode" in text for text in texts(app.chat.query(Note))))
        assert not app.chat.query(Problem)
        await pilot.press("f6")
        await until(lambda: app.chat.state.mode == "streaming")
        assert app.chat.state.params["budget"] == 96
        assert app.chat.state.later == {}


async def test_a_restarted_engine_is_given_the_values_of_each_mode(running, monkeypatch):
    async with running() as (app, pilot, until):
        await until(lambda: app.chat.state.phase is Phase.READY)
        await typed(pilot, "/mode speculative tau=0.9 budget=128")
        await until(lambda: app.chat.state.given == {"speculative": {"tau": 0.9, "budget": 128}})
        await typed(pilot, "/mode streaming sigma=8")
        await until(lambda: app.chat.state.given.get("streaming") == {"sigma": 8})
        sent = []
        monkeypatch.setattr(app.client, "send", sent.append)
        await typed(pilot, "/restart")
        await until(lambda: any(isinstance(command, Load) for command in sent))
        load = next(command for command in sent if isinstance(command, Load))
        assert (load.mode, load.given) == (
            "streaming",
            {"speculative": {"tau": 0.9, "budget": 128}, "streaming": {"sigma": 8}},
        )


async def test_an_engine_that_keeps_crashing_is_restarted_by_the_next_question(running, monkeypatch):
    monkeypatch.setenv("FAKE_LOAD", "crash")
    async with running(ready=False) as (app, pilot, until):
        await until(lambda: len(app.chat.query(Problem)) == 2)
        assert app.chat.state.phase is Phase.DOWN
        monkeypatch.delenv("FAKE_LOAD")
        await typed(pilot, "hello")
        await until(lambda: finished(app))


async def test_a_waiting_question_is_given_back_when_the_engine_stays_down(running, monkeypatch):
    monkeypatch.setenv("FAKE_LOAD", "crash")
    async with running(ready=False) as (app, pilot, until):
        await typed(pilot, "hello")
        await until(lambda: app.chat.state.phase is Phase.DOWN)
        await until(lambda: prompt(app).text == "hello")
        assert not app.chat.query(Question)
        await pilot.press("f6")
        await until(lambda: app._notifications)
        assert "not loaded" in next(iter(app._notifications)).message


async def test_the_engine_is_restarted_by_command(running):
    async with running() as (app, pilot, until):
        before = app.client.pid
        await typed(pilot, "/restart")
        await until(lambda: app.client.pid != before and app.chat.state.phase is Phase.READY)


async def test_loading_stages_are_visible(running, monkeypatch):
    monkeypatch.setenv("FAKE_LOAD", "wait")
    async with running(ready=False) as (app, _pilot, until):
        await until(lambda: "reading the weights" in app.chat.query_one(ModeBar).render().plain)


async def test_an_engine_that_cannot_be_started_is_told(running, config):
    async with running(replace(config, engine_command=("/nonexistent/engine",)), ready=False) as (app, _pilot, until):
        await until(lambda: app.chat.query(Problem))
        assert "cannot be started" in app.chat.query_one(Problem).error.title
        assert app.chat.state.phase is Phase.DOWN


async def test_an_unwritable_log_is_told_once(running, config):
    async with running(replace(config, log_file=Path("/dev/full"))) as (app, pilot, until):
        assert any("cannot be written" in notice.message for notice in app._notifications)
        await typed(pilot, "hello")
        await until(lambda: finished(app))


async def test_the_ribbon_shows_the_text_under_its_cursor(running, monkeypatch):
    monkeypatch.setenv("FAKE_REPEAT", "100")
    async with running() as (app, pilot, until):
        await typed(pilot, "alpha beta")
        await until(lambda: finished(app))
        ribbon = app.chat.query_one(Ribbon)
        ribbon.focus()
        await until(lambda: ribbon.page_text.startswith("alpha beta alpha"))
        await pilot.press("right")
        await until(lambda: ribbon.cursor == 1 and ribbon.page_text)
        await until(lambda: ribbon.size.height == 2)
        assert "32–63 on the device" in ribbon.render_line(1).text
        await pilot.press("escape")
        assert prompt(app).has_focus


async def test_panels_and_status_show_the_snapshot(running, monkeypatch):
    monkeypatch.setenv("FAKE_GPU", "1")
    async with running(size=(200, 60)) as (app, pilot, until):
        await typed(pilot, "/mode speculative")
        await until(lambda: app.chat.state.mode == "speculative")
        await typed(pilot, "hello")
        await until(lambda: finished(app))
        memory = dict(app.chat.query_one("#memory-rows", Rowed).rows)
        assert memory["GPU"] == "NVIDIA H200"
        assert memory["this process"] == "n/a"
        assert memory["load"] == "45 % · 61 °C · n/a"
        assert memory["torch"] == "n/a"
        recall = dict(app.chat.query_one("#recall-rows", Rowed).rows)
        assert recall["p50 / p95"] == "0.8 / 1.8 ms"
        assert recall["hit rate"] == "94 %"
        assert dict(app.chat.query_one("#extra-rows", Rowed).rows)["heads corrected"] == "3"
        status = app.chat.query_one(StatusBar).render().plain
        assert "tok/s" in status
        assert "VRAM 6.0 GiB/140 GiB" in status


async def test_the_modes_own_numbers_are_shown_once_and_everything_fits(running, monkeypatch):
    monkeypatch.setenv("FAKE_GPU", "1")
    async with running(size=(120, 40)) as (app, pilot, until):
        await typed(pilot, "/mode speculative")
        await until(lambda: app.chat.state.mode == "speculative")
        await typed(pilot, "hello")
        await until(lambda: finished(app))
        column, own = app.chat.query_one(KvColumn), app.chat.query_one("#own-rows", Rowed)
        snapshot = replace(
            app.chat.state.snapshot,
            mode="freeze",
            params=PARAMETERS["freeze"]().model_dump(),
            reduced_tokens=120,
            corrections=0,
            extras={"frozen now": 557, "mean timer": 1.4, "thaws a step": 12.5, "recovery": "calm"},
        )
        column.show(snapshot)
        assert dict(own.rows) == {"frozen now": "557", "mean timer": "1.4", "thaws a step": "12.5"}
        await until(lambda: own.size.height == 3)
        assert column.max_scroll_y == 0
        assert app.chat.query_one(Timeline).size.height >= 2
        await pilot.resize_terminal(80, 24)
        await pilot.press("f7")
        await until(lambda: column.display and own.region.height == 3 and own.region.bottom <= column.region.bottom)
        await pilot.resize_terminal(200, 60)
        await until(lambda: not own.display and app.chat.query_one("#extra-rows", Rowed).display)


async def test_layouts_by_size_and_nothing_lost_by_resizing(running):
    async with running(size=(200, 60)) as (app, pilot, until):
        await typed(pilot, "hello")
        await until(lambda: finished(app))
        prompt(app).load_text("draft")
        shown = {(200, 60): (True, True), (120, 40): (True, False), (80, 24): (False, False), (40, 12): (False, False)}
        for size, (kv, detail) in shown.items():
            await pilot.resize_terminal(*size)
            await until(lambda kv=kv: app.chat.query_one(KvColumn).display is kv)
            assert app.chat.query_one(DetailColumn).display is detail
            assert not app.chat.query_one("#too-small").display
            assert app.chat.query_one(Ribbon).size.width == size[0]
        for size in ((39, 20), (80, 11)):
            await pilot.resize_terminal(*size)
            await until(lambda: app.chat.query_one("#too-small").display)
            assert f"{size[0]}x{size[1]}" in texts([app.chat.query_one("#too-small", Static)])[0]
        await pilot.resize_terminal(120, 40)
        await until(lambda: not app.chat.query_one("#too-small").display)
        assert prompt(app).text == "draft"
        assert prompt(app).has_focus
        assert finished(app)


async def test_new_lines_below_while_the_reader_is_elsewhere(running):
    async with running(size=(80, 24)) as (app, pilot, until):
        await typed(pilot, "hello")
        await until(lambda: finished(app))
        await typed(pilot, "slow")
        await until(lambda: app.chat.state.phase is Phase.ANSWERING)
        await pilot.press("pageup")
        chip = app.chat.query_one(NewLines)
        await until(lambda: chip.display)
        place = app.chat.query_one(Transcript).scroll_y
        before = texts([chip])
        await until(lambda: texts([chip]) != before)
        assert app.chat.query_one(Transcript).scroll_y == place
        await pilot.press("ctrl+end")
        await until(lambda: not chip.display)


async def test_old_answers_are_collapsed_and_come_back_when_read(running, monkeypatch):
    monkeypatch.setattr("kvchat.tui.widgets.transcript.LIVE_ANSWERS", 3)
    async with running(size=(80, 24)) as (app, _pilot, until):
        for number in range(1, 9):
            await app.chat.ask("hello")
            await until(lambda number=number: finished(app, number))
        await until(lambda: answers(app)[0].collapsed)
        height = answers(app)[0].size.height
        assert not answers(app)[-1].collapsed
        app.chat.query_one(Transcript).scroll_home(animate=False)
        await until(lambda: not answers(app)[0].collapsed)
        await until(lambda: answers(app)[0].query("MarkdownFence"))
        assert answers(app)[0].size.height == height


async def test_a_bad_user_theme_is_a_toast_and_the_default_stays(running, config, tmp_path):
    (tmp_path / "bad.toml").write_text('primary = "no color"\n')
    async with running(replace(config, theme_dirs=(tmp_path,), theme="bad")) as (app, _pilot, _until):
        assert app.theme == "kvchat-dark"
        messages = " ".join(notice.message for notice in app._notifications)
        assert "bad.toml" in messages
        assert "is no color" in messages


async def test_no_engine_survives_quitting(running):
    async with running() as (app, pilot, until):
        process = app.client._process
        await pilot.press("ctrl+q")
        await until(lambda: app._exit)
    assert process.returncode is not None
