"""The conversations on disk, as the application uses them: on a thread of its own, so that no disk stops the screen."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from kvchat.conversations.conversation import Conversation
from kvchat.conversations.store import ConversationStore, StoreError, Summary
from kvchat.tui.view import ChatView

T = TypeVar("T")


class Archive:
    """Saves conversations; what cannot be saved stays in memory and is tried again with the next ``save``.

    ``path`` None, or one that cannot be used, keeps the conversations of this run in memory only. ``writes`` counts
    the changes of the database.
    """

    def __init__(self, path: Path | None, view: ChatView) -> None:
        self.writes = 0
        self._path = path
        self._view = view
        self._thread = ThreadPoolExecutor(1, "conversations")
        self._store: ConversationStore | None = None
        self._unsaved: list[Conversation] = []
        self._saving = asyncio.Lock()
        self._is_problem_shown = False

    async def open(self) -> None:
        """Open the database; a problem is shown, and the conversations are kept in memory."""
        try:
            await self._run(self._use, self._path)
        except StoreError as error:
            text = f"{error} The conversations of this run are kept in memory only."
            self._view.toast(text, title="Conversations", severity="warning", timeout=20)
            await self._run(self._use, None)

    async def close(self) -> None:
        """Close the database; nothing is saved afterwards."""
        store, self._store = self._store, None
        if store is not None:
            await self._run(store.close)
        self._thread.shutdown()
        if self._store is not None:  # it was being opened meanwhile
            self._store.close()

    async def save(self, conversation: Conversation) -> None:
        """Write what changed in it, and in others that could not be written before; a problem is shown once."""
        if conversation not in self._unsaved:
            self._unsaved.append(conversation)
        async with self._saving:
            while self._store is not None and self._unsaved:
                saved = self._unsaved.pop(0)  # one that changes while it is written is put there again
                changes = saved.take_changes()
                try:
                    if changes is not None:
                        await self._run(self._store.save, changes)
                        self.writes += 1
                except StoreError as error:
                    assert changes is not None
                    saved.put_back(changes)
                    if saved not in self._unsaved:
                        self._unsaved.insert(0, saved)
                    self._show_problem(error)
                    return
                self._is_problem_shown = False

    async def search(self, text: str) -> list[Summary]:
        """The conversations that say ``text``; for an empty text all, the one written to last first."""
        return await self._run(self._opened().search, text)

    async def latest(self) -> Summary | None:
        """The conversation written to last."""
        return await self._run(self._opened().latest)

    async def load(self, id: str) -> Conversation:
        """Read a conversation.

        Raises:
            KvchatError: there is none with this id, or it cannot be read.
        """
        return await self._run(self._opened().load, id)

    async def rename(self, id: str, title: str) -> None:
        """Give a conversation another title."""
        await self._run(self._opened().rename, id, title)
        self.writes += 1

    async def delete(self, id: str) -> None:
        """Delete a conversation; ``restore`` brings it back."""
        await self._run(self._opened().delete, id)
        self.writes += 1

    async def restore(self, id: str) -> None:
        """Bring a deleted conversation back."""
        await self._run(self._opened().restore, id)
        self.writes += 1

    def _use(self, path: Path | None) -> None:
        self._store = ConversationStore(path)

    def _opened(self) -> ConversationStore:
        if self._store is None:
            raise StoreError("The conversations are not open yet.", hint="Try again in a moment.")
        return self._store

    async def _run(self, function: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: function(*arguments))

    def _show_problem(self, error: StoreError) -> None:
        if not self._is_problem_shown:
            self._is_problem_shown = True
            text = f"{error} The conversation is kept in memory, and saving is tried again."
            self._view.toast(text, title="Not saved", severity="error", timeout=20)
