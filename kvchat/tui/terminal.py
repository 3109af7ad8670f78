"""The terminal: input of any bytes, output without the control characters of a text, and the clipboard.

OSC 52 sets the terminal's clipboard, but the terminal may silently ignore it. pyperclip (the extra ``clipboard``) sets
the system's clipboard, which over SSH would be the remote machine's.
"""

from __future__ import annotations

import asyncio
import codecs
import errno
import math
import os
import re
import signal
import sys
import termios
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.util import find_spec

from rich.segment import Segment
from textual.color import Color
from textual.driver import Driver
from textual.filter import LineFilter

from kvchat.foreign_text import MARKS, visible
from kvchat.tui.actions import is_command
from kvchat.units import count

PASTE_START, PASTE_END = "\x1b[200~", "\x1b[201~"
NEXT_READ_S = 0.02  # the parts of a paste follow each other faster than a person's keys
_ESC_KEY = "\x1b[27u"  # from terminals that distinguish the key from the beginning of a sequence
_ESC_BEFORE_TEXT = re.compile(r"\x1b(?=[^\x00-\x20\x7f\[\]NOPX^_\\][^\x00-\x1f\x7f])")
_TEXT = re.compile(r"[^\x00-\x08\x0b\x0c\x0e-\x1f\x7f]+")
_HALF_END = re.compile(r"\x1b(\[(2(0(1)?)?)?)?\Z")
TERMINALS_TAKE = 74_994  # bytes; in base64 these are 100,000, the limit of many terminals
PATIENCE_S = 5.0
TO_FILE = "/copy FILE writes it into a file."
REMOTE = ("SSH_CONNECTION", "SSH_CLIENT", "SSH_TTY")


class VisibleText(LineFilter):
    """Replaces control characters in drawn lines by visible marks, whichever widget drew them.

    Widgets already make texts ``visible`` before layout, because a mark made here may shift the rest of its line.
    """

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        return [Segment(visible(text), style, control) for text, style, control in segments]


class InputDecoder:
    """Decodes input: bytes that are not UTF-8 become U+FFFD, ESC inside a paste a visible mark.

    Textual's own decoder would end the application, and its parser would read the ESC as keys. It would also read Esc
    and a text that arrive together as Alt and a letter; here, ESC before two characters is the Esc key.

    If the terminal does not mark pastes, several lines in one read are a paste.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._clock = clock
        self._pasted_at = -math.inf  # when the last part of an unmarked paste came
        self._is_paste = False
        self._emitted = ""  # the last characters outside a paste, which may begin PASTE_START
        self._held = ""  # the last characters of a paste, which may begin PASTE_END

    def decode(self, data: bytes, final: bool = False) -> str:
        """Return the text of the bytes read; an incomplete ``PASTE_END`` is returned with the next bytes.

        If the terminal is gone, end the application: reading nothing would keep a core busy. SIGHUP may not have ended
        it, because nohup and some terminals let it ignore that signal.
        """
        if not (data or final) and has_vanished():
            if signal.getsignal(signal.SIGTERM) == signal.SIG_IGN:
                os._exit(128 + signal.SIGTERM)  # the engine ends by itself when its pipe closes
            os.kill(os.getpid(), signal.SIGTERM)
        text, parts = self._utf8.decode(data, final), []
        if self._is_unmarked_paste(text):
            return PASTE_START + text + PASTE_END
        text, self._held = self._held + text, ""
        while text:
            part, text = self._pasted(text) if self._is_paste else self._typed(text)
            parts.append(part)
        return "".join(parts)

    def _is_unmarked_paste(self, text: str) -> bool:
        """Return whether one read has several lines that are not all commands, or text that follows these immediately.

        Enter alone or any other key ends the paste. A newline after a single line is Enter, after several it is pasted.
        """
        now, before = self._clock(), self._pasted_at
        self._pasted_at = -math.inf
        if self._is_paste or "\x1b" in self._emitted or not _TEXT.fullmatch(text):
            return False
        lines = text.replace("\n", "\r").strip("\r").split("\r")
        if all(map(is_command, lines)) or not (len(lines) > 1 or (now - before < NEXT_READ_S and lines != [""])):
            return False
        self._pasted_at = now
        return True

    def _typed(self, text: str) -> tuple[str, str]:
        before, start, rest = (self._emitted + text).partition(PASTE_START)
        typed = (before + start)[len(self._emitted) :]
        self._is_paste = bool(start)
        self._emitted = "" if start else before[1 - len(PASTE_START) :]
        return _ESC_BEFORE_TEXT.sub(_ESC_KEY, typed), rest

    def _pasted(self, text: str) -> tuple[str, str]:
        paste, end, rest = text.partition(PASTE_END)
        self._is_paste = not end
        if not end and (half := _HALF_END.search(paste)):
            paste, self._held = paste[: half.start()], half[0]
        return paste.replace("\x1b", MARKS[0x1B]) + end, rest


def has_vanished() -> bool:
    """Return whether stdin's terminal is gone, because its window was closed or its connection broke."""
    try:
        termios.tcgetattr(0)
    except termios.error as error:
        return bool(error.args[0] == errno.EIO)
    return False


def decode_leniently(driver: type[Driver]) -> type[Driver]:
    """Let ``driver`` decode the terminal's input by an ``InputDecoder``, and return it.

    Its reading loop looks up the decoder by a name in its module, which is replaced.
    """
    module = sys.modules[driver.__module__]
    if hasattr(module, "getincrementaldecoder"):  # a driver without a terminal decodes nothing
        vars(module)["getincrementaldecoder"] = lambda encoding: InputDecoder
    return driver


def has_system(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether the system's clipboard is the user's, and pyperclip can write to it."""
    return not any(environ.get(name) for name in REMOTE) and find_spec("pyperclip") is not None


async def copy_to_system(text: str, patience_s: float = PATIENCE_S) -> str:
    """Copy a text to the system's clipboard and return why it was refused, "" if it was not."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[str] = loop.create_future()

    def run() -> None:
        result = _copy(text)
        with suppress(RuntimeError):  # the application has ended meanwhile
            loop.call_soon_threadsafe(lambda: None if done.done() else done.set_result(result))

    threading.Thread(target=run, daemon=True).start()  # so that it never delays the application's end
    try:
        return await asyncio.wait_for(done, patience_s)
    except TimeoutError:
        return "it does not respond"


def describe(text: str, refusal: str | None) -> str:
    """Say where a text was copied; ``refusal`` is what ``copy_to_system`` returned, None if only OSC 52 was sent."""
    if refusal == "":
        return f"Copied {count(len(text), 'character')}."
    sent = f"Sent {count(len(text), 'character')} to the terminal's clipboard (OSC 52)."
    if refusal:
        return f"The system's clipboard refused: {visible(refusal)}. {sent} It may ignore them: {TO_FILE}"
    is_much = len(text.encode("utf-8", "replace")) > TERMINALS_TAKE
    return f"{sent} Many terminals accept less: {TO_FILE}" if is_much else sent


def _copy(text: str) -> str:
    import pyperclip

    try:
        pyperclip.copy(text)
    except Exception as error:  # noqa: BLE001  # pyperclip's own class, or any error of a program that it starts
        return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
    return ""
