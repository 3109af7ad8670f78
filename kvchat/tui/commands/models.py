"""The commands for models."""

from __future__ import annotations

from kvchat.errors import UsageError
from kvchat.tui.controller import ChatController
from kvchat.tui.prompt.assignments import parse_assignments, split_words


async def choose(chat: ChatController, argument: str) -> None:
    """``/model NAME key=value…``; alone it shows the models on this machine."""
    if not argument:
        chat.view.show_models()
        return
    name, *words = split_words(argument)
    await chat.models.choose(name, parse_assignments(words))


async def unload(chat: ChatController, argument: str) -> None:
    """``/unload``"""
    await chat.unload()


async def plan(chat: ChatController, argument: str) -> None:
    """``/plan NAME context=N``; alone for the model in use."""
    words = split_words(argument)
    name = words.pop(0) if words and "=" not in words[0] else ""
    options = parse_assignments(words)
    context = options.pop("context", None)
    if options or not (context is None or (isinstance(context, int) and context > 0)):
        raise UsageError(f'/plan "{argument}" is refused.', hint="It takes a model and context=N, a number of tokens.")
    chat.models.plan(name, context)


async def show_profile(chat: ChatController, argument: str) -> None:
    """``/profile``"""
    chat.view.add_note(
        f"Profiles in force: {chat.models.profile or 'none'}   (kvchat profile match says what they set)"
    )
