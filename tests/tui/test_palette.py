"""The palette's choices; driving it is tested in tests/tui/screens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from support.app_driver import finished, press, toasts, typed
from textual.command import CommandInput, CommandList

from kvchat.tui.actions import ACTIONS
from kvchat.tui.app import REACHED, choices
from kvchat.tui.widgets.ribbon import Ribbon
from kvchat.tui.widgets.transcript import Transcript

THEME = 'name = "[bold]odd[/] name"\nprimary = "#ffffff"\n'


async def test_markup_in_a_name_from_outside_is_text(running, config, tmp_path: Path):
    (tmp_path / "odd.toml").write_text(THEME)
    async with running(replace(config, theme_dirs=(tmp_path,)), ready=False) as (app, _pilot, until):
        assert "[bold]odd[/] name" in app.themes, app._theme_problems
        await until(lambda: app.screen is app.chat)
        press(app, "ctrl+p")
        await until(lambda: prompts(app, "[bold]odd[/] name"))
        app.screen.query_one(CommandInput).value = "odd[/] name"
        await until(lambda: len(prompts(app, "[bold]odd[/] name")) == 1)


def test_all_that_can_be_done_in_the_chat_is_in_the_palette():
    titles = {choice.title for choice in choices(FakeScreen(), {}, ())}
    commands = {action.run for action in ACTIONS if action.command}
    for action in ACTIONS:
        if action.is_bindable and action.scope in REACHED:
            keyed = action.id.replace(".", " ")
            assert action.line in titles if action.command else keyed in titles or action.run in commands
    assert {"branch previous", "page up", "page down", "ribbon first", "message previous"} <= titles


async def test_what_has_only_a_key_acts_from_the_palette(running):
    async with running() as (app, _pilot, until):
        for place in (1, 2):
            typed(app, "hello")
            await until(lambda place=place: finished(app, place))
        acts = {choice.title: choice.callback for choice in choices(app.chat, app.keys, ())}
        transcript = app.chat.query_one(Transcript)
        acts["message previous"]()
        await until(lambda: transcript.has_focus and transcript.chosen == app.controller.state.conversation.leaf.id)
        acts["branch previous"]()
        await until(lambda: "only one branch" in toasts(app))
        acts["ribbon first"]()
        await until(lambda: app.chat.query_one(Ribbon).has_focus)
        await until(lambda: transcript.scroll_y == transcript.max_scroll_y > 0)
        acts["page up"]()
        await until(lambda: transcript.scroll_y < transcript.max_scroll_y)
        acts["/newest"]()
        await until(lambda: transcript.scroll_y == transcript.max_scroll_y)
        acts["replay faster"]()
        await until(lambda: "replay" in toasts(app).lower() or "recording" in toasts(app).lower())


async def test_branches_are_stepped_through_by_command(running):
    async with running() as (app, _pilot, until):
        typed(app, "hello")
        await until(lambda: finished(app))
        press(app, "f5")
        await until(lambda: finished(app, 2))
        conversation = app.controller.state.conversation
        second = conversation.leaf.id
        typed(app, "/branch previous")
        await until(lambda: conversation.leaf.id != second)
        typed(app, "/branch")
        await until(lambda: conversation.leaf.id == second)
        typed(app, "/branch sideways")
        await until(lambda: "next or previous" in toasts(app))


class FakeScreen:
    """A chat of which only the names are asked."""

    begin_command = run_command = run_keyed = run_worker = print


def prompts(app, text: str) -> list[str]:
    """The lines of the open palette that contain the text."""
    listed = app.screen.query(CommandList)
    shown = [str(choice.prompt) for choice in listed.first().options] if listed else []
    return [line for line in shown if text in line]
