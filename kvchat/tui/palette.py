"""The command palette: every command, what else a key of the chat does, every mode and every theme."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol, cast

from textual.command import DiscoveryHit, Hit, Hits, Provider
from textual.markup import escape

from kvchat.config.modes import mode_names, registered
from kvchat.tui.actions import COMMANDS, KEYED
from kvchat.tui.rebinding import describe_keys

REACHED = ("chat", "prompt", "transcript", "ribbon", "panels")  # keys of other screens act there alone


class PaletteScreen(Protocol):
    """The part of the chat screen that the palette uses."""

    def begin_command(self, line: str) -> None:
        """Type the beginning of a command into the prompt."""

    async def run_command(self, line: str) -> None:
        """Run a slash command."""

    async def run_keyed(self, id: str) -> None:
        """Run an action that has no command."""

    def run_worker(self, work: Callable[[], Coroutine[Any, Any, None]]) -> object:
        """Run a coroutine function in the background."""


class PaletteApp(Protocol):
    """The part of the application that the palette uses."""

    chat: PaletteScreen
    keys: Mapping[str, str]
    themes: Iterable[str]


class Choice(NamedTuple):
    """One line of the palette."""

    title: str
    doc: str
    run: Callable[[], object]


class CommandProvider(Provider):
    """Commands that need an argument are typed into the prompt; the others run at once.

    Textual reads titles and descriptions as markup; those of themes and of other packages' modes are escaped.
    """

    async def discover(self) -> Hits:
        """List all choices, before anything is typed."""
        for choice in self._choices():
            yield DiscoveryHit(escape(choice.title), choice.run, choice.title, escape(choice.doc))

    async def search(self, query: str) -> Hits:
        """Find the choices whose title or description matches."""
        matcher = self.matcher(query)
        for choice in self._choices():
            score = max(matcher.match(choice.title), matcher.match(choice.doc) * 0.5)
            if score > 0:
                title = matcher.highlight(escape(choice.title))
                yield Hit(score, title, choice.run, choice.title, escape(choice.doc))

    def _choices(self) -> Iterator[Choice]:
        app = cast("PaletteApp", self.app)
        return choices(app.chat, app.keys, app.themes)


def choices(chat: PaletteScreen, keys: Mapping[str, str], themes: Iterable[str]) -> Iterator[Choice]:
    """All lines of the palette, with the keys in force."""

    def run(line: str) -> None:
        chat.run_worker(partial(chat.run_command, line))

    for action in COMMANDS.values():
        doc = f"{action.doc}  {describe_keys(action, keys)}".rstrip()
        start = partial(chat.begin_command, f"/{action.command} ") if action.usage else partial(run, action.line)
        yield Choice(action.line, doc, start)
    commands = [action.run for action in COMMANDS.values() if action.run]
    for action in KEYED:
        if action.scope in REACHED and action.run not in commands:
            doc = f"{action.doc}  {describe_keys(action, keys)}"
            yield Choice(action.id.replace(".", " "), doc, partial(chat.run_worker, partial(chat.run_keyed, action.id)))
    for name in mode_names():
        yield Choice(f"mode {name}", registered()[name].title, partial(run, f"/mode {name}"))
    for name in themes:
        yield Choice(f"theme {name}", "colors", partial(run, f"/theme {name}"))
