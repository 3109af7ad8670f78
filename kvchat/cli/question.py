"""The question of a command: its argument, the files before it and what was piped in."""

from __future__ import annotations

import stat
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from kvchat import text_file
from kvchat.conversations.attachments import BYTES_PER_TOKEN, MAX_BYTES, fenced
from kvchat.errors import DoesNotFitError, UsageError
from kvchat.protocol.messages import Turn
from kvchat.units import count, size


def turns(prompt: str | None, files: Sequence[Path], system: str | None) -> tuple[Turn, ...]:
    """The turns of a command: the system prompt, if there is one, and the question with the text that was piped in.

    Raises:
        KvchatError: as ``piped`` and ``compose``.
    """
    asked = Turn("user", compose(prompt, files, piped()))
    return (Turn("system", system), asked) if system else (asked,)


def piped() -> bytes:
    """The text that comes through stdin; empty from a terminal.

    Raises:
        DoesNotFitError: it is more than a model could read, perhaps without an end.
    """
    return b"" if sys.stdin is None or sys.stdin.isatty() else _limited(sys.stdin.buffer, "stdin")


def compose(prompt: str | None, files: Sequence[Path], piped: bytes) -> str:
    """The user's turn: the files with their names, what was piped in as one more of them, and the prompt.

    Without a prompt what was piped in is the prompt.

    Raises:
        UsageError: nothing is left, a file cannot be read, or something is not UTF-8.
        DoesNotFitError: a file is larger than what a model could read.
    """
    parts = [fenced(str(path), _read(path)) for path in files]
    written, context = typed(prompt or ""), text_file.for_a_model(piped, "stdin")
    parts += [context, written] if not written.strip() else [as_file(context), written]
    text = "\n\n".join(part.rstrip("\n") for part in parts if part.strip())
    if not text:
        raise UsageError("The prompt is empty.", hint="Write it behind the command or pipe it in.")
    return text


def typed(prompt: str) -> str:
    """A prompt of the command line; the shell hands on bytes that are not UTF-8 as lone surrogates.

    Raises:
        UsageError: it has such bytes.
    """
    return text_file.for_a_model(prompt.encode("utf-8", "surrogateescape"), "The prompt")


def as_file(piped: str) -> str:
    """The text piped in beside a prompt, as a file is sent; nothing for white space."""
    return fenced("stdin", piped) if piped.strip() else ""


def _read(path: Path) -> str:
    """The text of a file, which may be a pipe; a device may have no end."""
    try:
        kind = path.stat().st_mode
        if stat.S_ISCHR(kind) or stat.S_ISBLK(kind):
            raise UsageError(f"{path} cannot be read.", "It is a device.", "Give a text file or a pipe.")
        with path.open("rb") as file:
            return text_file.for_a_model(_limited(file, str(path)), str(path))
    except OSError as error:
        raise text_file.unreadable(str(path), error) from None


def _limited(stream: BinaryIO, name: str) -> bytes:
    """All of a stream; what is said before the model is loaded must do for any model."""
    raw = stream.read(MAX_BYTES + 1)
    if len(raw) > MAX_BYTES:
        tokens = count(MAX_BYTES // BYTES_PER_TOKEN)
        detail = f"At most {size(MAX_BYTES)} are read: about {tokens} tokens, more than models take."
        raise DoesNotFitError(f"{name} is too large.", detail, "Take a part of it.")
    return raw
