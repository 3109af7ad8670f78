"""Earlier prompts, one JSON string per line, so that multi-line prompts survive."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

from kvchat import files
from kvchat.conversations.conversation import Message
from kvchat.tui.prompt import mentions
from kvchat.tui.prompt.mentions import Part

MAX_CHARACTERS = 64 * 1024
MAX_BYTES = 2**20
BYTES_PER_TOKEN = 4.0  # of UTF-8 in most scripts, until the conversation gives a better average
ENOUGH = 64  # generated tokens for such an average


class PromptHistory:
    """Earlier prompts, walked with ``older`` and ``newer``; the text being written is the newest entry.

    The file is read when it is first needed. A file larger than ``MAX_BYTES`` is cut to the newest half.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self._steps_back = 0
        self._edited: dict[int, str] = {}  # by the steps back to it; 0 is the draft

    @cached_property
    def entries(self) -> list[str]:
        return _load(self.path, MAX_BYTES) if self.path else []

    def add(self, text: str) -> None:
        """Remember a sent prompt, unless it repeats the last one or is longer than 64 KiB.

        Raises:
            OSError: the file cannot be written; the prompt is remembered in memory.
        """
        self._steps_back = 0
        self._edited.clear()
        if len(text) <= MAX_CHARACTERS and self.entries[-1:] != [text]:
            self.entries.append(text)
            if self.path:
                _save(self.path, text)

    def older(self, current: str) -> str | None:
        """Return the entry before the one shown; None at the oldest."""
        return self._step(1, current)

    def newer(self, current: str) -> str | None:
        """Return the entry after the one shown; the last is the draft, and None follows it."""
        return self._step(-1, current)

    def _step(self, step: int, current: str) -> str | None:
        """Return another entry, as edited since the last prompt was sent; ``current`` is the text being written."""
        back = self._steps_back + step
        if not 0 <= back <= len(self.entries):
            return None
        self._edited[self._steps_back] = current
        self._steps_back = back
        return self._edited.get(back, self.entries[-back])


def _save(path: Path, text: str) -> None:
    files.append(path, _line(text))
    if path.stat().st_size > MAX_BYTES:
        files.write(path, b"".join(map(_line, _load(path, MAX_BYTES // 2))))


def _line(text: str) -> bytes:
    return (json.dumps(text, ensure_ascii=False) + "\n").encode("utf-8", "replace")


def _load(path: Path, size: int) -> list[str]:
    """Return the entries in the file's last ``size`` bytes; unreadable lines and files are ignored."""
    if not path.is_file():
        return []
    try:
        with path.open("rb") as file:
            start = max(file.seek(0, 2) - size, 0)
            file.seek(start)
            lines = file.read().split(b"\n")[:-1]  # not splitlines: JSON does not escape U+2028 and others
    except OSError:
        return []
    return [entry for entry in map(_entry, lines[1:] if start else lines) if entry]


def _entry(line: bytes) -> str:
    try:
        entry = json.loads(line.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return ""
    return entry if isinstance(entry, str) else ""


def bytes_per_token(path: Iterable[Message]) -> float:
    """Return the UTF-8 bytes per token, on average over the answers of a path."""
    answers = [message for message in path if message.stats and message.stats.generated_tokens and message.text]
    tokens = sum(message.stats.generated_tokens for message in answers if message.stats)
    if tokens < ENOUGH:
        return BYTES_PER_TOKEN
    return max(sum(len(message.text.encode("utf-8", "replace")) for message in answers) / tokens, 1.0)


def estimate(parts: Iterable[Part], per_token: float) -> int:
    """Estimate the tokens of a question with the files that it mentions, whose sizes are read from disk."""
    size = 0
    for part in parts:
        size += len(part.text.encode("utf-8", "replace"))
        size += sum(map(_size, mentions.mentioned(part.text))) if part.is_typed else 0
    return round(size / per_token)


def _size(name: str) -> int:
    """Return the bytes of a file, 0 if there is none."""
    path = os.path.expanduser(name)
    return os.path.getsize(path) if os.path.isfile(path) else 0
