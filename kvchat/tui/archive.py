"""The conversation database, on its own thread so that a slow disk never blocks the screen; a conversation's mode."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from kvchat.config import modes
from kvchat.conversations.conversation import Conversation, in_words
from kvchat.conversations.store import ConversationStore, StoreError, Summary
from kvchat.errors import UsageError
from kvchat.protocol.client import EngineClient
from kvchat.protocol.figures import Params
from kvchat.protocol.messages import Switch
from kvchat.tui.state import ChatState
from kvchat.tui.view import ChatView

T = TypeVar("T")


class Archive:
    """Saves conversations; one that cannot be saved stays in memory until a later ``save`` succeeds.

    Without ``path``, or if it cannot be used, this run's conversations stay in memory. A database that is locked by
    another program or on a full disk is opened by the first ``save`` that can. ``writes`` counts the changes written.
    """

    def __init__(self, path: Path | None, view: ChatView) -> None:
        self.writes = 0
        self._path = path
        self._view = view
        self._thread = ThreadPoolExecutor(1, "conversations")
        self._store: ConversationStore | None = None
        self._unsaved: list[Conversation] = []
        self._saving = asyncio.Lock()
        self._is_closed = False
        self._problem: StoreError | None = None  # of the last save
        self._not_opened: StoreError | None = None  # why the database cannot be opened yet

    @property
    def problem(self) -> StoreError | None:
        """Why a change is not on disk; None if all changes are, or are meant to stay in memory."""
        return (self._problem or self._not_opened) if any(one.changes() for one in self._unsaved) else None

    async def open(self) -> bool:
        """Open the database; if it cannot be used, say so, keep the conversations in memory and return False."""
        try:
            await self._run(self._use, self._path)
        except StoreError as error:
            kept = "in memory until then" if error.is_passing else "only in memory"
            text = f"{error} This run keeps its conversations {kept}."
            self._view.toast(text, title="Conversations", severity="warning", timeout=20)
            if error.is_passing:
                self._not_opened = error
            else:
                await self._run(self._use, None)
            return False
        return True

    async def close(self) -> None:
        """Save what is unsaved, opening the database for it if necessary, and close; nothing is saved afterwards."""
        async with self._saving:
            if self._is_closed:
                return
            if self._store is None and any(one.changes() for one in self._unsaved):
                try:
                    # The thread may have opened it for a task that was canceled meanwhile.
                    await self._run(lambda: self._store or self._use(self._path))
                except StoreError as error:
                    self._show_problem(error)
            await self._save_all()
            await self._run(self._close)
            self._is_closed = True
        self._thread.shutdown()

    async def save(self, conversation: Conversation) -> None:
        """Write the conversation's changes, and others that could not be written before; show a problem once."""
        if conversation not in self._unsaved:
            self._unsaved.append(conversation)
        async with self._saving:
            if self._not_opened is not None:
                with suppress(StoreError):
                    await self._run(self._use, self._path, 0.0)
                    self._not_opened = None
                    text = "The database can be used again: the conversations kept in memory are saved."
                    self._view.toast(text, title="Conversations")
            await self._save_all()

    async def _save_all(self) -> None:
        """Write all unsaved changes; mark them as saved once they are on disk, because the caller may be canceled."""
        while self._store is not None and self._unsaved:
            conversation = self._unsaved[0]
            while (changes := conversation.changes()) is not None:  # it may grow while it is written
                try:
                    await self._run(self._store.save, changes)
                except StoreError as error:
                    self._show_problem(error)
                    return
                conversation.mark_saved(changes)
                self.writes += 1
            self._unsaved.remove(conversation)
            self._problem = None

    async def search(self, text: str) -> list[Summary]:
        """Return the conversations that contain ``text`` (all if it is empty), the most recently changed first."""
        return await self._ask(lambda store: store.search(text))

    async def all(self) -> list[Summary]:
        """Return all conversations, the most recently changed first; commands number them in this order, from 1."""
        return await self._ask(lambda store: store.recent(limit=-1))

    async def latest(self) -> Summary | None:
        return await self._ask(lambda store: store.latest())

    async def load(self, id: str) -> Conversation:
        """Return a conversation, from memory if it could not be saved yet.

        Raises:
            KvchatError: no conversation has this id, or it cannot be read.
        """
        for unsaved in self._unsaved:
            if unsaved.id == id:
                return unsaved
        return await self._ask(lambda store: store.load(id))

    async def rename(self, id: str, title: str) -> None:
        await self._ask(lambda store: store.rename(id, title))
        self.writes += 1

    async def delete(self, id: str) -> None:
        """Delete a conversation; ``restore`` brings it back."""
        await self._ask(lambda store: store.delete(id))
        self.writes += 1

    async def restore(self, id: str) -> None:
        await self._ask(lambda store: store.restore(id))
        self.writes += 1

    def _use(self, path: Path | None, busy_s: float | None = None) -> ConversationStore:
        self._store = ConversationStore(path, busy_s)
        return self._store

    def _close(self) -> None:
        store, self._store = self._store, None
        if store is not None:
            store.close()

    def _opened(self) -> ConversationStore:
        if self._store is None:
            raise self._not_opened or StoreError("The conversations are not open yet.", hint="Try again in a moment.")
        return self._store

    async def _ask(self, work: Callable[[ConversationStore], T]) -> T:
        """Run ``work`` on the database that is open once the thread is free: it may have been replaced meanwhile."""
        self._opened()
        return await self._run(lambda: work(self._opened()))

    async def _run(self, function: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    def _show_problem(self, error: StoreError) -> None:
        if self._problem is None:
            text = f"{error} The conversation stays in memory; kvchat keeps trying to save it."
            self._view.toast(text, title="Not saved", severity="error", timeout=20)
        self._problem = error


@dataclass(eq=False)
class ModeOfConversation:
    """Restores a conversation's mode and parameters, and reports when they take effect; ``is_due`` until then."""

    state: ChatState
    client: EngineClient
    view: ChatView
    is_due: bool = False

    def restore(self, is_ready: bool) -> None:
        """Switch to the conversation's mode, unless it is the current one, as soon as a model ``is_ready``."""
        conversation, state = self.state.conversation, self.state
        self.is_due = False
        if not conversation.mode or state.is_served:
            return
        try:
            for one, params in modes.by_mode(conversation.mode, conversation.params).items():
                modes.parse(one, params)
        except UsageError as error:
            self.view.add_note(f"This conversation used {self._in_words}; it continues in {state.mode}. {error}")
            return
        changes = self._changes()
        self.is_due = bool(changes) or conversation.mode != (state.wanted or state.asked)
        if self.is_due and is_ready:
            state.wanted = conversation.mode
            with suppress(UsageError):  # the engine is gone: switched once the next one is ready
                self.client.send(Switch(conversation.mode, changes))

    def report_switch(self) -> bool:
        """Report a switch to the conversation's mode; return False for another switch, which the caller reports."""
        is_restored, self.is_due = self.is_due and self.state.asked == self.state.conversation.mode, False
        if is_restored:
            self.view.add_note(f"Back in {self._in_words}, the mode of this conversation.")
        return is_restored

    def _changes(self) -> Params:
        """Return the parameters to change so that the mode has exactly those of the conversation."""
        conversation = self.state.conversation
        in_force = modes.to_keep(conversation.mode, self.state.settings, self.state.given)
        now, then = (modes.by_mode(conversation.mode, params) for params in (in_force, conversation.params))
        changes = dict[str, Params]()
        for one in now | then:
            default = {name: field.default for name, field in modes.choosable()[one].model_fields.items()}
            is_now = default | now.get(one, {})
            wanted = {**{name: default[name] for name in now.get(one, {})}, **then.get(one, {})}
            changes[one] = {name: value for name, value in wanted.items() if is_now[name] != value}
        return modes.together(conversation.mode, changes.pop(conversation.mode), changes)

    @property
    def _in_words(self) -> str:
        """The conversation's mode and parameters, such as ``speculative mode, budget 128``."""
        conversation = self.state.conversation
        return ", ".join((f"{conversation.mode} mode", *in_words(conversation.params)))
