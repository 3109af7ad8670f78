"""Earlier prompts, one JSON string a line, so that multi-line prompts survive."""

from __future__ import annotations

import json
from pathlib import Path

MAX_ENTRIES = 1000
MAX_CHARACTERS = 64 * 1024


class PromptHistory:
    """Walked with ``older`` and ``newer``; the text being written is the newest entry and is never lost."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self.entries = _load(path) if path else []
        self._index = len(self.entries)
        self._draft = ""

    def add(self, text: str) -> None:
        """Remember a sent prompt; a repeat of the last one and what is longer than 64 KiB are not kept.

        Raises:
            OSError: the file cannot be written; the prompt is remembered in memory.
        """
        if len(text) <= MAX_CHARACTERS and self.entries[-1:] != [text]:
            self.entries.append(text)
            self._save(text)
        self._index = len(self.entries)

    def older(self, current: str) -> str | None:
        """The entry before the one shown, None at the oldest."""
        if self._index == 0:
            return None
        if self._index == len(self.entries):
            self._draft = current
        self._index -= 1
        return self.entries[self._index]

    def newer(self) -> str | None:
        """The entry after the one shown, at last the draft; None there."""
        if self._index == len(self.entries):
            return None
        self._index += 1
        return self._draft if self._index == len(self.entries) else self.entries[self._index]

    def _save(self, text: str) -> None:
        if self.path is None:
            return
        self._index = len(self.entries)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8", errors="replace") as file:
            file.write(json.dumps(text, ensure_ascii=False) + "\n")


def _load(path: Path) -> list[str]:
    """The last entries of the file; unreadable lines and files count as none."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()[-MAX_ENTRIES:]
    except OSError:
        return []
    return [entry for entry in map(_entry, lines) if entry]


def _entry(line: str) -> str:
    try:
        entry = json.loads(line)
    except ValueError:
        return ""
    return entry if isinstance(entry, str) else ""
