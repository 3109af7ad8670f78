"""The K/V of conversations in files of llama-server, where it was started with ``--slot-save-path``.

A conversation's slot is saved when another conversation is gone over to and at the end, not after each answer: it is
written whole each time. It is restored where no slot has as many tokens as were saved. The server deletes no file, so
that of a deleted conversation is overwritten with an empty slot, which takes 36 bytes. A server that is not in use when
a conversation is deleted is told when it is used again.
"""

from __future__ import annotations

import time
from pathlib import Path

import httpx2

from kvchat import paths
from kvchat.protocol.messages import Event, Noted, Resumed
from kvchat.remote import slot_files
from kvchat.remote.servers import Address, said, slots_of, whole

ACT_S = 60.0  # gigabytes are written
NOT_OFFERED = 501
NO_FILE = "/"  # no name that the server takes


class Slots:
    """The slots of the server at an address, where one conversation is the current one.

    Each method raises OSError where the list of files cannot be read or written; a server that does not answer is
    passed by.
    """

    def __init__(self, address: Address, http: httpx2.AsyncClient) -> None:
        self._address, self._root, self._http = address, address.root, http
        self._current = ""
        self._unsaved = 0  # tokens in the current one's slot, where they are not in its file

    async def is_offered(self) -> bool:
        """True if the server saves slots: else it says so before it looks at the name, which is none."""
        reply = await self._post(0, "save", NO_FILE)
        return reply is not None and reply.status_code != NOT_OFFERED

    def note(self, tokens: int) -> None:
        """An answer is over, with so many tokens of the current conversation."""
        self._unsaved = tokens

    async def go_to(self, conversation: str) -> list[Event]:
        """Save the current conversation and restore another; ``Resumed`` where that brought something back."""
        if conversation == self._current:
            return []
        await self.empty_deleted()
        told = await self.save()
        self._current, self._unsaved = conversation, 0
        return [*told, *await self._restore()]

    async def save(self) -> list[Event]:
        """Save the current conversation, where it has grown; ``Noted`` if the server cannot."""
        slot = await self._nearest(self._unsaved) if self._current and self._unsaved else None
        if slot is None:
            return []
        slot_files.note(self._root, self._current, self._unsaved)  # first: at the end the reply may not be waited for
        reply = await self._post(slot, "save", _file(self._current))
        self._unsaved = 0
        if saved := _counted(reply, "n_saved"):
            slot_files.note(self._root, self._current, saved)
        return [] if saved or reply is None else [Noted(f"The server cannot save the K/V of this chat: {said(reply)}")]

    async def empty_deleted(self) -> None:
        """Leave nothing in the files of deleted conversations."""
        listed = slot_files.known().get(self._root, {})
        deleted = [conversation for conversation, tokens in listed.items() if tokens == slot_files.DELETED]
        if not deleted:
            return
        if self._current in deleted:
            self._current, near, self._unsaved = "", self._unsaved, 0
        else:
            await self.save()  # one slot may be all there is
            near = 0
        slot = await self._nearest(near)
        if slot is None or not _is_done(await self._post(slot, "erase")):
            return
        for conversation in deleted:
            if _is_done(await self._post(slot, "save", _file(conversation))):
                slot_files.note(self._root, conversation, None)
        await self._restore()

    async def _restore(self) -> list[Event]:
        tokens, idle = slot_files.known().get(self._root, {}).get(self._current, 0), await self._idle()
        if tokens <= 0 or not idle or tokens in idle.values():  # the server has it still
            return []
        began = time.monotonic()
        reply = await self._post(min(idle, key=idle.__getitem__), "restore", _file(self._current))
        if restored := _counted(reply, "n_restored"):
            return [Resumed(self._current, restored, time.monotonic() - began, "the server's disk")]
        if reply is None:
            return []
        slot_files.note(self._root, self._current, slot_files.USELESS)
        return [Noted(f"The server cannot restore the K/V of this chat, which is processed again: {said(reply)}")]

    async def _idle(self) -> dict[int, int]:
        """How many tokens are in each slot that is not at work."""
        try:
            slots = await slots_of(self._address, self._http, ACT_S)  # a busy one answers after its batch
        except (httpx2.HTTPError, ValueError):
            return {}
        return {whole(one["id"]): whole(one.get("n_prompt_tokens")) for one in slots if not one.get("is_processing")}

    async def _nearest(self, tokens: int) -> int | None:
        """The idle slot that has about so many tokens: the server does not say which one answered."""
        idle = await self._idle()
        return min(idle, key=lambda slot: abs(idle[slot] - tokens), default=None)

    async def _post(self, slot: int, action: str, file: str = NO_FILE) -> httpx2.Response | None:
        url = f"{self._root}/slots/{slot}?action={action}"
        try:
            return await self._http.post(url, json={"filename": file}, timeout=ACT_S)
        except httpx2.HTTPError:
            return None


def _file(conversation: str) -> str:
    return f"kvchat-{paths.saved_kv(Path(), conversation)}"


def _is_done(reply: httpx2.Response | None) -> bool:
    return reply is not None and reply.is_success


def _counted(reply: httpx2.Response | None, name: str) -> int:
    """The number of tokens that the server tells; 0 where it refuses or does not answer."""
    return whole(reply.json().get(name)) if reply is not None and reply.is_success else 0
