"""The conversations on disk as the user handles them: begun, gone on with, copied, deleted, brought back."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from kvchat.conversations.conversation import Conversation
from kvchat.conversations.store import Summary
from kvchat.errors import KvchatError, UsageError
from kvchat.protocol.messages import Command, Forget
from kvchat.tui.answering.answers import Answers
from kvchat.tui.kept.archive import Archive
from kvchat.tui.state import ChatState
from kvchat.tui.view import ChatView

CHECKPOINT_S = 0.5  # at most twice that is lost of an answer, however the application ends


class KeptConversations:
    """The part of ``ChatController`` that goes from one conversation to another, saves and lists them."""

    view: ChatView
    state: ChatState
    archive: Archive
    answers: Answers
    _system: str | None
    _deleted: list[str]
    _listed: tuple[int, str] | None = None

    async def open_archive(self, resume: bool = False) -> Summary | None:
        """Open the database, and with ``resume`` the latest conversation; the latest one before that.

        A damaged one is told and left alone.
        """
        await self.archive.open()
        try:
            latest = await self.archive.latest()
            if resume and latest is not None:
                await self.open(latest.id)
        except KvchatError as error:
            self.view.toast(str(error), title="Conversations", severity="warning", timeout=20)
            return None
        if resume and latest is None:
            self.view.toast("There is no earlier conversation to go on with.", severity="warning")
        return latest

    async def keep(self) -> None:
        """Save what is said and answered, and list the conversations where that changed them, until canceled."""
        while True:
            await asyncio.sleep(CHECKPOINT_S)
            self.answers.checkpoint()
            await self._save()
            await self._list()

    async def new(self) -> None:
        """Begin a new conversation; a running answer is stopped, the present conversation is kept on disk."""
        await self._exchange(Conversation(self._system))

    async def open(self, id: str, message: str = "") -> None:
        """Go on with another conversation, on the branch of ``message`` if it is named.

        Raises:
            KvchatError: there is none with this id, or it cannot be read.
        """
        await self._save()
        conversation = await self.archive.load(id)
        if message:
            conversation.select(message)
        await self._exchange(conversation)

    async def fork(self) -> None:
        """Go on with a copy of the conversation up to the message chosen in the transcript, else of all of it.

        Raises:
            UsageError: nothing has been said yet.
        """
        end = self.view.chosen or (self.state.conversation.leaf.id if self.state.conversation.leaf else None)
        if end is None:
            raise UsageError("There is nothing to copy yet.", hint="Ask something first.")
        await self.take(self.state.conversation.fork(end))
        self.view.toast("This is a copy; the conversation it was copied from is as it was.")

    async def open_last(self) -> None:
        """Go on with the conversation written to last, besides the present one.

        Raises:
            UsageError: there is none.
        """
        await self._save()
        others = [one for one in await self.archive.search("") if one.id != self.state.conversation.id]
        if not others:
            raise UsageError("There is no earlier conversation.", hint="Ask something first.")
        await self.open(others[0].id)

    async def delete(self, id: str, title: str) -> None:
        """Delete a conversation; the present one gives way to a new one."""
        if id == self.state.conversation.id:
            await self.new()
        await self.archive.delete(id)
        if self.state.info is not None:
            self._send(Forget(id))  # after its file was set aside: what the engine wrote since is deleted
        self._deleted.append(id)
        self.view.toast(f"“{title}” is deleted; /restore brings it back within a day.", timeout=10)

    async def restore(self) -> None:
        """Bring the conversation deleted last back and go on with it.

        Raises:
            UsageError: none was deleted.
        """
        if not self._deleted:
            raise UsageError(
                "Nothing has been deleted since the application was started.",
                hint="/chats lists the conversations there are.",
            )
        await self.archive.restore(self._deleted[-1])
        await self.open(self._deleted.pop())

    async def rename(self, title: str, id: str = "") -> None:
        """Give the conversation ``id`` another title, or the present one."""
        if id in ("", self.state.conversation.id):
            self.state.conversation.rename(title)
            await self._save()
        else:
            await self.archive.rename(id, title)

    async def take(self, conversation: Conversation) -> None:
        """Go on with a conversation that is not on disk yet."""
        await self._exchange(conversation)
        await self._save()

    def stop(self) -> None:
        """Stop the answer in progress."""
        raise NotImplementedError

    def _send(self, command: Command) -> None:
        raise NotImplementedError

    async def _exchange(self, conversation: Conversation) -> None:
        """Stop the answer, save the conversation and show another."""
        self.stop()
        self.answers.leave()
        await self._save()
        self.state.exchange(conversation)
        self.view.show_state(self.state)
        await self.view.show_messages(self.state.footed(), below=None)
        self.view.show_snapshot(self.state.snapshot)
        self.answers.take_up()

    async def _save(self) -> None:
        await self.archive.save(self.state.conversation)

    async def _list(self) -> None:
        """Show which conversations are kept, where they or the present one are others than when last shown."""
        present = self.state.conversation.id
        if self.view.lists_conversations and self._listed != (self.archive.writes, present):
            self._listed = (self.archive.writes, present)
            with suppress(KvchatError):  # told where a person asks for them
                self.view.show_conversations(await self.archive.search(""), present)
