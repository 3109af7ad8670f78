"""Lines in and out: stdin without blocking the loop, stdout without a cursor movement or a color."""

from __future__ import annotations

import asyncio
import codecs
import os
import select
from collections.abc import AsyncIterator
from typing import TextIO

from kvchat.errors import UsageError
from kvchat.foreign_text import visible
from kvchat.tui.actions import is_command
from kvchat.units import size

AT_ONCE_S = 0.02  # a terminal hands on the lines of a paste one by one, faster than anybody types
LONGEST = 2**23  # characters of a line: more than any model reads; a device may never end one
CONTINUED = "\\"  # at the end of a line: the question goes on in the next one
# What a screen reader spells out, and terminals without Unicode lack, in kvchat's own lines.
SPOKEN = {" · ": ", ", " → ": " to ", " -> ": " to ", "…": "...", "●": "*", "“": '"', "”": '"', "−": "-"}


class LineReader:
    """The questions and commands that arrive at a file descriptor; a line that ends with ``\\`` goes on in the next.

    Lines that a terminal delivers at once, which are not all commands, are one that ``is_pasted``: nothing in it acts.

    Raises:
        UsageError: while it is read, a line of more than ``LONGEST`` characters.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")("replace")
        self._is_terminal = os.isatty(descriptor)
        self.is_pasted = False

    async def __aiter__(self) -> AsyncIterator[str]:
        rest, is_open = "", True
        while is_open:
            data = await self._read()
            while data and self._is_terminal and select.select([self._descriptor], [], [], AT_ONCE_S)[0]:
                data += (more := os.read(self._descriptor, 2**16))
                if not more:
                    break
            is_open = bool(data)
            *lines, rest = (rest + self._decoder.decode(data, not data)).split("\n")
            self.is_pasted = self._is_terminal and not rest and len(lines) > 1 and not all(map(is_command, lines))
            if self.is_pasted:
                yield "\n".join(line.removesuffix("\r") for line in lines)
                continue
            while lines and lines[-1].endswith(CONTINUED):  # its end has not come yet
                rest = f"{lines.pop()}\n{rest}"
            for line in _joined(lines):
                yield line.removesuffix("\r")
            if len(rest) > LONGEST:
                raise UsageError("A line of stdin does not end.", f"It is over {size(LONGEST)} long.", "End each line.")
        if rest:
            yield rest.replace(f"{CONTINUED}\n", "\n")

    async def _read(self) -> bytes:
        """The next bytes, none at the end; the descriptor stays blocking, a terminal shares it with stdout."""
        loop = asyncio.get_running_loop()
        readable = asyncio.Event()
        try:
            loop.add_reader(self._descriptor, readable.set)
        except PermissionError:  # a plain file is always readable, and others want to run too
            await asyncio.sleep(0)
            return os.read(self._descriptor, 2**16)
        try:
            await readable.wait()
        finally:
            loop.remove_reader(self._descriptor)
        return os.read(self._descriptor, 2**16)


def _joined(lines: list[str]) -> list[str]:
    joined: list[str] = []
    is_continued = False
    for line in lines:
        if is_continued:
            joined[-1] = f"{joined[-1]}\n{line.removesuffix(CONTINUED)}"
        else:
            joined.append(line.removesuffix(CONTINUED))
        is_continued = line.endswith(CONTINUED)
    return joined


class LineWriter:
    """Writes lines and running text; ``prompt`` is shown where a line can be typed, "" for none.

    ``changed`` is set whenever something was written or typed, or whoever writes has reached another state.
    """

    def __init__(self, out: TextIO, errors: TextIO, prompt: str = "") -> None:
        self._out = out
        self._errors = errors
        self._prompt = prompt
        self.changed = asyncio.Event()
        self._is_line_begun = False
        self._is_prompted = False

    def line(self, text: str) -> None:
        """Write kvchat's own words, in lines of their own."""
        self.end()
        self._out.write(f"{visible(spoken(text))}\n")
        self._out.flush()
        self.changed.set()

    def problem(self, text: str) -> None:
        """Write what went wrong, in lines of their own, to stderr."""
        self.end()
        self._out.flush()
        self._errors.write(f"{visible(spoken(text))}\n")
        self._errors.flush()
        self.changed.set()

    def text(self, text: str) -> None:
        """Write text as it is said, going on in the line; control characters are marks."""
        if self._is_prompted:
            self.end()
        if text:
            self._out.write(visible(text))
            self._out.flush()
            self._is_line_begun = not text.endswith("\n")

    def ask(self) -> None:
        """Show that a line can be typed."""
        if self._prompt and not self._is_prompted:
            self.end()
            self._out.write(self._prompt)
            self._out.flush()
            self._is_line_begun = self._is_prompted = True

    def entered(self) -> None:
        """A line was typed: the terminal is at the beginning of the next one."""
        if self._prompt:
            self._is_line_begun = self._is_prompted = False

    def end(self) -> None:
        """End the line that is begun, if there is one."""
        if self._is_line_begun:
            self._out.write("\n")
        self._is_line_begun = self._is_prompted = False


def spoken(text: str) -> str:
    """kvchat's words without the signs that only please the eye."""
    for sign, words in SPOKEN.items():
        text = text.replace(sign, words)
    return "\n".join(line.strip("─ ") if "─" in line else line for line in text.split("\n"))
