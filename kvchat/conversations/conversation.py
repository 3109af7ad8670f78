"""A conversation: a tree of messages, and the path through it that is shown and sent to the model.

Editing a question or answering it again adds a sibling; no message is replaced. An answer also keeps its figures and
live switches: a small mark in the text at each switch, and a line below the text that describes it.
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
CUT_OFF = "cut off"  # the ending of an answer if the engine ended first
MARK = "┃"  # as in the ribbon
DIGITS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
MARKED = re.compile(f"{MARK}[⁰¹²³⁴⁵⁶⁷⁸⁹]*(?=\\s|$)")
MOST_PUNCTUATION = 8  # characters of punctuation that are searched between a word and a switch
_WORD_END = re.compile(r"[^\W_][.,;:!?…\"'”’)\]]*(?=\s)|[、。，！？；：]")
_FENCE = re.compile(r"^[ \t>]*(`{3,}|~{3,})[^\n]*", re.MULTILINE)
_STATS = TypeAdapter(Stats)


def new_id() -> str:
    return uuid.uuid4().hex


@dataclass(frozen=True)
class ModeChange:
    """A live switch after ``chars`` characters of an answer, at ``position`` stored tokens; ``line`` describes it.

    ``mode`` is the mode that was entered, "" if only parameters changed.
    """

    chars: Count
    line: str
    position: Count = 0
    mode: str = ""


@dataclass(frozen=True, kw_only=True)
class Message:
    """A question (``role`` user) or an answer (assistant) below ``parent``, which is None for the first question.

    ``created`` is in seconds since the epoch. ``ending`` says why an answer ended, and is "" while it is generated;
    ``receipt`` and ``stats`` are its cost. Every mode reads a ``pinned`` message. ``switch_lines`` are the live
    switches from an answer's beginning to the next question. ``model`` wrote the answer. ``thought`` is the tag that
    ends its thought, if the text alone does not show it.
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
        """The text with a mark at each live switch, and a line about each below it."""
        return "\n\n".join((with_marks(self.text, self.switch_lines, is_over=True), *notes(self.switch_lines)))

    @property
    def turn(self) -> Turn:
        return Turn(self.role, self.text, self.pinned, self.created, self.thought)


@dataclass(frozen=True, kw_only=True)
class Header:
    """The saved properties of a conversation, without messages; ``leaf`` is the id of the last message of its path."""

    title: str
    system: str | None
    leaf: str | None
    mode: str
    params: Params


@dataclass(frozen=True, kw_only=True)
class Changes:
    """A conversation as it is now (``header``, ``messages``) and as it was last written or read.

    ``saved_header`` is None for a new conversation. Only differences are written, because another application may have
    changed the rest.
    """

    id: str
    created: float
    header: Header
    messages: Mapping[str, Message]
    saved_header: Header | None
    saved: Mapping[str, Message]

    @property
    def changed(self) -> list[Message]:
        """The messages that are new or differ from the saved ones."""
        return [message for id, message in self.messages.items() if self.saved.get(id) is not message]

    @property
    def removed(self) -> list[str]:
        """The ids of questions that were withdrawn."""
        return [id for id in self.saved if id not in self.messages]


class Conversation:
    """A tree of messages; questions and answers alternate along every path.

    ``leaf`` is the last message of the current path. ``messages`` are in the order in which they were added.
    ``system`` is the system prompt, or None. ``mode`` is its last KV mode and ``params`` the parameters set for it;
    both are empty if unknown. A conversation that is not ``is_kept`` leaves nothing on disk.
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
        self._children: dict[str | None, list[str]] = {}  # ids, in the order of ``messages``
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
        """The last message of the path, or None."""
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
        """The cost of each answer, on every branch."""
        return [message.stats for message in self.messages.values() if message.stats]

    def path_to(self, id: str | None) -> list[Message]:
        """Return the messages from the first question to the message ``id``."""
        path = []
        while message := self.messages.get(id or ""):
            path.append(message)
            id = message.parent
        return path[::-1]

    def siblings(self, id: str) -> list[Message]:
        """Return the messages with the same parent as ``id``, including it."""
        return [self.messages[sibling] for sibling in self._children[self.messages[id].parent]]

    def last_text(self) -> str:
        """Return the text of the leaf, or ""."""
        return self.leaf.text if self.leaf else ""

    def command(self, sampling: Sampling) -> Chat:
        """Return the command to answer the last question of the path, or to continue its last answer."""
        return Chat(self._whole(), sampling, self._id_of_kept)

    def to_resume(self) -> Resume:
        """Return the command to make this the engine's current conversation."""
        return Resume(self._id_of_kept, self._whole())

    # ---- adding ----------------------------------------------------------------------------------

    def ask(self, text: str, pinned: bool = False) -> Message:
        """Add a question below the last answer; if the path ends with a question, add it as a sibling."""
        parent = self._leaf if self._ends_with("assistant") else self.leaf.parent if self.leaf else None
        if not self.title:
            self.title = shorten(attachments.written(text))
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
        """Set the text of the answer to the last question; without an ``ending`` it is unfinished."""
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
        """Pin or unpin a message; return it."""
        self.messages[id] = replace(self.messages[id], pinned=pinned)
        return self.messages[id]

    def mark_switches(self, id: str, changes: tuple[ModeChange, ...]) -> None:
        """Replace the live switches of an answer."""
        self.messages[id] = replace(self.messages[id], switch_lines=changes)

    def withdraw(self) -> str:
        """Remove the last question and return its text; if it has answers, select the newest and return ""."""
        question = self.leaf
        if question is None or question.role != "user":
            return ""
        if self._children.get(question.id):
            self.select(question.id)
            return ""
        del self.messages[question.id]
        self._children[question.parent].remove(question.id)
        self.go_to(question.parent)
        return question.text

    def fork(self, id: str) -> Conversation:
        """Copy the path to the message ``id`` into a new conversation."""
        fork = Conversation(self.system, title=self.title, mode=self.mode, params=self.params)
        for message in self.path_to(id):
            fork.add(replace(message, id=new_id(), parent=fork._leaf))
        return fork

    # ---- choosing a path -------------------------------------------------------------------------

    def go_to(self, id: str | None) -> None:
        """End the path at the message ``id``, or before the first question (None); the tree does not change."""
        self._leaf = id

    def select(self, id: str) -> None:
        """Select the path through the message ``id`` to the newest message below it."""
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
        """Return what to save; None if nothing changed since the last save, or there is no message yet."""
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
        """Record that ``changes`` are on disk; later ones are not."""
        self._saved_header, self._saved = changes.header, dict(changes.messages)

    def _put(self, message: Message) -> None:
        """Add a message to the tree, or replace it in its place."""
        if message.id not in self.messages:
            self._children.setdefault(message.parent, []).append(message.id)
        self.messages[message.id] = message

    def _whole(self) -> tuple[Turn, ...]:
        """Return the system prompt and the turns of the path."""
        return (*((Turn("system", self.system),) if self.system else ()), *self.turns)

    @property
    def _id_of_kept(self) -> str:
        """The id under which the engine stores K/V; "" for a conversation that leaves nothing on disk."""
        return self.id if self.is_kept else ""

    def _ends_with(self, role: str) -> bool:
        return self.leaf is not None and self.leaf.role == role


def shorten(text: str) -> str:
    """Return the beginning of a text as a title on one line."""
    line = " ".join(text.split())
    return line if len(line) <= TITLE_CHARACTERS else f"{line[: TITLE_CHARACTERS - 1].rstrip()}…"


def marks(changes: Sequence[ModeChange]) -> list[str]:
    """Return the mark of each switch, numbered if there are several."""
    return [MARK + (str(number).translate(DIGITS) if len(changes) > 1 else "") for number in range(1, len(changes) + 1)]


def notes(changes: Sequence[ModeChange]) -> list[str]:
    """Return the line about each switch, after its mark."""
    return [f"{mark} {change.line}" for mark, change in zip(marks(changes), changes, strict=True)]


def with_marks(text: str, changes: Sequence[ModeChange], is_over: bool) -> str:
    """Return ``text`` with a mark after the word at each switch inside it, but never in code.

    Until the answer ``is_over``, a mark appears only at the end of its word, so that text on screen never changes.
    """
    searched, length = f"{text}\n" if is_over else text, len(text)
    for mark, change in reversed([*zip(marks(changes), changes, strict=True)]):
        end = _word_end(searched, change.chars) if 0 < change.chars < length else None
        if end is not None:
            text = f"{text[:end]} {mark}{text[end:]}"
    return text


def _word_end(text: str, place: int) -> int | None:
    """Return the end of the word at ``place`` or of the next word, outside of code; None if there is none yet."""
    outside = _code_end(text, place)
    while outside is not None:
        words = _WORD_END.finditer(text, max(outside - MOST_PUNCTUATION, 0))
        end = next((found.end() for found in words if found.end() >= outside), None)
        if end is None or (outside := _code_end(text, end)) == end:
            return end
    return None


def _code_end(text: str, place: int) -> int | None:
    """Return the end of the fenced code around ``place``, ``place`` outside of code, or None if the code is open."""
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
    """Parse stats from JSON; drop unknown figures of another version, and all if one has another type."""
    try:
        return _STATS.validate_python(values)
    except ValueError:
        return None


def in_words(params: Params) -> list[str]:
    """Return parameters as text: ``window 64``, or inside those of auto ``speculative window 64``."""
    found = list[str]()
    for name, value in params.items():
        values = value if isinstance(value, Mapping) else {"": value}
        found += [" ".join(filter(None, (name, of, str(each)))) for of, each in values.items() if each is not None]
    return found
