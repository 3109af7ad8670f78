"""A block of code in an answer."""

from __future__ import annotations

from threading import Lock

from textual.content import Content
from textual.widgets._markdown import MarkdownFence

WITH_LARGE_TABLES = ("python", "javascript")  # of the letters of names: 30 ms and more each, once
_HIGHLIGHTING = Lock()  # Pygments prepares a language at its first use, and not for two threads at once


class CodeBlock(MarkdownFence):
    """Textual's own guesses a language that is not named: it imports all 250 that there are, which takes 0.2 s."""

    @classmethod
    def highlight(cls, code: str, language: str, ansi: bool = False, dark: bool = False) -> Content:
        with _HIGHLIGHTING:
            return super().highlight(code, language or "text", ansi, dark)


def prepare_languages() -> None:
    """Prepare those that take long, for which the first block of code would have to wait."""
    for language in WITH_LARGE_TABLES:
        CodeBlock.highlight("x", language)
