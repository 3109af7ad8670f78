"""``/pin``: messages that every mode attends to, whatever its policy keeps."""

from __future__ import annotations

from kvchat.conversations.conversation import Message
from kvchat.errors import UsageError
from kvchat.tui.controller import ChatController
from kvchat.units import count


async def pin(chat: ChatController, argument: str) -> None:
    """``/pin``: the message chosen in the transcript, else the last question; ``/pin N``, ``system`` or ``none``."""
    if argument == "system":
        _pin_system(chat)
    elif argument == "none":
        _unpin_all(chat)
    else:
        message = _question(chat, argument) if argument else _chosen(chat)
        if message.pinned:
            chat.pins.unpin(message)
            chat.view.toast("Unpinned.")
        else:
            chat.pins.pin(message)
            chat.view.toast("Pinned: every mode attends to it from now on, beyond its budget.")


def _unpin_all(chat: ChatController) -> None:
    pinned = [message for message in chat.state.conversation.path if message.pinned]
    for message in pinned:
        chat.pins.unpin(message)
    if chat.state.params.get("pin_system", False):
        _pin_system(chat)
    chat.view.toast(f"{count(len(pinned))} unpinned." if pinned else "No message is pinned.")


def _pin_system(chat: ChatController) -> None:
    pinned = not chat.state.params.get("pin_system", False)
    if pinned and not chat.state.conversation.system:
        raise UsageError("There is no system prompt to pin.", hint="/system TEXT gives one.")
    chat.set_parameter("pin_system", pinned)
    chat.view.add_note(f"The system prompt is {'pinned: attended in every mode' if pinned else 'no longer pinned'}.")


def _question(chat: ChatController, argument: str) -> Message:
    questions = [message for message in chat.state.conversation.path if message.role == "user"]
    if not (argument.isdecimal() and 1 <= int(argument) <= len(questions)):
        raise UsageError(
            f'/pin "{argument}" is refused.',
            f"It takes the number of a question; {count(len(questions))} are asked.",
            "/pin system pins the system prompt, /pin none unpins all.",
        )
    return questions[int(argument) - 1]


def _chosen(chat: ChatController) -> Message:
    conversation = chat.state.conversation
    chosen = conversation.messages.get(chat.view.chosen or "")
    return chosen or chat.branches.chosen("user")
