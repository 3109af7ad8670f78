"""The chat as lines: what the controller shows, printed in the order in which it happens."""

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

_SENTENCE_END = re.compile(r"[.!?…][\"'”’)\]]*[ \n]|[。！？]|\n")
YOU, MODEL = "you: ", "model: "
PATIENCE_S = 5.0  # a wait that takes longer is explained
AT_ONCE_S = 0.02  # a terminal hands on the lines of a paste one by one, faster than anybody types
LONGEST = 2**23  # characters of a line: more than any model reads; a device may never end one
CONTINUED = "\\"  # at the end of a line: the question goes on in the next one
_LINE_END = re.compile(r"(?<!\\)\n")
# What a screen reader spells out, and terminals without Unicode lack, in kvchat's own lines.
SPOKEN = {" · ": ", ", " → ": " to ", " -> ": " to ", "…": "...", "●": "*", "“": '"', "”": '"', "−": "-"}


class PlainQuestion:
    """A question; printed where the terminal does not show what is typed."""

    def __init__(self, text: str) -> None:
        self.text = text

    def send(self, message: Message, footer: str) -> None:
        """Nothing changes in a line that is printed."""

    async def remove(self) -> None:
        """Do nothing: printed lines stay."""


class PlainAnswer:
    """An answer, printed as it comes; where it ``folds``, a thought between its tags is a line that says its length."""

    def __init__(self, lines: LineWriter, folds: bool = False) -> None:
        self.text = ""
        self.thought = ""
        self._lines = lines
        self._folds = folds
        self._printed = 0  # characters of what is to be printed
        self._is_thought_told = False
        self._notes: list[tuple[int, str]] = []  # behind so many characters of what is printed, or more
        self.is_over = False
        self._ending: str | None = None
        self._told = monotonic()

    def wait(self, words: str) -> None:
        """Say now and then what the engine does before the first word."""
        if monotonic() - self._told > PATIENCE_S:
            self._told = monotonic()
            self._lines.line(words)

    def resume(self, message: Message) -> None:
        self.thought = message.thought
        self.feed(message.text)

    def feed(self, text: str) -> None:
        self.text += text
        self._print()

    async def withdraw(self, chars: int) -> str:
        """Forget the last ``chars`` characters; the note that follows says which."""
        kept = len(self.text) - chars
        self.text, withdrawn = self.text[:kept], self.text[kept:]
        self._printed = min(self._printed, len(unfolded(self.text, self._folds, self.thought)[1]))
        return withdrawn

    def note(self, line: str) -> None:
        """Print a line of its own as soon as the sentence that is being said is over."""
        if self._printed:
            self._notes.append((self._printed, line))
        else:
            self._lines.line(line)

    def take_note_back(self, line: str) -> None:
        """Do not print a line that has not been printed yet."""
        self._notes = [note for note in self._notes if note[1] != line]

    def _print(self) -> None:
        """Print what has come since, and once how long the thought before it is."""
        thought, said = unfolded(self.text, self._folds, self.thought, self._ending)
        if thought and (said or self._ending is not None) and not self._is_thought_told:
            self._is_thought_told = True
            self._lines.line(f"[{described(thought)}]")
        if said and not self._printed:
            self._lines.text(MODEL)
        # Behind the sentence that is being said there.
        while self._notes and (found := _SENTENCE_END.search(said, max(self._notes[0][0] - 1, 0))):
            self._print_up_to(said, found.end())
            self._lines.line(self._notes.pop(0)[1])
        self._print_up_to(said, len(said))

    def _print_up_to(self, said: str, end: int) -> None:
        if end > self._printed:
            self._lines.text(said[self._printed : end])
            self._printed = end

    async def finish(self, message: Message, footer: str) -> None:
        self._ending = message.ending
        self._print()
        if not self.text:
            self._lines.text(f"{MODEL}{message.text}")
        for _, line in self._notes:
            self._lines.line(line)
        self._lines.line(f"[{footer}]")
        self.is_over = True

    async def remove(self) -> None:
        """Printed lines stay."""
        self.is_over = True


def unfolded(text: str, folds: bool, end: str, ending: str | None = None) -> tuple[str, str]:
    """The thought that is left out, "" where it is not to be, and what is printed; else as ``thoughts.split``."""
    return thoughts.split(text, end, ending) if folds else ("", text)


def described(thought: str) -> str:
    """``thought, 120 words``: the line in place of a thought."""
    return thoughts.summarize(thought, is_open=False).lstrip("▸ ")


class PlainSwitch(SwitchLine):
    """A switch; the line is printed when it comes, without speeds."""

    def __init__(self, switched: Switched, speed: float | None, answer: PlainAnswer | None) -> None:
        super().__init__(switched, speed)
        self._answer = answer

    async def remove(self) -> None:
        """Print it no more; printed lines stay."""
        if self._answer is not None:
            self._answer.take_note_back(noted(self.switched))

    def show_line(self) -> None:
        """Nothing is added to a line that is printed."""


def noted(switched: Switched) -> str:
    return f"[{describe_switch(switched, None, None)}]"


def _spoken(headings: Sequence[str], row: Sequence[str]) -> str:
    """``full: answer 42, ✓ found, read 100 %``; what has no meaning is left out."""
    cells = [f"{heading} {cell}".strip() for heading, cell in zip(headings[1:], row[1:], strict=True)]
    filled = [cell for cell, value in zip(cells, row[1:], strict=True) if value not in ("", NOTHING)]
    return f"{row[0]}: {', '.join(filled)}"


class PlainView:
    """A ``ChatView`` of lines.

    ``echoes`` prints the questions: a terminal shows them itself, a pipe does not. ``problems`` counts errors,
    ``switches`` switches and errors: what a switch ends with. ``folds_thoughts`` leaves thoughts out, ``take_details``
    gets the details that were asked for.
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
        self._answer: PlainAnswer | None = None
        self._lines = lines
        self._echoes = echoes

    async def show_messages(self, messages: Sequence[Footed], below: str | None) -> None:
        """Print messages; those printed before stay."""
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
        """Print a question that the terminal did not show."""
        if self._echoes:
            self._lines.text(f"{YOU}{folded(text)}\n")
        return PlainQuestion(text)

    async def add_command(self, line: str) -> PlainQuestion:
        return PlainQuestion(line)

    async def add_answer(self) -> PlainAnswer:
        self._answer = PlainAnswer(self._lines, self.folds_thoughts)
        return self._answer

    async def add_switch(self, switched: Switched, speed: float | None) -> PlainSwitch:
        """Print a switch; in the middle of an answer behind the sentence that is being said."""
        self.add_way_back(switched)
        return PlainSwitch(switched, speed, self._answer)

    def add_way_back(self, switched: Switched) -> None:
        """Print a switch; the line of the one that it takes back is printed already."""
        self.switches += 1
        if self._answer is not None and not self._answer.is_over:
            self._answer.note(noted(switched))
        else:
            self._lines.line(noted(switched))

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
        """Everything that matters is printed as it happens."""

    def show_state(self, state: ChatState) -> None:
        """Print that a model was loaded or a conversation begun."""
        before, self.phase = self.phase, state.phase
        another, self._conversation = self._conversation, state.conversation.id
        self._lines.changed.set()
        if another not in ("", self._conversation) and not state.conversation.messages:
            self._lines.line("A new conversation.")
        if before is Phase.LOADING and self.phase is Phase.READY and state.info is not None:
            info = state.info
            self._lines.line(f"{state.model_name} on {info.device}, context {count(info.context)}, {state.asked} mode.")

    def show_snapshot(self, snapshot: Snapshot | None, answering: bool = False) -> None:
        """Print badges that are new; figures that change ten times a second are no lines."""
        badges = {badge.partition(":")[0]: badge for badge in snapshot.badges} if snapshot else {}
        for name in badges.keys() - self._badges:
            self._lines.line(f"[{badges[name]}]")
        self._badges = set(badges)

    def show_details(self, details: Details) -> None:
        if self.take_details is not None:
            self.take_details(details)

    def show_page_text(self, start: int, text: str) -> None:
        """Only the ribbon asks for it."""

    def show_conversations(self, kept: Sequence[Summary], current: str) -> None:
        """Only /chats lists them."""

    def show_comparison(self, shown: RunningComparison) -> None:
        """Print a comparison when it is over: each mode's figures, the verdict and the answers."""
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
        """Say how questions that were held back are sent."""
        if waiting and is_held:
            self._lines.line(f"{count(waiting)} waiting; /queue send asks them, /queue clear drops them.")

    async def show_models(self, find: Find) -> None:
        for model in await find():
            facts = model.problem or model.served
            self._lines.line(f"{model.name}   {size(model.weights.nbytes) if model.weights else facts}")
        self._lines.line("/model NAME loads one; NAME may also be a path, a name on the hub or a server's address.")

    def restore_prompt(self, text: str) -> bool:
        """Print a question that is given back, to be copied."""
        self._lines.text(f"{YOU}{text}\n")
        self._lines.line("[this question was not sent; type it again to change it]")
        return True

    def copy(self, text: str) -> None:
        """Refuse."""
        raise UsageError("Line mode has no clipboard.", hint="With a FILE argument the command writes to that file.")


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
        self._write(self._out, text)

    def problem(self, text: str) -> None:
        """Write what went wrong, in lines of their own, to stderr."""
        self._write(self._errors, text)

    def _write(self, stream: TextIO, text: str) -> None:
        self.end()
        self._out.flush()
        stream.write(f"{visible(spoken(text))}\n")
        stream.flush()
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
