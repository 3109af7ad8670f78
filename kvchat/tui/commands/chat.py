"""The commands for modes, parameters, texts and replays; those of other rooms have their own files."""

from __future__ import annotations

import os
import re
from collections.abc import Awaitable, Callable
from pathlib import Path

from kvchat import thoughts
from kvchat.config.modes import mode_names, registered
from kvchat.config.validation_errors import expected
from kvchat.conversations import attachments, export
from kvchat.errors import UsageError
from kvchat.tui import sampling
from kvchat.tui.answering.flush import lines
from kvchat.tui.controller import ChatController
from kvchat.tui.prompt import arguments, mentions
from kvchat.tui.prompt.assignments import parse_assignments, parse_literal, split_words
from kvchat.tui.prompt.words import resolve
from kvchat.tui.state import describe_modes, summarize

Handler = Callable[[ChatController, str], Awaitable[None]]


async def switch_mode(chat: ChatController, argument: str) -> None:
    """``/mode NAME key=value…``; alone it lists the modes."""
    if not argument:
        chat.view.add_note(describe_modes(chat.state))
        return
    name, *assignments = split_words(argument)
    mode = resolve(name, mode_names(), "KV mode")
    given = parse_assignments(assignments)
    names = registered()[mode].model_fields
    chat.switch(mode, {resolve(key, names, f"parameter of the {mode} mode"): given[key] for key in given})


async def next_mode(chat: ChatController, argument: str) -> None:
    """``/next``"""
    chat.switch_by(1)


async def previous_mode(chat: ChatController, argument: str) -> None:
    """``/previous``"""
    chat.switch_by(-1)


def set_tokens(name: str) -> Handler:
    """Make the handler of ``/budget N`` and its like."""

    async def change(chat: ChatController, argument: str) -> None:
        if not argument.isdecimal() and argument != "auto":
            raise UsageError(f'/{name} "{argument}" is refused.', hint="It takes a whole number of tokens, or auto.")
        value = parse_literal(argument)
        if name in chat.state.parameters:
            chat.set_parameter(name, value)
        else:
            chat.set_later(name, value)

    return change


async def set_value(chat: ChatController, argument: str) -> None:
    """``/set KEY VALUE``; alone it lists all values, with a key that one."""
    key, _, value = argument.replace("=", " ", 1).partition(" ")
    if not key:
        chat.view.add_note(arguments.describe(chat.state))
        return
    known = dict(arguments.parameters(chat.state))
    name = resolve(key, known, f"parameter of the sampling or the {chat.state.mode} mode")
    if not value.strip():
        present = arguments.in_words(chat.state, name)
        chat.view.toast(f"{name} is {present}. It takes {expected(known[name])}.")
    elif name in sampling.NAMES:
        chat.set_sampling(name, value.strip())
        chat.view.add_note(f"Sampling: {sampling.describe(chat.state.sampling)}")
    else:
        chat.set_parameter(name, parse_literal(value.strip()))


async def set_system(chat: ChatController, argument: str) -> None:
    """``/system TEXT``; alone it shows the system prompt."""
    if not argument:
        chat.view.add_note(f"System: {chat.state.conversation.system or 'none'}   (/system none removes it)")
        return
    chat.set_system(None if argument.lower() == "none" else argument)
    chat.view.add_note("The system prompt counts from the next answer on; the stored context is rebuilt for it.")


async def rebuild(chat: ChatController, argument: str) -> None:
    """``/rebuild``"""
    chat.rebuild()


async def show_stats(chat: ChatController, argument: str) -> None:
    """``/stats``"""
    chat.view.add_note(summarize(chat.state.conversation.stats))


async def copy_message(chat: ChatController, argument: str) -> None:
    """``/copy``: the message chosen in the transcript, else the last answer; ``/copy FILE`` into a new file."""
    _copy(chat, _chosen_text(chat), argument)


async def copy_code(chat: ChatController, argument: str) -> None:
    """``/code``: the last fenced block of the same message; ``/code FILE`` into a new file."""
    blocks = code_blocks(_chosen_text(chat))
    if not blocks:
        raise UsageError("There is no block of code in it.", hint="/copy copies the whole text.")
    _copy(chat, blocks[-1], argument)


def code_blocks(text: str) -> list[str]:
    """The fenced blocks of a text; the last one may have no end."""
    blocks: list[list[str]] = []
    fence = ""
    for line in lines(text):
        if fence and line.startswith(fence):
            fence = ""
        elif fence:
            blocks[-1].append(line)
        elif begun := re.match(r"`{3,}|~{3,}", line):
            fence = begun[0]
            blocks.append([])
    return ["".join(block) for block in blocks]


async def pause_replay(chat: ChatController, argument: str) -> None:
    """``/pause``"""
    chat.replay.pause()


async def set_pace(chat: ChatController, argument: str) -> None:
    """``/speed FACTOR``; alone it shows the speed."""
    try:
        chat.replay.set_speed(float(argument or chat.replay.speed))
    except ValueError:
        raise UsageError(f'/speed "{argument}" is refused.', hint="It takes a number, as in /speed 2.") from None


def change_pace(factor: float) -> Handler:
    """Make the handler of the keys that change the speed of a replay."""

    async def change(chat: ChatController, argument: str) -> None:
        chat.replay.change(factor)

    return change


async def attach(chat: ChatController, argument: str) -> None:
    """``/file PATH``: begin a question about the file."""
    path = argument.strip("\"'")
    attachments.read(Path(os.path.expanduser(path)), chat.state.file_limit)
    if not chat.view.restore_prompt(f"{mentions.mention(path)} "):
        raise UsageError("The prompt holds another text.", hint=f"Write {mentions.mention(path)} into it.")


async def manage_queue(chat: ChatController, argument: str) -> None:
    """``/queue send`` or ``/queue clear``; alone it takes the last question back."""
    if not argument:
        await chat.take_back()
        return
    match resolve(argument, ("send", "clear"), "use of /queue"):
        case "send":
            await chat.release_queue()
        case "clear":
            await chat.answers.queue.clear()


async def restart(chat: ChatController, argument: str) -> None:
    """``/restart``"""
    await chat.restart()


def _copy(chat: ChatController, text: str, file: str) -> None:
    """To the clipboard, or into a new ``file``."""
    if not file:
        chat.view.copy(text)
        return
    path = Path(os.path.expanduser(file))
    export.write_new(path, text)
    chat.view.toast(f"Written to {path.absolute()}.", title="Copied")


def _chosen_text(chat: ChatController) -> str:
    conversation = chat.state.conversation
    chosen = conversation.messages.get(chat.view.chosen or "")
    answers = (message for message in reversed(conversation.path) if message.role == "assistant")
    copied = chosen or next(answers, None)
    text = copied.text if copied else ""
    if copied and copied.role == "assistant":
        text = thoughts.split(text, copied.thought, copied.ending)[1]
    if not text:
        raise UsageError("There is no answer to copy yet.", hint="Ask something first.")
    return text
