"""The view of line mode, which prints everything as it happens, and the reading and writing of lines."""

from __future__ import annotations

import asyncio
import codecs
import os
import re
import select
from collections.abc import AsyncIterator, Callable, Sequence
from time import monotonic
from typing import TextIO

from kvchat import thoughts
from kvchat.conversations import comparison
from kvchat.conversations.attachments import folded
from kvchat.conversations.comparison import COLUMNS, NOTHING, label
from kvchat.conversations.conversation import Message
from kvchat.conversations.store import Summary
from kvchat.errors import KvchatError, UsageError
from kvchat.foreign_text import visible
from kvchat.protocol.figures import Snapshot
from kvchat.protocol.messages import Details, Switched
from kvchat.tui.actions import is_command
from kvchat.tui.comparisons import HEADINGS, needle_rows, verdict
from kvchat.tui.state import ChatState, Footed, Phase, RunningComparison, SwitchLine, describe_switch
from kvchat.tui.view import Find, Remedy, Severity
from kvchat.units import count, size

YOU, MODEL = "you: ", "model: "
PATIENCE_S = 5.0  # a longer wait is explained
AT_ONCE_S = 0.02  # a terminal delivers the lines of a paste one by one, faster than anybody types
LONGEST = 2**23  # characters of a line, more than any model reads; some devices never end one
CUT_BYTES = 4095  # of a typed line that Linux delivers; it drops the rest
CONTINUED = "\\"  # ends a line that continues in the next one
_LINE_END = re.compile(r"(?<!\\)\n")
# Signs in kvchat's own lines that screen readers spell out and terminals without Unicode lack, and their replacements.
SPOKEN = {" · ": ", ", " → ": " to ", "…": "...", "●": "*", "“": '"', "”": '"', "−": "-"}


class PlainQuestion:
    def __init__(self, text: str) -> None:
        self.text = text

    def send(self, message: Message, footer: str) -> None:
        """Do nothing: printed lines stay."""

    async def remove(self) -> None:
        """Do nothing: printed lines stay."""


class PlainAnswer:
    """An answer, printed as it comes; if it ``folds``, a line with a thought's length replaces the thought."""

    def __init__(self, lines: LineWriter, folds: bool = False) -> None:
        self.text = ""
        self.thought = ""
        self._lines = lines
        self._folds = folds
        self._printed = 0  # characters of the unfolded text
        self._is_thought_noted = False
        self._ending: str | None = None
        self._last_wait = monotonic()

    def wait(self, words: str) -> None:
        """Print what the engine does before the first word, at most every ``PATIENCE_S``."""
        if monotonic() - self._last_wait > PATIENCE_S:
            self._last_wait = monotonic()
            self._lines.line(words)

    def resume(self, message: Message) -> None:
        self.thought = message.thought
        self.feed(message.text)

    def feed(self, text: str) -> None:
        self.text += text
        self._print()

    async def withdraw(self, chars: int) -> str:
        """Forget the last ``chars`` characters; the controller's note says which."""
        kept = len(self.text) - chars
        self.text, withdrawn = self.text[:kept], self.text[kept:]
        self._printed = min(self._printed, len(unfolded(self.text, self._folds, self.thought)[1]))
        return withdrawn

    def _print(self) -> None:
        """Print the new text; before it, once, the length of a thought that is left out."""
        thought, said = unfolded(self.text, self._folds, self.thought, self._ending)
        if thought and (said or self._ending is not None) and not self._is_thought_noted:
            self._is_thought_noted = True
            self._lines.line(f"[{described(thought)}]")
        if said and not self._printed:
            self._lines.text(MODEL)
        if len(said) > self._printed:
            self._lines.text(said[self._printed :])
            self._printed = len(said)

    async def finish(self, message: Message, footer: str) -> None:
        self._ending = message.ending
        self._print()
        if not self.text:
            self._lines.text(f"{MODEL}{message.text}")
        self._lines.line(f"[{footer}]")

    async def remove(self) -> None:
        """Do nothing: printed lines stay."""


def unfolded(text: str, folds: bool, end: str, ending: str | None = None) -> tuple[str, str]:
    """Return the thought to leave out (empty unless ``folds``) and the text to print, as ``thoughts.split`` does."""
    return thoughts.split(text, end, ending) if folds else ("", text)


def described(thought: str) -> str:
    """Return the line that replaces a thought, such as ``thought, 120 words``."""
    return thoughts.summarize(thought, is_open=False).lstrip("▸ ")


class PlainSwitch(SwitchLine):
    """A switch; its line is printed when it happens, without speeds."""

    async def remove(self) -> None:
        """Do nothing: printed lines stay."""

    def show_line(self) -> None:
        """Do nothing: printed lines stay."""


def _spoken(headings: Sequence[str], row: Sequence[str]) -> str:
    """Return a row in words, without empty cells, such as ``full: answer 42, ✓ found, read 100 %``."""
    cells = [f"{heading} {cell}".strip() for heading, cell in zip(headings[1:], row[1:], strict=True)]
    filled = [cell for cell, value in zip(cells, row[1:], strict=True) if value not in ("", NOTHING)]
    return f"{row[0]}: {', '.join(filled)}"


class PlainView:
    """A ``ChatView`` of lines.

    ``echoes`` prints the questions, which a terminal shows itself and a pipe does not. ``problems`` counts errors.
    ``switches`` counts switches and errors, either of which may answer a request to switch. ``folds_thoughts`` leaves
    thoughts out. ``take_details`` is called with requested details.
    """

    chosen: str | None = None
    lists_conversations = False

    def __init__(self, lines: LineWriter, echoes: bool) -> None:
        self.problems = 0
        self.switches = 0
        self.phase = Phase.DOWN
        self.folds_thoughts = False
        self.take_details: Callable[[Details], None] | None = None
        self._conversation = ""
        self._badges: set[str] = set()
        self._lines = lines
        self._echoes = echoes

    async def show_messages(self, messages: Sequence[Footed], below: str | None) -> None:
        """Print messages; printed lines stay."""
        for message, footer in messages:
            folds = self.folds_thoughts and message.role == "assistant"
            thought, said = unfolded(message.marked_text, folds, message.thought, message.ending)
            if thought:
                self._lines.line(f"[{described(thought)}]")
            self._lines.text(f"{YOU if message.role == 'user' else MODEL}{said}")
            self._lines.end()
            if footer:
                self._lines.line(f"[{footer}]")

    def show_footer(self, message: Message, footer: str) -> None:
        """Do nothing: printed lines stay."""

    async def add_question(self, text: str, queued: bool) -> PlainQuestion:
        """Print the question unless the terminal shows it."""
        if self._echoes:
            self._lines.text(f"{YOU}{folded(text)}\n")
        return PlainQuestion(text)

    async def add_command(self, line: str) -> PlainQuestion:
        return PlainQuestion(line)

    async def add_answer(self) -> PlainAnswer:
        return PlainAnswer(self._lines, self.folds_thoughts)

    async def add_switch(self, switched: Switched, speed: float | None) -> PlainSwitch:
        """Print a switch, also in the middle of an answer."""
        self.add_way_back(switched)
        return PlainSwitch(switched, speed)

    def add_way_back(self, switched: Switched) -> None:
        """Print a switch that undoes the last one, whose line is printed already."""
        self.switches += 1
        self._lines.line(f"[{describe_switch(switched, None, None)}]")

    def add_note(self, text: str, struck: str = "") -> None:
        self._lines.line(text + struck)

    def add_error(self, error: KvchatError, remedies: Sequence[Remedy] = ()) -> None:
        self.problems += 1
        self.switches += 1
        done = [f"{', then '.join(remedy.lines)}: {remedy.doc}" for remedy in remedies]
        parts = (f"Error: {error.title}", error.detail, error.hint, *done)
        self._lines.problem("\n".join(part for part in parts if part))

    def toast(self, text: str, title: str = "", severity: Severity = "information", timeout: float = 5.0) -> None:
        said = f"{title}: {text}" if title else text
        (self._lines.line if severity == "information" else self._lines.problem)(said)

    def log_event(self, text: str) -> None:
        """Do nothing: everything that matters is printed as it happens."""

    def show_state(self, state: ChatState) -> None:
        """Print that a model was loaded or a conversation begun."""
        before, self.phase = self.phase, state.phase
        another, self._conversation = self._conversation, state.conversation.id
        self._lines.changed.set()
        if another not in ("", self._conversation) and not state.conversation.messages:
            self._lines.line("A new conversation.")
        if before is Phase.LOADING and self.phase is Phase.READY and state.info is not None:
            info = state.info
            context = f"context {count(info.context)}" if info.context else "context unknown"
            self._lines.line(f"{state.model_name} on {info.device}, {context}, {state.asked} mode.")

    def show_snapshot(self, snapshot: Snapshot | None, answering: bool = False) -> None:
        """Print new badges, but no figures: they change ten times a second."""
        badges = {badge.partition(":")[0]: badge for badge in snapshot.badges} if snapshot else {}
        for name in badges.keys() - self._badges:
            self._lines.line(f"[{badges[name]}]")
        self._badges = set(badges)

    def show_details(self, details: Details) -> None:
        if self.take_details is not None:
            self.take_details(details)

    def show_page_text(self, start: int, text: str) -> None:
        """Do nothing: only the ribbon requests it."""

    def show_conversations(self, kept: Sequence[Summary], current: str) -> None:
        """Do nothing: only /chats lists them."""

    def show_comparison(self, shown: RunningComparison) -> None:
        """Print a finished comparison: each mode's figures, the verdict and the answers."""
        if (result := shown.result) is not None and shown.fact is not None:
            said = [*(_spoken(HEADINGS, row) for row in needle_rows(shown)), verdict(shown)]
        elif result is not None:
            figures = [_spoken(COLUMNS, row) for row in comparison.rows(result)]
            answers = [f"{label(v)}: {run.text}" for v, run in zip(shown.variants, result.runs, strict=False)]
            said = [*figures, *comparison.verdicts(result), *answers]
        else:
            said = [shown.error]
        if shown.is_over:
            self._lines.line("\n".join(said))

    def show_queue(self, waiting: int, is_held: bool) -> None:
        """Print how to send questions that are held."""
        if waiting and is_held:
            self._lines.line(f"{count(waiting)} waiting; /queue send asks them, /queue clear drops them.")

    async def show_models(self, find: Find) -> None:
        for model in await find():
            facts = model.problem or model.served
            self._lines.line(f"{model.name}   {size(model.weights.nbytes) if model.weights else facts}")
        self._lines.line("/model NAME loads one; NAME may also be a path, a name on the hub or a server's address.")

    def restore_prompt(self, text: str) -> bool:
        """Print a question that was not sent, to be copied."""
        self._lines.text(f"{YOU}{text}\n")
        self._lines.line("[this question was not sent; type it again to change it]")
        return True

    def copy(self, text: str) -> None:
        raise UsageError("Line mode has no clipboard.", hint="With a FILE argument the command writes to that file.")


class LineReader:
    """Iterates over the lines from a file descriptor; a line that ends with ``\\`` continues in the next.

    Lines that a terminal delivers together are one literal text that ``is_pasted``, unless all are commands. If
    ``is_cut``, the terminal dropped the end of one of them.
    ``entered`` is called once for all of them, before the first one prints anything.

    Raises:
        UsageError: while iterating, a line is longer than ``LONGEST``.
    """

    def __init__(self, descriptor: int, entered: Callable[[], None] = lambda: None) -> None:
        self._descriptor = descriptor
        self._entered = entered
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")("replace")
        self._is_terminal = os.isatty(descriptor)
        self._typed: asyncio.Queue[bytes] = asyncio.Queue()
        self.is_pasted = self.is_cut = False

    async def __aiter__(self) -> AsyncIterator[str]:
        rest, is_open = "", True
        while is_open:
            data = await self._read()
            if is_open := bool(data):
                self._entered()
            self.is_cut = self._is_terminal and CUT_BYTES in map(len, data.split(b"\n"))
            text = rest + self._decoder.decode(data, not data)
            *lines, rest = text.split("\n")
            self.is_pasted = self._is_terminal and not rest and len(lines) > 1 and not all(map(is_command, lines))
            if self.is_pasted:
                yield "\n".join(line.removesuffix("\r") for line in lines)
                continue
            *lines, rest = _LINE_END.split(text)
            for line in lines:
                yield line.replace(f"{CONTINUED}\n", "\n").removesuffix("\r")
            if len(rest) > LONGEST:
                raise UsageError("A line of stdin is too long.", f"It is over {size(LONGEST)}.", "End each line.")
        if rest:
            yield rest.replace(f"{CONTINUED}\n", "\n")

    def release(self) -> None:
        """Leave the terminal to another program until the next line is requested."""
        asyncio.get_running_loop().remove_reader(self._descriptor)

    def _take(self) -> None:
        """Take what the terminal delivers together, even while a command runs: later it would look like one paste."""
        data, more = b"", os.read(self._descriptor, 2**16)
        while more:
            data += more
            if not select.select([self._descriptor], [], [], AT_ONCE_S)[0]:
                break
            more = os.read(self._descriptor, 2**16)
        if data:
            self._typed.put_nowait(data)
        if not more:  # Ctrl+D, perhaps right behind a line
            self.release()
            self._typed.put_nowait(b"")

    async def _read(self) -> bytes:
        """Return the next bytes, none at the end; the descriptor stays blocking: a terminal shares it with stdout."""
        loop = asyncio.get_running_loop()
        if self._is_terminal:
            loop.add_reader(self._descriptor, self._take)
            return await self._typed.get()
        readable = asyncio.Event()
        try:
            loop.add_reader(self._descriptor, readable.set)
        except PermissionError:  # a plain file, always readable; other tasks need their turn
            await asyncio.sleep(0)
            return os.read(self._descriptor, 2**16)
        try:
            await readable.wait()
        finally:
            loop.remove_reader(self._descriptor)
        return os.read(self._descriptor, 2**16)


class LineWriter:
    """Writes lines and running text, and ``prompt`` (which may be empty) when a line can be typed.

    ``changed`` is set whenever a line is written or executed, or the chat's state changes.
    """

    def __init__(self, out: TextIO, errors: TextIO, prompt: str = "") -> None:
        self._out = out
        self._errors = errors
        self._prompt = prompt
        self.changed = asyncio.Event()
        self._is_line_begun = False
        self._is_prompted = False

    def line(self, text: str) -> None:
        """Write kvchat's own words, on new lines."""
        self._write(self._out, text)

    def problem(self, text: str) -> None:
        """Write a problem to stderr, on new lines."""
        self._write(self._errors, text)

    def _write(self, stream: TextIO, text: str) -> None:
        self.end()
        self._out.flush()
        stream.write(f"{visible(spoken(text))}\n")
        stream.flush()
        self.changed.set()

    def text(self, text: str) -> None:
        """Append text to the current line; control characters become marks."""
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
        """Note that lines were typed: the terminal is at the beginning of the next one."""
        if self._prompt:
            self._is_line_begun = self._is_prompted = False

    def end(self) -> None:
        """End the current line unless it is empty."""
        if self._is_line_begun:
            self._out.write("\n")
        self._is_line_begun = self._is_prompted = False


def spoken(text: str) -> str:
    """Return kvchat's words without signs that are only decoration."""
    for sign, words in SPOKEN.items():
        text = text.replace(sign, words)
    return "\n".join(line.strip("─ ") if "─" in line else line for line in text.split("\n"))
