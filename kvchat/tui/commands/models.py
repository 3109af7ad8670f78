"""The commands for models."""

from __future__ import annotations

import os

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


SWITCHES = ("enable_thinking", "thinking", "think")  # what templates call it
EFFORT = "reasoning_effort"


async def think(chat: ChatController, argument: str) -> None:
    """``/think on``, ``off`` or an effort such as ``low``; ``auto`` leaves it to the model; alone: what is set."""
    known = chat.state.info.template_variables if chat.state.info else ()
    wanted = {"on": "true", "off": "false"}.get(argument.lower())
    names = [name for name in (SWITCHES if wanted else (EFFORT,)) if name in known]
    if argument and argument != "auto" and not names:
        raise UsageError(
            f"/think {argument} has no effect on this model.",
            f"Its chat template looks at {', '.join(known) or 'no variable'}.",
            "/template KEY=VALUE sets one.",
        )
    others = [one for one in chat.models.in_use.template_args if one.partition("=")[0] not in (*SWITCHES, EFFORT)]
    if argument:
        chat.models.set_template_args((*others, *(f"{name}={wanted or argument}" for name in names[:1])))
    else:
        _tell_template(chat)


async def template(chat: ChatController, argument: str) -> None:
    """``/template KEY=VALUE…``, where no value unsets one; a FILE in place of the model's own, or ``own``."""
    words = split_words(argument)
    if not words:
        _tell_template(chat)
    elif "=" in words[0]:
        given = dict(one.partition("=")[::2] for one in (*chat.models.in_use.template_args, *words))
        chat.models.set_template_args([f"{name}={value}" for name, value in given.items() if value])
    elif len(words) == 1:
        await chat.models.use_template("" if words[0] == "own" else os.path.abspath(os.path.expanduser(words[0])))
    else:
        raise UsageError(f'/template "{argument}" is refused.', hint="It takes KEY=VALUE, a FILE or own.")


def _tell_template(chat: ChatController) -> None:
    load, info = chat.models.in_use, chat.state.info
    known = ", ".join(info.template_variables) if info else ""
    source = load.chat_template or "the model's own"
    chat.view.add_note(
        f"Chat template: {source}, with {', '.join(load.template_args) or 'no variable'}"
        f" set; it looks at {known or 'none'}."
    )
