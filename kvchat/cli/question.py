"""The question of a command: its argument, the files before it and what was piped in."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

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
    parts = [attachments.fenced(str(path), _text(_read(path), str(path))) for path in files]
    # the shell hands on bytes that are not UTF-8 as lone surrogates
    parts += [_text((prompt or "").encode("utf-8", "surrogateescape"), "the prompt"), _text(piped, "stdin")]
    text = "\n\n".join(part.rstrip("\n") for part in parts if part.strip())
    if not text:
        raise UsageError("The prompt is empty.", hint="Write it behind the command or pipe it in.")
    return text


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"The file {path} cannot be read: {error.strerror}.") from None


def _text(raw: bytes, name: str) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise UsageError(
            f"Byte {error.start} of {name} is not UTF-8.", f"It is 0x{raw[error.start]:02x}.", "Convert it to UTF-8."
        ) from None
