"""Badges: warnings about how the engine runs, such as host memory that could not be pinned."""

from __future__ import annotations

from collections.abc import Sequence

from textual.content import Content
from textual.reactive import reactive
from textual.widgets import Static

GLYPH = "⚠"
STYLE = "bold $warning"


def short(badges: Sequence[str], room: int) -> Content:
    """Return the badges without their reasons, or only their number where ``room`` cells are too few."""
    words = f" {GLYPH} {' · '.join(badge.partition(':')[0] for badge in badges)} "
    if len(words) > room:
        words = f" {GLYPH} {len(badges)} "
    return Content.assemble((words, STYLE)) if badges else Content("")


class Badges(Static):
    """All badges with their reasons, a paragraph each; hidden while there are none."""

    DEFAULT_CSS = "Badges { display: none; height: auto; padding: 0 1; }"

    badges: reactive[tuple[str, ...]] = reactive(())

    def watch_badges(self, badges: tuple[str, ...]) -> None:
        """Show the badges."""
        self.display = bool(badges)
        self.update(Content("\n").join(Content.assemble((f"{GLYPH} {badge}", STYLE)) for badge in badges))
