"""Recordings of an engine's events with their times, as JSON lines, optionally gzipped.

The first line is ``{"format": "kvchat-recording", "version": 1, "kvchat": "0.1.0"}``. Each other line is
``[seconds, message]``: the time since the recording began, which never decreases, and the event as the protocol sends
it, with its ``type``. A question is recorded as the event ``Asked``, so that a recording contains the whole
conversation and plays without a model.
"""

from __future__ import annotations

import gzip
import json
import time
import zlib
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

from kvchat import files
from kvchat.errors import UsageError
from kvchat.protocol import wire
from kvchat.protocol.messages import Asked, Chat, Command, Event

FORMAT, VERSION = "kvchat-recording", 1
MAX_BYTES = 64 * 2**20  # uncompressed: about an hour of answers
GZIP = b"\x1f\x8b"


class Entry(NamedTuple):
    """An event, ``seconds`` after the recording began."""

    seconds: float
    event: Event


class Recorder:
    """Writes a recording to a new file. ``report`` is called once, with the reason, if the recording ends early."""

    def __init__(self, path: Path, version: str, clock: Callable[[], float] = time.monotonic) -> None:
        """
        Raises:
            UsageError: the file exists or cannot be written.
        """
        self.path = path
        self.report: Callable[[str], None] = lambda reason: None
        self._clock, self._began = clock, clock()
        self._bytes, self._ended = 0, False
        try:
            if path.exists():
                raise UsageError(f"{path} exists.", hint="Record to another file.")
            self._file = files.open_log(path)
            try:
                self._write({"format": FORMAT, "version": VERSION, "kvchat": version})
            except OSError:
                self.close()
                path.unlink()
                raise
        except (OSError, ValueError) as error:
            raise files.unwritable(path, error, "Record to another file.") from None

    def note_command(self, command: Command) -> None:
        """Record a question; other commands show in the events that answer them."""
        if isinstance(command, Chat):
            self.note(Asked(next((turn.content for turn in reversed(command.turns) if turn.role == "user"), "")))

    def note(self, event: Event) -> None:
        """Record an event; the recording ends if the disk is full or ``MAX_BYTES`` is near."""
        if self._ended:
            return
        try:
            self._write([round(self._clock() - self._began, 3), json.loads(wire.encode(event)[4:])])
        except OSError as error:
            self._end(f"{error.strerror}")
        else:
            if self._bytes > MAX_BYTES * 0.9:
                self._end("it has reached the maximum length")

    def close(self) -> None:
        self._ended = True
        self._file.close()

    def _write(self, value: Any) -> None:
        line = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace") + b"\n"
        files.append_to(self._file, line)
        self._bytes += len(line)

    def _end(self, reason: str) -> None:
        self.close()
        self.report(f"The recording {self.path} ends here: {reason}.")


def read(path: Path) -> list[Entry]:
    """Read a recording.

    Raises:
        UsageError: the file cannot be read, is not a recording, is damaged (with the line), or has another version.
    """
    lines = _unpacked(path).split(b"\n")
    if lines.pop():
        raise _refusal(path, len(lines) + 1, "it is truncated")
    try:
        header = json.loads(lines[0])
        if header["format"] != FORMAT:
            raise ValueError
        version = header["version"]
    except (ValueError, TypeError, KeyError, IndexError):
        raise _refusal(path, 1, f"it does not say {FORMAT}") from None
    if version != VERSION:
        raise UsageError(
            f"{path} is a recording of version {version!r:.40}.",
            f"This kvchat plays version {VERSION}.",
            "Play it with the version of kvchat that recorded it, or a later one.",
        )
    entries = []
    for number, line in enumerate(lines[1:], 2):
        try:
            seconds, message = json.loads(line)
            entries.append(Entry(float(seconds), wire.decode_event(json.dumps(message).encode())))
        except (ValueError, TypeError) as error:
            raise _refusal(path, number, str(error)[:200]) from None
    return entries


def _unpacked(path: Path) -> bytes:
    raw = files.load(path, MAX_BYTES)
    if not raw.startswith(GZIP):
        return raw
    try:
        with gzip.open(BytesIO(raw)) as packed:
            return files.limited(packed.read(MAX_BYTES + 1), MAX_BYTES, str(path))
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UsageError(f"{path} is damaged.", f"{error}.", "Copy or record it again.") from None


def _refusal(path: Path, line: int, detail: str) -> UsageError:
    return UsageError(
        f"{path} is not a kvchat recording, or is damaged.",
        f"Line {line}: {detail}.",
        "Use a file written by --record.",
    )
