"""The palette's choices; driving it is tested in tests/tui/screens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from support.app_driver import press
from textual.command import CommandInput, CommandList

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


def prompts(app, text: str) -> list[str]:
    """The lines of the open palette that contain the text."""
    listed = app.screen.query(CommandList)
    shown = [str(choice.prompt) for choice in listed.first().options] if listed else []
    return [line for line in shown if text in line]
