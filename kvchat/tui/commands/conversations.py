"""The commands for conversations and their branches."""

from __future__ import annotations

import asyncio
import os
from copy import copy
from pathlib import Path

from kvchat.conversations import export
from kvchat.errors import KvchatError, UsageError
from kvchat.tui.commands.chat import alone
from kvchat.tui.controller import ChatController
from kvchat.tui.prompt import arguments
from kvchat.tui.prompt.mentions import Part, unquoted

STEPS = {"next": 1, "previous": -1}  # of ``/branch``

regenerate = alone(lambda chat: chat.branches.regenerate())
fork = alone(ChatController.fork)


async def open_found(chat: ChatController, argument: str) -> None:
    """Handle ``/open TEXT``, the latest conversation that contains it, and ``/open N``, number N of ``/chats``."""
    number = int(argument) if argument.isdecimal() else 1
    found = await (chat.archive.all() if argument.isdecimal() else chat.archive.search(argument))
    if not 1 <= number <= len(found):
        raise UsageError(f'There is no conversation "{argument}".', hint="/chats lists them.")
    await chat.open(found[number - 1].id, found[number - 1].message)


async def set_title(chat: ChatController, argument: str) -> None:
    """Handle ``/title TEXT``; without an argument, show the title."""
    if argument:
        await chat.rename(argument)
    chat.view.add_note(f"Title: {chat.state.conversation.title or 'none before the first question'}")


async def delete(chat: ChatController, argument: str) -> None:
    if not chat.state.conversation.messages:
        raise UsageError("There is nothing to delete yet.", hint="Ask something first.")
    await chat.delete(chat.state.conversation.id, chat.state.conversation.title)


async def export_file(chat: ChatController, argument: str) -> None:
    """Handle ``/export FILE``, in the format of its extension; in a folder, or without FILE, the title is the name."""
    conversation = copy(chat.state.conversation)
    conversation.messages = dict(conversation.messages)  # a copy, because it may grow while it is written
    path = export.destination(conversation, unquoted(argument))
    await asyncio.to_thread(export.write, conversation, path)
    chat.view.toast(f"Written to {path.absolute()}.", title="Exported")


async def import_file(chat: ChatController, argument: str) -> None:
    await chat.take(await asyncio.to_thread(export.read, Path(os.path.expanduser(unquoted(argument)))))


async def edit(chat: ChatController, argument: str) -> None:
    """Handle ``/edit TEXT``: replace the message chosen in the transcript, else the last question.

    Without an argument, put that message into the prompt.
    """
    if not argument:
        chat.branches.edit()
        return
    chat.branches.begin_editing()
    try:
        await chat.ask(arguments.compose((Part(argument),), chat.state))
    except KvchatError:
        chat.branches.stop_editing()
        raise


async def show_branch(chat: ChatController, argument: str) -> None:
    """Handle ``/branch previous`` and ``/branch next``, which is the default."""
    if argument not in ("", *STEPS):
        raise UsageError(f'/branch "{argument}" is not valid.', hint=f"Use {' or '.join(STEPS)}.")
    await chat.branches.select_sibling(STEPS[argument or "next"])
