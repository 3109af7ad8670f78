"""Keys that arrive together act as if each had arrived alone, wherever the focus moves."""

import asyncio

from support.app_driver import choices, is_finished, is_open, press, prompt
from textual import events
from textual.screen import ModalScreen
from textual.widgets import Input

from kvchat.tui import app as app_module
from kvchat.tui.app import KvchatApp
from kvchat.tui.archive import Archive
from kvchat.tui.screens.base import Palette
from kvchat.tui.screens.choosing import ConversationsScreen
from kvchat.tui.screens.settings import SettingsScreen

TYPED = {
    "t e h backspace backspace h e": "the",
    "h e l l o left left X": "helXlo",
    "a b ctrl+u c": "c",
    "o n e ctrl+j t w o home T": "one\nTtwo",
}
SCREENS = ("f1", "f9", "shift+f7", "ctrl+p")


async def test_keys_and_pastes_keep_their_order_whatever_has_focus(running):
    async with running() as (app, _pilot, until):
        for keys, text in TYPED.items():
            press(app, *keys.split())
            await until(lambda text=text: prompt(app).text == text)
            prompt(app).load_text("")
        press(app, "f9", "a")
        app.post_message(events.Paste("pasted"))
        press(app, "backspace", "z")
        await until(lambda: is_open(app, ConversationsScreen) and app.screen.query_one(Input).value == "apastez")
        app.post_message(events.MouseDown(None, 5, 300, 0, 0, 1, False, False, False, 5, 300))  # beyond the edge
        await until(lambda: app.screen.focused is None)
        press(app, "x")
        await until(lambda: "x" in app.screen.query_one(Input).value)
        press(app, "escape")
        await until(lambda: not isinstance(app.screen, ConversationsScreen))
        app.post_message(events.AppBlur())  # another window has the focus
        await until(lambda: not app.app_focus)
        app.push_screen(ConversationsScreen(app.controller, ""))
        await until(lambda: isinstance(app.screen, ConversationsScreen) and app.screen.query(Input))
        press(app, "x")
        await until(lambda: app.screen.query_one(Input).value == "x")
        press(app, "escape")
        await until(lambda: not isinstance(app.screen, ConversationsScreen))


async def test_text_after_escape_reaches_the_prompt(running):
    async with running() as (app, _pilot, until):
        for key in SCREENS:
            press(app, key, *"cat", "escape", *"dog")
            await until(lambda: app.screen is app.chat and prompt(app).text == "dog")
            prompt(app).load_text("")
            press(app, key)
            await until(lambda: isinstance(app.screen, ModalScreen))
            press(app, "escape", *"hello")
            await until(lambda: app.screen is app.chat and prompt(app).text == "hello")
            prompt(app).load_text("")
        press(app, *"hello", "enter")
        await until(lambda: is_finished(app))
        assert app.controller.state.conversation.turns[0].content == "hello"


async def test_a_key_waits_until_the_previous_one_is_handled(running, monkeypatch):
    done, handle = app_module._done, KvchatApp.on_event

    async def done_slowly(pump, work=None):
        await done(pump, work)
        if not isinstance(pump, KvchatApp):
            await asyncio.sleep(0.01)

    async def handle_slowly(app, event):
        if isinstance(event, events.Key) and event.is_forwarded:
            await asyncio.sleep(0.1)
        await handle(app, event)

    monkeypatch.setattr(app_module, "_done", done_slowly)
    monkeypatch.setattr(KvchatApp, "on_event", handle_slowly)
    async with running() as (app, _pilot, until):
        press(app, "f2", *"temperature", "enter", *"0.25", "enter", "escape", *"hello")
        await until(lambda: app.screen is app.chat and prompt(app).text == "hello")
        assert app.controller.state.sampling.temperature == 0.25


async def test_a_question_waits_for_the_palette_command_before_it(running, monkeypatch):
    save = Archive.save

    async def save_slowly(archive, conversation):
        await asyncio.sleep(0.3)
        await save(archive, conversation)

    monkeypatch.setattr(Archive, "save", save_slowly)
    async with running() as (app, _pilot, until):
        press(app, *"first", "enter")
        await until(lambda: is_finished(app))
        first = app.controller.state.conversation
        press(app, "ctrl+p", *"new")
        await until(lambda: is_open(app, Palette) and "/new" in "".join(choices(app)[:1]))
        press(app, "enter", *"second", "enter")
        await until(lambda: app.controller.state.conversation is not first)
        assert len(first.turns) == 2
        await until(lambda: is_finished(app))


async def test_ctrl_d_deletes_text_or_resets_a_setting(running):
    async with running() as (app, _pilot, until):
        press(app, "f2", *"temperature", "enter", *["backspace"] * 9, *"0.25", "home", "ctrl+d", "ctrl+d", "0", ".")
        press(app, "enter")
        await until(lambda: app.controller.state.sampling.temperature == 0.25)
        press(app, "ctrl+d")
        await until(lambda: is_open(app, SettingsScreen) and app.controller.state.sampling.temperature != 0.25)


async def test_a_slow_action_does_not_block_later_keys(running, monkeypatch):
    monkeypatch.setattr(app_module, "LONGEST_S", 0.01)
    async with running() as (app, _pilot, until):
        release = asyncio.Event()
        app.chat.call_later(release.wait)
        press(app, "f6", *"hello")
        await until(lambda: prompt(app).text == "hello")
        release.set()
        await until(lambda: app.controller.state.mode == "freeze")
