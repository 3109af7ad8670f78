"""The conversations on disk as the user handles them: begun, gone on with, copied, deleted, brought back."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from kvchat.config import modes
from kvchat.conversations.conversation import Conversation
from kvchat.conversations.store import Summary
from kvchat.errors import KvchatError, UsageError
from kvchat.protocol.figures import Params
from kvchat.protocol.messages import Command, Forget, Switch
from kvchat.tui.answering.answers import Answers
from kvchat.tui.client import EngineClient
from kvchat.tui.config import AppConfig
from kvchat.tui.kept.archive import Archive
from kvchat.tui.state import ChatState, Phase
from kvchat.tui.view import ChatView


class ModeOfConversation:
    """Brings back the mode and the parameters that a conversation was in, and tells it once they are in force.

    ``is_due``: they are not yet.
    """

    def __init__(self, state: ChatState, client: EngineClient, view: ChatView) -> None:
        self._state = state
        self._client = client
        self._view = view
        self.is_due = False

    def restore(self, is_ready: bool) -> None:
        """Switch to the mode that the conversation was in, unless it is in force; once a model ``is_ready``."""
        kept, state = self._state.conversation, self._state
        self.is_due = False
        if not kept.mode:
            return
        try:
            modes.parse(kept.mode, kept.params)
        except UsageError as gone:
            self._view.add_note(f"This conversation was in {_described(kept)}; it goes on in {state.mode}. {gone}")
            return
        changes = self._changes(kept)
        self.is_due = bool(changes) or kept.mode != (state.wanted or state.mode)
        if self.is_due and is_ready:
            state.wanted = kept.mode
            with suppress(UsageError):  # an engine that is gone: as soon as the next one is ready
                self._client.send(Switch(kept.mode, changes))

    def refused(self) -> None:
        """A switch was refused, which is told."""
        self.is_due = False

    def told(self) -> bool:
        """Something was switched to; whether it is told here, because it was this mode."""
        is_told, self.is_due = self.is_due and self._state.mode == self._state.conversation.mode, False
        if is_told:
            self._view.add_note(f"Back in {_described(self._state.conversation)}, which this conversation was in.")
        return is_told

    def _changes(self, kept: Conversation) -> Params:
        """What has to be asked for so that the mode has the conversation's parameters and no others."""
        now = modes.asked_for(kept.mode, self._state.settings, self._state.given)
        fields = modes.registered()[kept.mode].model_fields
        unset = {name: fields[name].default for name in now}
        wanted = {**unset, **kept.params}
        return {name: value for name, value in wanted.items() if now.get(name, fields[name].default) != value}


def _described(kept: Conversation) -> str:
    """``speculative mode, budget 128``"""
    chosen = [f"{name} {value}" for name, value in kept.params.items() if value is not None]
    return ", ".join((f"{kept.mode} mode", *chosen))


CHECKPOINT_S = 0.5  # at most twice that is lost of an answer, however the application ends


class KeptConversations:
    """The part of ``ChatController`` that goes from one conversation to another, saves and lists them."""

    view: ChatView
    state: ChatState
    archive: Archive
    answers: Answers
    mode_of_conversation: ModeOfConversation
    _config: AppConfig
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
                await self.open(latest.id, is_first=True)
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
        await self._exchange(self._begun())

    async def open(self, id: str, message: str = "", is_first: bool = False) -> None:
        """Go on with another conversation, on the branch of ``message`` if it is named, in the mode that it was in.

        Over that goes what was asked for on the command line, where it is the first that is opened.

        Raises:
            KvchatError: there is none with this id, or it cannot be read.
        """
        await self._save()
        conversation = await self.archive.load(id)
        if message:
            conversation.select(message)
        asked = self._config
        if is_first and asked.asked_mode not in ("", conversation.mode):
            conversation.mode = ""
        elif is_first:
            conversation.params |= asked.asked_params.get(conversation.mode, {})
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
        conversation.is_kept = self._config.keeps_new
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
        self.mode_of_conversation.restore(self.state.phase not in (Phase.LOADING, Phase.DOWN))
        self.answers.take_up()

    def _begun(self) -> Conversation:
        """A new conversation."""
        conversation = Conversation(self._system)
        conversation.is_kept = self._config.keeps_new
        return conversation

    async def _save(self) -> None:
        if self.state.conversation.is_kept:
            await self.archive.save(self.state.conversation)

    async def _list(self) -> None:
        """Show which conversations are kept, where they or the present one are others than when last shown."""
        present = self.state.conversation.id
        if self.view.lists_conversations and self._listed != (self.archive.writes, present):
            self._listed = (self.archive.writes, present)
            with suppress(KvchatError):  # told where a person asks for them
                self.view.show_conversations(await self.archive.search(""), present)
