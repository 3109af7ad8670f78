"""The K/V of conversations in files of a llama-server that was started with ``--slot-save-path``.

A conversation's slot is saved when another conversation becomes the current one and at the end, not after each answer,
because it is written whole each time. It is restored if no slot has as many tokens as were saved. The server deletes no
files, so a deleted conversation's file is overwritten with an empty slot of 36 bytes, when its server is next used.
"""

from __future__ import annotations

import time
from pathlib import Path

import httpx2

from kvchat import paths
from kvchat.protocol.messages import Event, Noted, Resumed
from kvchat.remote import slot_files
from kvchat.remote.servers import Address, said, slots_of, whole

ACT_S = 60.0  # it may write gigabytes
NOT_OFFERED = 501
NO_FILE = "/"  # an invalid name


class Slots:
    """The slots of the server at an address, and the current conversation.

    Each method raises OSError if the list of files cannot be read or written, and ignores a server that does not
    answer.
    """

    def __init__(self, address: Address, http: httpx2.AsyncClient) -> None:
        self._address, self._root, self._http = address, address.root, http
        self._current = ""
        self._unsaved = 0  # tokens in the current conversation's slot; 0 if they are saved

    async def is_offered(self) -> bool:
        """True if the server saves slots; otherwise it answers ``NOT_OFFERED`` before it rejects the name."""
        reply = await self._post(0, "save", NO_FILE)
        return reply is not None and reply.status_code != NOT_OFFERED

    def note(self, tokens: int) -> None:
        """Note that an answer ended with so many tokens of the current conversation."""
        self._unsaved = tokens

    async def go_to(self, conversation: str) -> list[Event]:
        """Save the current conversation and restore another; ``Resumed`` if the server had it in a file."""
        if conversation == self._current:
            return []
        await self.empty_deleted()
        saved = await self.save()
        self._current, self._unsaved = conversation, 0
        return [*saved, *await self._restore()]

    async def save(self) -> list[Event]:
        """Save the current conversation if it has grown; ``Noted`` if the server cannot."""
        slot = await self._nearest(self._unsaved) if self._current and self._unsaved else None
        if slot is None:
            return []
        slot_files.note(self._root, self._current, self._unsaved)  # first, because closing may not wait for the reply
        reply = await self._post(slot, "save", _file(self._current))
        self._unsaved = 0
        if saved := _counted(reply, "n_saved"):
            slot_files.note(self._root, self._current, saved)
        return [] if saved or reply is None else [Noted(f"The server cannot save the K/V of this chat: {said(reply)}")]

    async def empty_deleted(self) -> None:
        """Empty the files of deleted conversations."""
        listed = slot_files.known().get(self._root, {})
        deleted = [conversation for conversation, tokens in listed.items() if tokens == slot_files.DELETED]
        if not deleted:
            return
        if self._current in deleted:
            self._current, tokens, self._unsaved = "", self._unsaved, 0
        else:
            await self.save()  # there may be only one slot
            tokens = 0
        slot = await self._nearest(tokens)
        if slot is None or not _is_done(await self._post(slot, "erase")):
            return
        for conversation in deleted:
            if _is_done(await self._post(slot, "save", _file(conversation))):
                slot_files.note(self._root, conversation, None)
        await self._restore()

    async def _restore(self) -> list[Event]:
        tokens, idle = slot_files.known().get(self._root, {}).get(self._current, 0), await self._idle()
        if tokens <= 0 or not idle or tokens in idle.values():  # the last: a slot still has it
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
        """The number of tokens in each slot that is not processing."""
        try:
            slots = await slots_of(self._address, self._http, ACT_S)  # a busy server answers after its batch
        except (httpx2.HTTPError, ValueError):
            return {}
        idle = (slot for slot in slots if not slot.get("is_processing"))
        return {whole(slot["id"]): whole(slot.get("n_prompt_tokens")) for slot in idle}

    async def _nearest(self, tokens: int) -> int | None:
        """The idle slot whose number of tokens is nearest, because the server does not say which slot answered."""
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
    """The number of tokens in the server's reply; 0 if it refused or did not answer."""
    return whole(reply.json().get(name)) if reply is not None and reply.is_success else 0
