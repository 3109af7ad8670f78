"""The question of a command: its argument, the files before it and what was piped in."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from kvchat import text_file
from kvchat.conversations import attachments
from kvchat.errors import UsageError
from kvchat.protocol.messages import Turn


def turns(prompt: str | None, files: Sequence[Path], system: str | None) -> tuple[Turn, ...]:
    """What a command asks: the system prompt, if there is one, and the question with what was piped in.

    Raises:
        UsageError: as ``compose``.
    """
    asked = Turn("user", compose(prompt, files, piped()))
    return (Turn("system", system), asked) if system else (asked,)


def piped() -> bytes:
    """What comes through stdin, nothing from a terminal."""
    return b"" if sys.stdin is None or sys.stdin.isatty() else sys.stdin.buffer.read()


def compose(prompt: str | None, files: Sequence[Path], piped: bytes) -> str:
    """The user's turn: the files with their names, the prompt, and what was piped in.

    Raises:
        UsageError: nothing is left, a file cannot be read, or something is not UTF-8.
    """
    parts = [attachments.fenced(str(path), _read(path)) for path in files]
    # the shell hands on bytes that are not UTF-8 as lone surrogates
    parts.append(text_file.decoded((prompt or "").encode("utf-8", "surrogateescape"), "The prompt"))
    parts.append(text_file.decoded(piped, "stdin"))
    text = "\n\n".join(part.rstrip("\n") for part in parts if part.strip())
    if not text:
        raise UsageError("The prompt is empty.", hint="Write it behind the command or pipe it in.")
    return text


def _read(path: Path) -> str:
    """The text of a file, which may be a pipe."""
    try:
        return text_file.decoded(path.read_bytes(), str(path))
    except OSError as error:
        raise text_file.unreadable(str(path), error) from None
