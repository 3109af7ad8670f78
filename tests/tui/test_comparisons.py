"""Comparisons and needle searches: commands to the engine, results of its events, and screens."""

import asyncio
import io

import pytest
from rich.console import Console
from support.app_driver import ask, drawn, is_finished, is_open, press, submit
from support.message import lacks
from textual.containers import VerticalScroll
from textual.widgets import Static

from kvchat.config import modes
from kvchat.config.modes import mode_names
from kvchat.conversations.comparison import Comparison
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
from kvchat.tui.comparisons import (
    FOUND,
    MISSED,
    STOPPED,
    WAITING,
    completed,
    needle_rows,
    parse_variants,
    verdict,
)
from kvchat.tui.screens.compare import (
    MARK,
    CompareScreen,
    NeedleScreen,
    answer_text,
    figures_table,
    needle_table,
)
from kvchat.tui.screens.settings import SettingsScreen
from kvchat.tui.state import Phase, RunningComparison

SNAPSHOT = Snapshot("streaming", {}, 1.0, 2, 3, 4, 5)


@pytest.fixture
async def talk(chat):
    """Two answered questions."""
    await chat.load()
    chat.controller.set_system("be brief")
    for question, answer in (("one", "1"), ("two", "2")):
        await chat.ask(question)
        await chat.controller.handle(Finished("eos", answer, Stats(generated_tokens=1)))
    return chat


async def test_restarting_the_engine_ends_the_comparison(talk):
    talk.controller.comparisons.begin([])
    shown = talk.view.comparisons[-1]
    await talk.controller.restart()
    assert shown.is_over
    assert shown.error
    assert talk.view.comparisons[-1] is shown


async def test_the_last_question_is_compared_with_a_fixed_seed(talk):
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


async def test_the_selected_question_is_compared(talk):
    talk.view.chosen = talk.controller.state.conversation.path[1].id
    talk.controller.comparisons.begin([])
    assert talk.client.sent[-1].turns[-1] == Turn("user", "one")


async def test_a_comparison_shows_progress_without_changing_the_chat(talk):
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


async def test_questions_during_a_comparison_are_queued(talk):
    talk.controller.comparisons.begin([])
    await talk.ask("three")
    await talk.controller.handle(Compared(()))
    assert talk.client.sent[-1].turns[-1] == Turn("user", "three")


@pytest.mark.parametrize("end", [Failed("Memory is short."), Crashed(-9, ())])
async def test_a_failure_ends_the_comparison_with_an_error(talk, end):
    talk.controller.comparisons.begin([])
    await talk.controller.handle(end)
    running = talk.view.comparisons[-1]
    assert running.is_over
    assert running.error
    assert talk.controller.comparisons.running is None
    assert talk.view.errors


async def test_every_mode_is_asked_for_the_hidden_needle(talk):
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


async def test_a_stopped_needle_search_asks_no_mode(talk):
    talk.controller.comparisons.search_needle(2000)
    talk.controller.comparisons.stop()
    await talk.controller.handle(NeedleHidden((Turn("user", "What?"),), "12345", 24))
    assert talk.client.sent[-1] == Stop()
    assert talk.view.comparisons[-1].is_over
    assert talk.phase is Phase.READY


# ---- Variants as they are written and completed


def test_variants_are_parsed_with_their_parameters():
    assert parse_variants([]) == []
    parsed = parse_variants(["streaming", "budget=256", "R=8", "speculative", "first_full=no", "full"])
    assert parsed == [
        Variant("streaming", {"budget": 256, "R": 8}),
        Variant("speculative", {"first_full": False}),
        Variant("full"),
    ]
    assert [one.mode for one in parse_variants(["spec", "budget=256", "ful"])] == ["speculative", "full"]


@pytest.mark.parametrize("line", ["budget=256", "full " * (MAX_VARIANTS + 1)])
def test_invalid_variants_are_rejected(line):
    with pytest.raises(UsageError):
        parse_variants(line.split())


def test_variants_are_completed_to_two_different_ones():
    full, speculative, sync = Variant("full"), Variant("speculative"), Variant("sync")
    assert completed([], "full") == (full, speculative)
    assert completed([], "sync") == (full, sync)
    assert completed([sync], "full") == (full, sync)
    assert completed([full], "sync") == (full, sync)
    assert completed([sync, speculative], "full") == (sync, speculative)
    for wrong in ([sync, sync], [Variant("frezee")], [sync, Variant("full", {"budget": 99})]):
        with pytest.raises(UsageError):
            completed(wrong, "full")


# ---- A running comparison: its stage and its end


def test_the_stage_follows_the_engine_until_the_result():
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


# ---- The comparison screen with the fake engine


def shown(app, selector: str) -> str:
    return "\n".join(str(static.content) for static in app.screen.query(selector).results(Static))


@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
async def test_f8_shows_both_answers_and_w_saves_them(running, size, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("words")
    async with running(size=size) as (app, _pilot, until):
        await ask(app, "What is in @a.txt?")
        press(app, "f8")
        await until(lambda: is_open(app, CompareScreen) and "differs from token 3" in shown(app, "#verdict"))
        assert shown(app, "#question") == "[a.txt · 6 B]\nWhat is in a.txt?"
        expected = f"All said {MARK}by full here.\nAll said {MARK}by speculative here."
        await until(lambda: shown(app, "#answers Static") == expected)
        one, other = app.screen.query("#answers VerticalScroll").results(VerticalScroll)
        await until(lambda: min(one.region.height, other.region.height) > 3)
        adjacent = size[0] >= 100  # if there is room
        await until(lambda: (one.region.y == other.region.y, one.region.x != other.region.x) == (adjacent, adjacent))
        press(app, "w")
        await until(lambda: len(list(tmp_path.glob("comparison-*"))) == 2)
        press(app, "escape")
        await until(lambda: app.screen is app.chat)
        assert app.controller.state.phase is Phase.READY


@pytest.mark.parametrize("size", [(40, 12), (80, 24), (120, 40)])
async def test_keys_reach_all_answers_and_the_verdict(running, size):
    async with running(size=size) as (app, _pilot, until):
        await ask(app, "What is said?")
        submit(app, "/compare full freeze streaming sync speculative")
        await until(lambda: is_open(app, CompareScreen) and app.screen.shown.is_over)
        for column in app.screen.query("#answers VerticalScroll").results(VerticalScroll):
            press(app, "tab")
            await until(lambda column=column: column.has_focus and "All said" in text_of(app, column))
        press(app, "tab")
        await until(lambda: ends_with_verdict(app))


@pytest.mark.parametrize("size", [(40, 12), (80, 24)])
async def test_keys_reach_the_verdict_of_a_needle(running, size):
    async with running(size=size) as (app, _pilot, until):
        submit(app, "/needle 512")
        await until(lambda: is_open(app, NeedleScreen) and app.screen.shown.is_over)
        await until(lambda: ends_with_verdict(app))


def ends_with_verdict(app) -> bool:
    """Press End, again while the text still grows, until the verdict's last word is on the screen."""
    press(app, "end")
    words = shown(app, "#verdict").split()
    return bool(words) and words[-1] in text_of(app, app.screen.query_one("#verdict"))


def text_of(app, widget) -> str:
    """The text of the part of ``widget`` that is on the screen."""
    region = app.screen.find_widget(widget).visible_region
    lines = drawn(app).split("\n")[region.y : region.bottom]
    return "\n".join(line[region.x : region.right] for line in lines)


async def test_progress_during_composition_is_drawn(running):
    async with running() as (app, _pilot, until):
        variants = tuple(map(Variant, ("full", "sync")))
        shown_now = RunningComparison("What?", "bundled", variants, Sampling())
        screen = CompareScreen(app.controller.comparisons, shown_now)
        app.push_screen(screen)
        while not screen.is_mounted:
            screen.show()
            await asyncio.sleep(0)
        shown_now.note(Comparing(1, "so far", 1))
        screen.show()
        await until(lambda: "so far" in shown(app, "#answers Static"))


async def test_esc_stops_and_then_closes(running):
    async with running() as (app, _pilot, until):
        submit(app, "hold")
        await until(lambda: app.controller.state.phase is Phase.ANSWERING)
        press(app, "escape")
        await until(lambda: is_finished(app))
        submit(app, "/compare sync full")
        await until(lambda: is_open(app, CompareScreen) and "full answers" in shown(app, "#verdict"))
        press(app, "escape")
        await until(lambda: app.controller.state.phase is Phase.READY)
        assert isinstance(app.screen, CompareScreen)
        press(app, "escape")
        await until(lambda: app.screen is app.chat)


def test_markup_and_control_characters_are_text():
    run = Run("full", {}, ("[b]", "\x1b[0m", "end"))
    assert answer_text(run, 1).plain == f"[b]{MARK}␛[0mend"
    assert answer_text(run, None).plain == "[b]␛[0mend"
    assert answer_text(Run("sync", {}, refusal="It does [not] fit."), 0).plain == "It does [not] fit."


# ---- The needle table, with the fake engine and alone


async def test_every_mode_has_a_row_and_esc_closes(running):
    async with running(size=(50, 20)) as (app, _pilot, until):
        submit(app, "/needle 512")
        await until(lambda: isinstance(app.screen, NeedleScreen) and "found it" in shown(app, "#verdict"))
        assert not lacks(shown(app, "#verdict"), "full found", "50 %", "streaming, sync, speculative did not")
        assert "BY F" in shown(app, "#question")
        await until(lambda: all(f"{mode} " in drawn(app) for mode in modes.mode_names()) and "50 %" in drawn(app))
        assert not app.controller.state.conversation.messages
        press(app, "escape")
        await until(lambda: app.screen is app.chat)


async def test_the_needle_screen_opens_between_other_screens(running):
    async with running() as (app, _pilot, until):
        await ask(app, "hello")
        press(app, "f8")
        await until(lambda: is_open(app, CompareScreen) and app.screen.shown.is_over)
        await app.chat.run_command("/needle 512")
        app.action_settings()
        needle = app.controller.comparisons.running
        await until(lambda: is_open(app, SettingsScreen) and needle.is_over)
        assert [type(screen) for screen in app.screen_stack[-3:]] == [CompareScreen, NeedleScreen, SettingsScreen]


def needle_search(answers: dict[str, str]) -> RunningComparison:
    """A finished needle search for Biscuit, with these answers by mode."""
    variants = tuple(map(Variant, answers))
    shown = RunningComparison("What is my cat called?", "m", variants, Sampling(), fact="Biscuit")
    stats = Stats(read_share=0.25, recalled_bytes=2**20, decode_tokens_per_s=41.5)
    shown.finish(Compared(tuple(Run(mode, {}, (answer,), "eos", stats) for mode, answer in answers.items()), 2000))
    return shown


@pytest.mark.parametrize("room", [30, 50, 74, 86])
def test_long_answers_do_not_squeeze_the_figures(room):
    console = Console(width=room, file=io.StringIO())
    console.print(
        needle_table(needle_search(dict.fromkeys(modes.mode_names(), "It is Biscuit. " * 40)), "green", "red", room)
    )
    table = console.file.getvalue()
    assert all(f"{mode} " in table for mode in modes.mode_names())
    assert table.count("✓ found") == 5
    assert table.count("25 %") == 5
    assert table.count("41.5") == (5 if room >= 74 else 0)


@pytest.mark.parametrize("room", [34, 54, 74])
def test_a_narrow_comparison_cuts_the_label_and_no_figure(room):
    variants = tuple(Variant(mode, {"budget": 128}) for mode in modes.mode_names())
    stats = Stats(read_share=1.0, recalled_bytes=2**20, decode_tokens_per_s=41.5)
    runs = tuple(Run(one.mode, one.params, ("It",), "eos", stats) for one in variants)
    console = Console(width=room, file=io.StringIO())
    console.print(figures_table(Comparison("What?", "m", Sampling(), 2000, variants, runs), room))
    lines = console.file.getvalue().splitlines()
    assert len(lines) == 1 + len(variants)
    assert all(line.split("41.5")[1].split("1.0 MiB")[0].strip() == "100 %" for line in lines[1:])
    assert lines[0].count("…") == 0


def test_a_miss_in_full_mode_is_explained():
    missed = verdict(needle_search({"full": "I do not know.", "sync": "biscuit"}))
    assert missed.startswith("full ")
    assert missed.count(".") == 1
    assert not lacks(verdict(needle_search({"full": "biscuit", "sync": "No."})), "full found", "25 %", "sliding window")


# ---- Rows of a needle search: waiting, found, missed, refused


MODES = ("full", "streaming", "sync", "freeze")


def test_rows_fill_while_the_modes_answer():
    shown = RunningComparison("What?", "bundled", tuple(map(Variant, MODES)), Sampling(), fact="123")
    shown.note(Comparing(1, "It is\n123", 4))
    assert needle_rows(shown) == [
        ("full", "", WAITING, "", "", ""),
        ("streaming", "It is 123", WAITING, "", "", ""),
        ("sync", "", WAITING, "", "", ""),
        ("freeze", "", WAITING, "", "", ""),
    ]
    runs = (
        Run("full", {}, ("It is ", "123."), stats=Stats(read_share=1.0, decode_tokens_per_s=20.0)),
        Run("streaming", {}, ("It is \x1b7.",), stats=Stats(read_share=0.25)),
        Run("sync", {}, refusal="It does not fit."),
        Run("freeze", {}, ("It",), "stopped", Stats(read_share=0.5)),
    )
    shown.finish(Compared(runs, 900))
    assert needle_rows(shown) == [
        ("full", "It is 123.", FOUND, "100 %", "0 B", "20.0"),
        ("streaming", "It is ␛7.", MISSED, "25 %", "0 B", "n/a"),
        ("sync", "It does not fit.", "refused", "", "", ""),
        ("freeze", "It", STOPPED, "50 %", "0 B", "n/a"),
    ]
    assert not lacks(verdict(shown), "full found", "100 %", "streaming did not")
    assert "sliding window" not in verdict(shown)
