"""What the controller needs of a screen, as protocols, so that it runs without Textual; remedies for errors."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from shlex import quote
from typing import Literal, Protocol

from kvchat.config import modes
from kvchat.conversations.conversation import Message
from kvchat.conversations.store import Summary
from kvchat.errors import KvchatError, UsageError
from kvchat.models.catalog import FoundModel
from kvchat.protocol.figures import Snapshot
from kvchat.protocol.messages import Details, Load, Switched
from kvchat.tui.state import ChatState, Footed, RunningComparison, SwitchLine

Severity = Literal["information", "warning", "error"]
Find = Callable[[], Awaitable[list[FoundModel]]]


class QuestionView(Protocol):
    """A question in the transcript; dimmed while it is queued."""

    text: str

    def send(self, message: Message, footer: str) -> None:
        """Show the question as sent: it is ``message`` from now on."""

    def remove(self) -> Awaitable[None]:
        """Take the question out of the transcript."""


class AnswerView(Protocol):
    """An answer in the transcript; ``text`` is what it shows so far, ``thought`` as ``Message.thought``."""

    text: str
    thought: str

    def wait(self, words: str) -> None:
        """Show what the engine does before the first word."""

    def resume(self, message: Message) -> None:
        """Begin with the text of an answer that is continued."""

    def feed(self, text: str) -> None:
        """Append text."""

    async def withdraw(self, chars: int) -> str:
        """Remove the last ``chars`` characters and return them."""

    async def finish(self, message: Message, footer: str) -> None:
        """Show the complete answer with the line under it."""

    def remove(self) -> Awaitable[None]:
        """Take the answer out of the transcript."""


class ChatView(Protocol):
    """The screen as the controller sees it."""

    @property
    def chosen(self) -> str | None:
        """The id of the message chosen in the transcript."""

    @property
    def lists_conversations(self) -> bool:
        """True if ``show_conversations`` shows a list; otherwise the database is not searched."""

    async def show_messages(self, messages: Sequence[Footed], below: str | None) -> None:
        """Replace everything below the message ``below`` by messages with their footers; None replaces all.

        Queued questions stay.
        """

    def show_footer(self, message: Message, footer: str) -> None:
        """Show another footer under a message of the transcript."""

    async def add_question(self, text: str, queued: bool) -> QuestionView:
        """Add a question to the transcript."""

    async def add_command(self, line: str) -> QuestionView:
        """Add a command that is queued."""

    async def add_answer(self) -> AnswerView:
        """Add an empty answer."""

    async def add_switch(self, switched: Switched, speed: float | None) -> SwitchLine:
        """Mark a switch in the transcript, ribbon and timeline; ``speed`` is that before it, in tokens/s."""

    def add_way_back(self, switched: Switched) -> None:
        """Report a switch that undoes the last one, with no token between, if the last one's line cannot be removed."""

    def add_note(self, text: str, struck: str = "") -> None:
        """Add a quiet note, followed by ``struck`` with a line through it."""

    def add_error(self, error: KvchatError, remedies: Sequence[Remedy] = ()) -> None:
        """Add an error to the transcript, and its remedies."""

    def toast(self, text: str, title: str = "", severity: Severity = "information", timeout: float = 5.0) -> None:
        """Show a notice for ``timeout`` seconds."""

    def log_event(self, text: str) -> None:
        """Add a line to the event log."""

    def show_state(self, state: ChatState) -> None:
        """Show model, mode, parameters and phase."""

    def show_queue(self, waiting: int, is_held: bool) -> None:
        """Show how many questions wait, and whether the user has to release them."""

    def show_snapshot(self, snapshot: Snapshot | None, answering: bool = False) -> None:
        """Show a snapshot; None without an engine."""

    def show_details(self, details: Details) -> None:
        """Show what each layer and KV head reads; called only while details are watched."""

    def show_page_text(self, start: int, text: str) -> None:
        """Show the stored text that begins at token ``start``."""

    def show_comparison(self, shown: RunningComparison) -> None:
        """Show a comparison and its progress."""

    def show_conversations(self, kept: Sequence[Summary], current: str) -> None:
        """List the saved conversations, the most recently changed first; ``current`` is the id of the one shown."""

    async def show_models(self, find: Find) -> None:
        """List the models, so that one can be chosen."""

    def restore_prompt(self, text: str) -> bool:
        """Return a text to the prompt; return False if another text has been begun there."""

    def copy(self, text: str) -> None:
        """Copy a text to the clipboard."""


@dataclass(frozen=True)
class Remedy:
    """Slash commands, ``lines``, to run one after the other; ``doc`` says what they do."""

    doc: str
    lines: tuple[str, ...]


def remedies(state: ChatState, is_cut_off: bool) -> tuple[Remedy, ...]:
    """Return remedies when memory has run out: halve the budget, use the mode that holds least, unload the model.

    The first two continue an answer that ``is_cut_off``; otherwise its question is back in the prompt.
    """
    after = ("/continue",) if is_cut_off else ()
    then = " and continue" if is_cut_off else ", then ask again"
    found, budget = [], state.params.get("budget")
    if isinstance(budget, int):
        with suppress(UsageError):  # the mode needs more than half
            modes.parse(state.mode, {**state.params, "budget": budget // 2})
            found.append(Remedy(f"halve the budget{then}", (f"/budget {budget // 2}", *after)))
    if state.mode != modes.HOLDS_LEAST:
        found.append(Remedy(f"use the mode that needs the least memory{then}", (f"/mode {modes.HOLDS_LEAST}", *after)))
    return (*found, Remedy("unload the model to free its memory", ("/unload",)))


def context_full_remedy(state: ChatState) -> Remedy:
    """Return the remedy for a full context: the mode that has no end, or a new conversation if that is refused."""
    prices = state.snapshot.prices if state.snapshot else ()
    if state.is_served or any(price.refusal for price in prices if price.mode == modes.HOLDS_LEAST):
        return Remedy("start another conversation", ("/new",))
    return Remedy("continue this conversation without reading its middle", (f"/mode {modes.HOLDS_LEAST}",))


def load_anyway(load: Load, settings: Load) -> tuple[Remedy, ...]:
    """Return the remedy for a model that does not fit: load it anyway, with what ``settings`` lack; only once."""
    if load.force:
        return ()
    given = (name for name in ("device", "dtype", "quantize") if getattr(load, name) != getattr(settings, name))
    words = (quote(load.model), *(f"{name}={getattr(load, name)}" for name in given), "force=true")
    return (Remedy("load it anyway", (f"/model {' '.join(words)}",)),)
