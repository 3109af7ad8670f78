"""A conversation: a tree of messages, and the path through it that is shown and sent to the model.

Editing a question or answering it again adds a sibling; nothing that was said is replaced. Beside its text an answer
keeps figures, a mode's parameters, and live switches: a small mark in the text where each was, a line below it of what
it was.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, TypeAdapter

from kvchat.conversations import attachments
from kvchat.protocol.figures import Count, Params, Stats
from kvchat.protocol.messages import Chat, Resume, Sampling, Turn

TITLE_CHARACTERS = 60
CUT_OFF = "cut off"  # the ending of an answer whose engine ended before it
MARK = "┃"  # as in the ribbon
DIGITS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
MARKED = re.compile(f"{MARK}[⁰¹²³⁴⁵⁶⁷⁸⁹]*(?=\\s|$)")
MOST_PUNCTUATION = 8  # looked at between a word and the place of a switch
_WORD_END = re.compile(r"[^\W_][.,;:!?…\"'”’)\]]*(?=\s)|[、。，！？；：]")
_FENCE = re.compile(r"^[ \t>]*(`{3,}|~{3,})[^\n]*", re.MULTILINE)
_STATS = TypeAdapter(Stats)


def new_id() -> str:
    return uuid.uuid4().hex


@dataclass(frozen=True)
class ModeChange:
    """A live switch behind ``chars`` characters of an answer, at ``position`` stored tokens; ``line`` says what it was.

    ``mode`` is the one entered, "" where only its parameters changed.
    """

    chars: Count
    line: str
    position: Count = 0
    mode: str = ""


@dataclass(frozen=True, kw_only=True)
class Message:
    """A question (``role`` user) or an answer (assistant) below ``parent``, None for the first question.

    ``created`` is in seconds since the epoch. ``ending`` says why an answer ended and is empty while it is written;
    ``receipt`` and ``stats`` tell what it cost. Every mode attends to a ``pinned`` one. ``switch_lines`` are the
    live switches in an answer and behind it, up to the next question. ``model`` names what wrote an answer,
    ``thought`` the tag that ends the thought before it where the text alone does not tell.
    """

    id: Annotated[str, Field(min_length=1)] = field(default_factory=new_id)
    parent: str | None
    role: Literal["user", "assistant"]
    text: str
    created: float = field(default_factory=time.time)
    ending: str = ""
    receipt: str = ""
    stats: Annotated[Stats | None, BeforeValidator(read_stats)] = None
    pinned: bool = False
    switch_lines: tuple[ModeChange, ...] = ()
    model: str = ""
    thought: str = ""

    @property
    def marked_text(self) -> str:
        """The text with a mark at each live switch, and what those were below it."""
        return "\n\n".join((with_marks(self.text, self.switch_lines, is_over=True), *notes(self.switch_lines)))

    @property
    def turn(self) -> Turn:
        return Turn(self.role, self.text, self.pinned, self.created, self.thought)


@dataclass(frozen=True, kw_only=True)
class Header:
    """What is kept of a conversation beside its messages; ``leaf`` is the id of the last one of its path."""

    title: str
    system: str | None
    leaf: str | None
    mode: str
    params: Params


@dataclass(frozen=True, kw_only=True)
class Changes:
    """A conversation as it is now, beside what is known to be on disk.

    ``header`` and ``messages``, in their order, are all there is now; ``saved_header``, None for a new conversation,
    and ``saved`` are what was last written or read. What differs is to be written, no more: another application may
    have changed the rest.
    """

    id: str
    created: float
    header: Header
    messages: Mapping[str, Message]
    saved_header: Header | None
    saved: Mapping[str, Message]

    @property
    def changed(self) -> list[Message]:
        """The messages that are new or not as they were written."""
        return [message for id, message in self.messages.items() if self.saved.get(id) is not message]

    @property
    def removed(self) -> list[str]:
        """The ids of questions that were withdrawn."""
        return [id for id in self.saved if id not in self.messages]


class Conversation:
    """Questions and answers alternate along every path; ``leaf`` is the last message of the current one.

    ``messages`` are in the order in which they were added. ``system`` is the system prompt, None without one. ``mode``
    is the KV mode it was last in and ``params`` what was asked for in it, "" and empty where neither is known. One that
    is not ``is_kept`` leaves nothing on disk.
    """

    is_kept = True

    def __init__(
        self,
        system: str | None = None,
        messages: Iterable[Message] = (),
        *,
        id: str = "",
        title: str = "",
        created: float | None = None,
        leaf: str | None = None,
        mode: str = "",
        params: Params | None = None,
    ) -> None:
        self.id = id or new_id()
        self.title = title
        self.created = time.time() if created is None else created
        self.messages: dict[str, Message] = {}
        self._below: dict[str | None, list[str]] = {}  # ids of the messages below each, in the order of ``messages``
        for message in messages:
            self._put(message)
        self.system = system
        self.mode, self.params = mode, params or {}
        self._leaf = leaf
        self._saved_header: Header | None = None
        self._saved: dict[str, Message] = {}

    # ---- reading ---------------------------------------------------------------------------------

    @property
    def leaf(self) -> Message | None:
        """The last message of the path, None while it is empty."""
        return self.messages.get(self._leaf or "")

    @property
    def path(self) -> list[Message]:
        """The messages from the first question to the leaf."""
        return self.path_to(self._leaf)

    @property
    def turns(self) -> list[Turn]:
        """The path as turns, without the system prompt."""
        return [message.turn for message in self.path]

    @property
    def stats(self) -> list[Stats]:
        """The cost of each answer, those on other branches included."""
        return [message.stats for message in self.messages.values() if message.stats]

    def path_to(self, id: str | None) -> list[Message]:
        """The messages from the first question to the message ``id``."""
        path = []
        while message := self.messages.get(id or ""):
            path.append(message)
            id = message.parent
        return path[::-1]

    def siblings(self, id: str) -> list[Message]:
        """The messages with the same parent, ``id`` among them."""
        return [self.messages[sibling] for sibling in self._below[self.messages[id].parent]]

    def last_text(self) -> str:
        """The text of the leaf, empty before the first."""
        return self.leaf.text if self.leaf else ""

    def command(self, sampling: Sampling) -> Chat:
        """The whole path as a command to answer its last question, or to go on with its last answer."""
        return Chat(self._whole(), sampling, self._id_of_kept)

    def to_resume(self) -> Resume:
        """The whole path as a command to go over to it."""
        return Resume(self._id_of_kept, self._whole())

    # ---- adding ----------------------------------------------------------------------------------

    def ask(self, text: str, pinned: bool = False) -> Message:
        """Add a question below the last answer; a question without one is left as a sibling."""
        parent = self._leaf if self._ends_with("assistant") else self.leaf.parent if self.leaf else None
        if not self.title:
            self.title = shorten(attachments.folded(text))
        return self.add(Message(parent=parent, role="user", text=text, pinned=pinned))

    def answer(
        self,
        text: str,
        ending: str = "",
        receipt: str = "",
        stats: Stats | None = None,
        switch_lines: tuple[ModeChange, ...] = (),
        model: str = "",
        thought: str = "",
    ) -> Message:
        """Set the text of the answer to the last question; without an ``ending`` more is to come."""
        answer = self.leaf if self._ends_with("assistant") else None
        answer = answer or Message(parent=self._leaf, role="assistant", text="")
        changed = replace(answer, text=text, ending=ending, receipt=receipt, stats=stats)
        return self.add(replace(changed, switch_lines=switch_lines, model=model, thought=thought))

    def add(self, message: Message) -> Message:
        """Add or replace a message and end the path with it."""
        self._put(message)
        self.go_to(message.id)
        return message

    def pin(self, id: str, pinned: bool) -> Message:
        """Pin a message, or no longer; it as it is then."""
        self.messages[id] = replace(self.messages[id], pinned=pinned)
        return self.messages[id]

    def mark_switches(self, id: str, changes: tuple[ModeChange, ...]) -> None:
        """Put other live switches in place of those of an answer."""
        self.messages[id] = replace(self.messages[id], switch_lines=changes)

    def withdraw(self) -> str:
        """Take back the last question and return its text; one that has answers on other branches stays, for ``""``."""
        question = self.leaf
        if question is None or question.role != "user":
            return ""
        if self._below.get(question.id):
            self.select(question.id)
            return ""
        del self.messages[question.id]
        self._below[question.parent].remove(question.id)
        self.go_to(question.parent)
        return question.text

    def fork(self, id: str) -> Conversation:
        """Copy the path to the message ``id`` into a conversation of its own."""
        fork = Conversation(self.system, title=self.title, mode=self.mode, params=self.params)
        for message in self.path_to(id):
            fork.add(replace(message, id=new_id(), parent=fork._leaf))
        return fork

    # ---- choosing a path -------------------------------------------------------------------------

    def go_to(self, id: str | None) -> None:
        """End the path with the message ``id``, None before the first question; later ones stay in the tree."""
        self._leaf = id

    def select(self, id: str) -> None:
        """Lead the path through the message ``id`` to the newest message below it."""
        below = {id}
        newest = id
        for message in self.messages.values():
            if message.parent in below:
                below.add(message.id)
                newest = message.id
        self.go_to(newest)

    def rename(self, title: str) -> None:
        self.title = shorten(title)

    # ---- saving ----------------------------------------------------------------------------------

    def changes(self) -> Changes | None:
        """What is to be saved; None if nothing changed since it was, or nothing was said yet."""
        changes = Changes(
            id=self.id,
            created=self.created,
            header=Header(
                title=self.title, system=self.system, leaf=self._leaf, mode=self.mode, params=dict(self.params)
            ),
            messages=dict(self.messages),
            saved_header=self._saved_header,
            saved=self._saved,
        )
        is_header_due = changes.header != changes.saved_header and (self.messages or self._saved)
        return changes if is_header_due or changes.changed or changes.removed else None

    def mark_saved(self, changes: Changes) -> None:
        """``changes`` are on disk; what was said since they were asked for is not."""
        self._saved_header, self._saved = changes.header, dict(changes.messages)

    def _put(self, message: Message) -> None:
        """Add a message to the tree, or replace it where it stands."""
        if message.id not in self.messages:
            self._below.setdefault(message.parent, []).append(message.id)
        self.messages[message.id] = message

    def _whole(self) -> tuple[Turn, ...]:
        """The turns of the path with the system prompt before them."""
        return (*((Turn("system", self.system),) if self.system else ()), *self.turns)

    @property
    def _id_of_kept(self) -> str:
        """The id by which the engine keeps its K/V; "" for one that leaves nothing on disk."""
        return self.id if self.is_kept else ""

    def _ends_with(self, role: str) -> bool:
        return self.leaf is not None and self.leaf.role == role


def shorten(text: str) -> str:
    """The beginning of a text as a title of one line."""
    line = " ".join(text.split())
    return line if len(line) <= TITLE_CHARACTERS else f"{line[: TITLE_CHARACTERS - 1].rstrip()}…"


def marks(changes: Sequence[ModeChange]) -> list[str]:
    """The mark of each switch: numbered where there are several."""
    return [MARK + (str(number).translate(DIGITS) if len(changes) > 1 else "") for number in range(1, len(changes) + 1)]


def notes(changes: Sequence[ModeChange]) -> list[str]:
    """What each switch was, behind its mark."""
    return [f"{mark} {change.line}" for mark, change in zip(marks(changes), changes, strict=True)]


def with_marks(text: str, changes: Sequence[ModeChange], is_over: bool) -> str:
    """``text`` with a mark behind the word that was being said at each switch, in no code; before and after it none.

    While the text goes on a mark waits for the end of that word: what is drawn stays as it is.
    """
    searched, end = f"{text}\n" if is_over else text, len(text)
    for mark, change in reversed([*zip(marks(changes), changes, strict=True)]):
        behind = _word_end(searched, change.chars) if 0 < change.chars < end else None
        if behind is not None:
            text = f"{text[:behind]} {mark}{text[behind:]}"
    return text


def _word_end(text: str, place: int) -> int | None:
    """The end of the word at ``place`` or of the next one, outside of code."""
    outside = _code_end(text, place)
    while outside is not None:
        words = _WORD_END.finditer(text, max(outside - MOST_PUNCTUATION, 0))
        end = next((found.end() for found in words if found.end() >= outside), None)
        if end is None or (outside := _code_end(text, end)) == end:
            return end
    return None


def _code_end(text: str, place: int) -> int | None:
    """The end of the fenced code that ``place`` is in, ``place`` where it is in none; None where the code goes on."""
    opened = ""
    for fence in _FENCE.finditer(text):
        if not opened:
            if fence.start() > place:
                return place
            opened = fence[1]
        elif fence[1].startswith(opened):
            if fence.end() >= place:
                return fence.end()
            opened = ""
    return None if opened else place


def read_stats(values: object) -> Stats | None:
    """Stats from what JSON held; what another version had beside is left out, all where a figure means another kind."""
    try:
        return _STATS.validate_python(values)
    except ValueError:
        return None


def in_words(params: Params) -> list[str]:
    """``window 64``, and of another mode's that auto's hold ``speculative window 64``."""
    found = list[str]()
    for name, value in params.items():
        held = value if isinstance(value, Mapping) else {"": value}
        found += [" ".join(filter(None, (name, inner, str(one)))) for inner, one in held.items() if one is not None]
    return found
