"""A view and a client that record what they are given: the controller's tests need no screen and no process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from kvchat.conversations.conversation import CUT_OFF, Message
from kvchat.conversations.store import Summary
from kvchat.errors import EngineError, KvchatError
from kvchat.protocol.figures import Snapshot
from kvchat.protocol.messages import Command, Details, Switched
from kvchat.tui.state import ChatState, Footed, Phase, RunningComparison
from kvchat.tui.view import Remedy

Hook = Callable[[], Coroutine[Any, Any, None]]


class FakeClient:
    """``sent`` holds the commands, ``starts`` counts processes; ``start_error`` is raised by starting.

    Closing and restarting wait until ``ended`` is set, as for a process that is slow to exit.
    """

    def __init__(self) -> None:
        self.sent: list[Command] = []
        self.starts = 0
        self.log_problem = ""
        self.is_closed = False
        self.forgotten = 0
        self.alive = True
        self.ended = asyncio.Event()
        self.ended.set()
        self.start_error: EngineError | None = None

    async def start(self) -> None:
        self.starts += 1
        self.alive = True
        if self.start_error:
            raise self.start_error

    def forget(self) -> None:
        self.forgotten += 1

    async def close(self) -> None:
        self.is_closed = True
        await self._end()

    async def restart(self) -> None:
        await self._end()
        await self.start()

    async def _end(self) -> None:
        self.alive = False
        await self.ended.wait()

    def send(self, command: Command) -> None:
        self.sent.append(command)


class FakeQuestion:
    def __init__(self, text: str, queued: bool) -> None:
        self.text, self.queued, self.removed = text, queued, False
        self.message = self.footer = ""

    def send(self, message: Message, footer: str) -> None:
        self.queued, self.message, self.footer = False, message.id, footer

    async def remove(self) -> None:
        self.removed = True


class FakeAnswer:
    def __init__(self) -> None:
        self.text = self.receipt = self.waiting = self.message = self.thought = ""
        self.stopped = self.removed = self.finished = False

    def wait(self, words: str) -> None:
        self.waiting = words

    def resume(self, message: Message) -> None:
        self.feed(message.text)

    def feed(self, text: str) -> None:
        self.text += text

    async def withdraw(self, chars: int) -> str:
        kept = len(self.text) - chars
        self.text, struck = self.text[:kept], self.text[kept:]
        return struck

    async def finish(self, message: Message, footer: str) -> None:
        self.message, self.text, self.receipt, self.finished = message.id, message.text, footer, True
        self.stopped = message.ending in ("stopped", CUT_OFF)

    async def remove(self) -> None:
        self.removed = True


class FakeSwitch:
    def __init__(self, switched: Switched, speed: float | None) -> None:
        self.switched, self.speed, self.line = switched, speed, f"{switched.before} → {switched.mode}"
        self.tokens = self.closed = 0
        self.removed = False

    @property
    def is_idle(self) -> bool:
        return not self.tokens

    async def remove(self) -> None:
        self.removed = True

    def count(self, tokens: int, now: float) -> None:
        self.tokens += tokens

    def close(self, now: float) -> None:
        self.closed += 1


class FakeView:
    """Everything shown, in order. ``while_mounting`` runs while a question is being added.

    ``shown`` holds the calls of ``show_messages``: texts, footers, and the id of the message above them.
    """

    def __init__(self) -> None:
        self.lists_conversations = True
        self.ways_back: list[Switched] = []
        self.conversations: tuple[list[str], str] = ([], "")
        self.questions: list[FakeQuestion] = []
        self.answers: list[FakeAnswer] = []
        self.switches: list[FakeSwitch] = []
        self.notes: list[str] = []
        self.errors: list[KvchatError] = []
        self.toasts: list[str] = []
        self.events: list[str] = []
        self.phases: list[Phase] = []
        self.snapshots: list[Snapshot | None] = []
        self.details: list[Details] = []
        self.comparisons: list[RunningComparison] = []
        self.page_texts: list[tuple[int, str]] = []
        self.prompt = self.clipboard = ""
        self.shown: list[tuple[list[str], list[str], str | None]] = []
        self.footers: dict[str, str] = {}
        self.are_models_shown = False
        self.chosen: str | None = None
        self.edited: str | None = None
        self.queue: tuple[int, bool] = (0, False)
        self.while_mounting: Hook | None = None

    async def show_messages(self, messages: Sequence[Footed], below: str | None) -> None:
        self.shown.append(([message.text for message, _ in messages], [footer for _, footer in messages], below))

    def show_footer(self, message: Message, footer: str) -> None:
        self.footers[message.id] = footer

    async def add_question(self, text: str, queued: bool) -> FakeQuestion:
        self.questions.append(FakeQuestion(text, queued))
        if self.while_mounting:
            await self.while_mounting()
        return self.questions[-1]

    async def add_command(self, line: str) -> FakeQuestion:
        return await self.add_question(line, queued=True)

    async def add_answer(self) -> FakeAnswer:
        self.answers.append(FakeAnswer())
        return self.answers[-1]

    async def add_switch(self, switched: Switched, speed: float | None) -> FakeSwitch:
        self.switches.append(FakeSwitch(switched, speed))
        return self.switches[-1]

    def add_way_back(self, switched: Switched) -> None:
        self.ways_back.append(switched)

    def add_note(self, text: str, struck: str = "") -> None:
        self.notes.append(text + struck)

    def add_error(self, error: KvchatError, remedies: Sequence[Remedy] = ()) -> None:
        self.remedies = [way.lines for way in remedies]
        self.errors.append(error)

    def toast(self, text: str, title: str = "", severity: str = "information", timeout: float = 5.0) -> None:
        self.toasts.append(text)

    def log_event(self, text: str) -> None:
        self.events.append(text)

    def show_state(self, state: ChatState) -> None:
        self.edited = state.edited
        if self.phases[-1:] != [state.phase]:
            self.phases.append(state.phase)

    def show_queue(self, waiting: int, is_held: bool) -> None:
        self.queue = (waiting, is_held)

    def show_snapshot(self, snapshot: Snapshot | None, answering: bool = False) -> None:
        self.snapshots.append(snapshot)

    def show_details(self, details: Details) -> None:
        self.details.append(details)

    def show_page_text(self, start: int, text: str) -> None:
        self.page_texts.append((start, text))

    def show_comparison(self, comparison: RunningComparison) -> None:
        self.comparisons.append(comparison)

    def show_conversations(self, kept: Sequence[Summary], current: str) -> None:
        self.conversations = ([summary.title for summary in kept], current)

    async def show_models(self, find: object) -> None:
        self.are_models_shown = True

    def restore_prompt(self, text: str) -> bool:
        is_empty = not self.prompt
        self.prompt = self.prompt or text
        return is_empty

    def copy(self, text: str) -> None:
        self.clipboard = text
