"""The command palette: every command, every mode and every theme."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from textual.command import DiscoveryHit, Hit, Hits, Provider

from kvchat.config.modes import mode_names, registered
from kvchat.tui.commands import TABLE

if TYPE_CHECKING:
    from kvchat.tui.screens.chat import ChatScreen


class Choice(NamedTuple):
    """One line of the palette."""

    title: str
    doc: str
    run: Callable[[], object]


class Commands(Provider):
    """Commands that need an argument are typed into the prompt; the others run at once."""

    async def discover(self) -> Hits:
        """All, before anything is typed."""
        for choice in self._choices():
            yield DiscoveryHit(choice.title, choice.run, help=choice.doc)

    async def search(self, query: str) -> Hits:
        """Those that match, in title or description."""
        matcher = self.matcher(query)
        for choice in self._choices():
            score = max(matcher.match(choice.title), matcher.match(choice.doc) * 0.5)
            if score > 0:
                yield Hit(score, matcher.highlight(choice.title), choice.run, help=choice.doc)

    def _choices(self) -> Iterator[Choice]:
        screen: ChatScreen = self.app.chat  # type: ignore[attr-defined]
        for entry in TABLE.values():
            doc = f"{entry.doc}  {entry.key}".rstrip()
            run = (
                partial(screen.begin_command, f"/{entry.name} ") if entry.usage else partial(screen.command, entry.line)
            )
            yield Choice(entry.line, doc, run)
        for name in mode_names():
            yield Choice(f"mode {name}", registered()[name].title, partial(screen.command, f"/mode {name}"))
        for name in screen.kvchat.themes:
            yield Choice(f"theme {name}", "colors", partial(screen.command, f"/theme {name}"))
