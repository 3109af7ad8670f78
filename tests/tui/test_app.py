"""The application: settings, keys, themes, and an engine that loads, crashes and ends."""

import os
import subprocess
import sys
import threading
from dataclasses import replace
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
from support.app_driver import ask, drawn, is_finished, is_open, press, prompt, submit, toasts, wait_for
from support.hostile import MARKUP, forbidden_in, hostile
from support.message import lacks
from support.patience import PATIENCE_S
from textual import events
from textual.app import App
from textual.command import CommandInput, CommandList
from textual.widget import Widget
from textual.widgets import OptionList, Static
from textual.widgets._markdown import MarkdownTableCellContents
from textual.widgets._toast import Toast

from kvchat.foreign_text import visible
from kvchat.tui import terminal
from kvchat.tui.app import KvchatApp
from kvchat.tui.screens import chat
from kvchat.tui.screens.base import Palette
from kvchat.tui.screens.help import HelpScreen
from kvchat.tui.screens.settings import SettingsScreen
from kvchat.tui.state import Phase
from kvchat.tui.terminal import REMOTE, TERMINALS_TAKE, copy_to_system, describe, has_system
from kvchat.tui.widgets.bars import KeyHints, ModeBar, StatusBar
from kvchat.tui.widgets.messages import Problem
from kvchat.tui.widgets.transcript import Transcript

SCRIPT = """
import gc, math
from unittest.mock import Mock
from kvchat.process import postpone_full_collections
from kvchat.tui import app
from textual import constants
postpone_full_collections()
app.KvchatApp = Mock()
app.run(None)
print(constants.MAX_FPS, math.prod(gc.get_threshold()))
"""


@pytest.mark.parametrize(("chosen", "frames"), [({}, 120), ({"TEXTUAL_FPS": "30"}, 30)])
def test_frame_rate_and_garbage_collection_keep_keys_responsive(chosen, frames):
    """An answer creates about 75,000 objects a second, and collecting each takes some microseconds."""
    environment = {name: value for name, value in os.environ.items() if name != "TEXTUAL_FPS"} | chosen
    command = [sys.executable, "-c", SCRIPT]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120)
    shown, collected_after = map(int, result.stdout.split())
    assert shown == frames
    assert collected_after <= 10 * 75_000


async def test_ctrl_c_stops_then_quits_and_ends_the_engine(running, monkeypatch):
    monkeypatch.setattr(chat, "QUIT_WINDOW_S", PATIENCE_S)
    async with running() as (app, _pilot, until):
        process = app.client._process
        submit(app, "hold")
        await until(lambda: app.controller.state.phase is Phase.ANSWERING)
        press(app, "ctrl+c")
        await until(lambda: is_finished(app))
        press(app, "ctrl+c")
        await until(lambda: app._notifications)
        assert app.is_running
        press(app, "ctrl+c")
        await until(lambda: app._exit)
    assert process.returncode is not None


async def test_handlers_tolerate_missing_widgets_on_exit(running):
    async with running() as (app, _pilot, until):

        async def use_a_removed_widget():
            app.exit()
            await app.chat.query_one(ModeBar).remove()
            app.chat.show_state(app.controller.state)

        app.chat.run_worker(use_a_removed_widget)
        await until(lambda: app._exit)
    assert app.return_code == 0


async def test_mouse_events_on_a_removed_widget_do_not_crash(running):
    async with running() as (app, _pilot, until):
        submit(app, "hello")
        await until(lambda: is_finished(app) and len(shown(app, MarkdownTableCellContents)) > 1)
        before, *_, cell = shown(app, MarkdownTableCellContents)
        await app.on_event(events.MouseDown(None, *before.region.offset, 0, 1, 1, False, False, False))
        x, y = cell.region.offset
        with app.batch_update():  # a removed widget stays on the screen until the next layout
            await cell.remove()
            assert app.get_widget_at(x, y)[0] is cell
            for kind in (events.MouseMove, events.MouseScrollDown, events.MouseUp, events.MouseDown):
                await app.on_event(kind(None, x, y, 0, 1, 1, False, False, False))
        await until(lambda: cell not in shown(app, MarkdownTableCellContents))


def shown(app, kind: type[Widget]) -> list[Widget]:
    """The widgets of a kind on the screen since the last layout, from top to bottom."""
    return [widget for widget in app.chat._compositor.visible_widgets if isinstance(widget, kind)]


def listed(app) -> list[str]:
    """The titles in the open palette."""
    lines = app.screen.query(CommandList)
    return [str(choice.prompt).split("  ")[0] for choice in lines.first().options] if lines else []


async def test_only_one_palette_is_open_at_a_time(running):
    async with running() as (app, _pilot, until):
        await until(lambda: "F6 mode" in app.chat.query_one(KeyHints).render().plain)
        assert "F10" not in app.chat.query_one(KeyHints).render().plain, "no keys of a replay"
        assert "recording" not in app.chat.query_one(ModeBar).render().plain
        press(app, "f1")
        await until(lambda: is_open(app, HelpScreen))
        press(app, "escape")
        await until(lambda: app.screen is app.chat)
        press(app, "ctrl+p")
        await until(lambda: app.screen is not app.chat)
        await until(lambda: app.screen.query(CommandInput))
        app.screen.query_one(CommandInput).value = "mode streaming"
        await until(lambda: listed(app)[:1] == ["mode streaming"])
        press(app, "enter")
        await until(lambda: app.controller.state.mode == "streaming" and app.screen is app.chat)
        app.action_command_palette()
        await until(lambda: is_open(app, Palette))
        closing = app.screen
        closing.dismiss()
        app.action_command_palette()  # while the other is still closing
        assert closing.is_attached
        await until(lambda: is_open(app, Palette) and not closing.is_attached)
        app.action_settings()
        await until(lambda: isinstance(app.screen, SettingsScreen))
        app.action_command_palette()
        assert [type(screen) for screen in app.screen_stack[-2:]] == [Palette, SettingsScreen]


async def test_loading_stages_are_visible(running, monkeypatch):
    monkeypatch.setenv("FAKE_LOAD", "wait")
    async with running(ready=False) as (app, _pilot, until):
        await until(lambda: "Reading the weights" in app.chat.query_one(StatusBar).render().plain)


async def test_clicking_a_suggestion_after_out_of_memory_runs_it(running):
    async with running(size=(100, 30)) as (app, pilot, until):
        submit(app, "oom")
        await until(lambda: app.chat.query(Problem))
        await pilot.pause()
        offered = app.chat.query_one(Problem)
        await until(lambda: drawn(offered))
        assert "→ /unload " in str(offered.render())
        line = next(y for y in range(offered.size.height) if "/unload" in offered.render_line(y).text)
        await pilot.click(offered, offset=(offered.render_line(line).text.index("/unload") + 3, line))
        await until(lambda: app.controller.state.phase is Phase.DOWN)
        assert app.client.pid is None
        prompt(app).load_text("")
        await ask(app, "hello")


async def test_control_characters_and_markup_are_shown_as_text(running, config):
    problem = hostile("settings")
    async with running(replace(config, problems=(problem,), keys={problem: "f9"})) as (app, _pilot, until):
        # This widget draws its text unchanged; the gutter covers the first column.
        await app.chat.query_one(Transcript).add(Static(f" {MARKUP}{hostile('raw')}", markup=False))
        await until(lambda: f"{MARKUP}«raw»" in drawn(app))
        assert not forbidden_in(drawn(app).encode())
        app.chat.toast(problem, title=problem)
        await until(lambda: len(app._notifications) == 3)
        shown = [f"{toast.title}\n{toast.message}" for toast in app._notifications]
        assert all(visible(problem) in text for text in shown)
        assert not forbidden_in("".join(shown).encode())
        assert not any(toast.markup for toast in app._notifications)


# ---- The clipboard: the system's if it is local, and a truthful message in any case


@pytest.fixture
def pyperclip(monkeypatch):
    """A fake pyperclip; the list holds the copied texts, and an exception put into it is raised."""
    module, copied = ModuleType("pyperclip"), []

    def copy(text):
        if copied and isinstance(copied[-1], Exception):
            raise copied[-1]
        copied.append(text)

    module.copy, module.__spec__ = copy, ModuleSpec("pyperclip", None)
    monkeypatch.setitem(sys.modules, "pyperclip", module)
    for name in REMOTE:
        monkeypatch.delenv(name, raising=False)
    return copied


async def test_the_system_clipboard_is_used_locally(pyperclip, monkeypatch):
    assert has_system({})
    assert not has_system({"SSH_CONNECTION": "10.0.0.1 5 10.0.0.2 22"})
    assert await copy_to_system("hé") == ""
    assert pyperclip == ["hé"]
    pyperclip.append(RuntimeError("\nNo program.\nInstall one."))
    assert await copy_to_system("x") == "No program"
    monkeypatch.setattr(terminal, "find_spec", lambda name: None)
    assert not has_system({}), "without the library only the terminal's clipboard is left"


async def test_an_unresponsive_clipboard_times_out(pyperclip, monkeypatch):
    may_end = threading.Event()
    monkeypatch.setattr(sys.modules["pyperclip"], "copy", lambda text: may_end.wait(60))
    assert await copy_to_system("x", patience_s=0.01)
    may_end.set()


def test_copy_messages_say_what_happened():
    assert "3 characters" in describe("abc", "")
    assert not lacks(describe("abc", None), "3 characters", "OSC 52")
    assert "/copy FILE" in describe("é" * TERMINALS_TAKE, None)
    refused = describe("abc", "no \x1b[c program")
    assert not lacks(refused, "no ␛[c program", "3 characters", "/copy FILE")


@pytest.mark.parametrize("total", [4, 10])
async def test_toasts_fit_on_a_small_terminal(total):
    class Bare(App[None]):
        CSS = KvchatApp.CSS
        on_notify = KvchatApp.on_notify

    app = Bare()
    async with app.run_test(size=(80, 24), notifications=True):
        for number in range(total):
            app.notify(f"{number} " + "word " * 30, title="Settings", timeout=PATIENCE_S)
        shown = lambda: [toast for toast in app.screen.query(Toast) if toast.region]  # noqa: E731
        await wait_for(lambda: shown() and shown()[-1]._notification.message.startswith(f"{total - 1} "))
        await wait_for(lambda: len(shown()) == 4)
        assert all(toast.region.bottom <= 24 for toast in shown())


async def test_a_refused_copy_is_reported_and_a_file_works(running, pyperclip, tmp_path):
    async with running() as (app, _pilot, until):
        await ask(app, "hello")
        submit(app, "/copy")
        await until(lambda: "Copied" in toasts(app))
        assert pyperclip == [app.clipboard]
        pyperclip.append(RuntimeError("no program"))
        submit(app, "/code")
        await until(lambda: "refused: no program" in toasts(app))
        assert app.clipboard.startswith("def interest")
        submit(app, f"/code {tmp_path / 'interest.py'}")
        await until(lambda: (tmp_path / "interest.py").exists())
        assert (tmp_path / "interest.py").read_text() == app.clipboard


# ---- Selection lists


async def test_lists_survive_a_one_column_terminal(running):
    async with running() as (app, pilot, until):
        for key in ("f9", "/"):  # in a dialog and in the chat
            press(app, key)
            await until(lambda: any(shown.display for shown in app.screen.query(OptionList)))
            for width in (5, 1):
                await pilot.resize_terminal(width, 24)
                await pilot.pause()
            assert app._exception is None
            await pilot.resize_terminal(80, 24)
            if app.screen is not app.chat:
                app.screen.dismiss()
            await until(lambda: app.screen is app.chat)
            prompt(app).load_text("")
        await ask(app, "hello")
