"""Slash commands other than those for conversations; ``tui.actions`` lists them."""

from __future__ import annotations

import os
import re
from collections.abc import Awaitable, Callable
from pathlib import Path

from kvchat import paths, thoughts
from kvchat.config import presets
from kvchat.config.modes import choosable
from kvchat.config.validation_errors import expected
from kvchat.conversations import export
from kvchat.conversations.conversation import Message
from kvchat.errors import UsageError, resolve
from kvchat.files import read_text
from kvchat.protocol.messages import MAX_NEEDLE_TOKENS
from kvchat.tui.comparisons import parse_variants
from kvchat.tui.controller import ChatController
from kvchat.tui.prompt import arguments, mentions
from kvchat.tui.prompt.arguments import parse_assignments, parse_literal, split_words
from kvchat.tui.state import describe_modes, summarize
from kvchat.units import count

Handler = Callable[[ChatController, str], Awaitable[None]]
NEEDLE_TOKENS = 2000  # four times the bundled model's budget; processed in seconds on two cores
MIN_NEEDLE_TOKENS = 256
SWITCHES = ("enable_thinking", "thinking", "think")  # names of that variable in chat templates
EFFORT = "reasoning_effort"


def alone(act: Callable[[ChatController], Awaitable[None] | None]) -> Handler:
    """Return the handler of a command without an argument, or of a key."""

    async def run(chat: ChatController, argument: str) -> None:
        if (pending := act(chat)) is not None:
            await pending

    return run


async def switch_mode(chat: ChatController, argument: str) -> None:
    """Handle ``/mode NAME key=value…``; without an argument, list the modes."""
    if not argument:
        chat.view.add_note(describe_modes(chat.state))
        return
    name, *assignments = split_words(argument)
    mode = resolve(name, choosable(), "KV mode")
    given = parse_assignments(assignments)
    names = choosable()[mode].model_fields
    chat.switch(mode, {resolve(key, names, f"{mode} mode parameter"): given[key] for key in given})


def set_tokens(name: str) -> Handler:
    """Return the handler of ``/budget N`` and similar commands."""

    async def change(chat: ChatController, argument: str) -> None:
        if not argument.isdecimal() and argument != "auto":
            raise UsageError(f'/{name} "{argument}" is not valid.', hint="Use a whole number of tokens, or auto.")
        _set_now_or_later(chat, name, parse_literal(argument))

    return change


async def set_draft(chat: ChatController, argument: str) -> None:
    _set_now_or_later(chat, "draft", argument)


def _set_now_or_later(chat: ChatController, name: str, value: int | float | bool | str) -> None:
    if name in chat.state.parameters:
        chat.set_parameter(name, value)
    else:
        chat.set_later(name, value)


async def set_value(chat: ChatController, argument: str) -> None:
    """Handle ``/set KEY VALUE``; show the value of a key alone, and all values without an argument."""
    key, value = (*re.split(r"\s*=\s*|\s+", argument, maxsplit=1), "")[:2]  # the value may contain = too
    if not key:
        chat.view.add_note(arguments.describe(chat.state))
        return
    known = dict(arguments.parameters(chat.state))
    name = resolve(key, known, f"sampling or {chat.state.mode} mode parameter")
    if not value:
        current = arguments.in_words(chat.state, name)
        chat.view.toast(f"{name} is {current}. It takes {expected(known[name])}.")
    elif name in arguments.NAMES:
        chat.set_sampling(name, value)
        chat.view.add_note(f"Sampling: {arguments.describe_sampling(chat.state.sampling)}")
    else:
        chat.set_parameter(name, parse_literal(value))


async def set_system(chat: ChatController, argument: str) -> None:
    """Handle ``/system TEXT``; without an argument, show the system prompt."""
    if not argument:
        chat.view.add_note(f"System: {chat.state.conversation.system or 'none'}   (/system none removes it)")
        return
    chat.set_system(None if argument.lower() == "none" else argument)
    chat.view.add_note("The system prompt takes effect with the next answer; the stored context is rebuilt for it.")


async def preset(chat: ChatController, argument: str) -> None:
    """Handle ``/preset NAME`` and ``/preset save NAME``; without an argument, list the presets."""
    words = split_words(argument)
    match words:
        case []:
            kept = ", ".join(presets.names())
            chat.view.add_note(
                f"Presets: {kept}   ({paths.presets_dir()})"
                if kept
                else "There are no presets yet; /preset save NAME saves the system prompt, sampling and mode."
            )
        case ["save", name]:
            chat.view.toast(f"{name} saved in {chat.save_preset(name)}.", title="Preset")
        case [name] if name != "save":
            chat.use_preset(file := presets.find(name))
            chat.view.add_note(f"Preset {file.stem}. Sampling: {arguments.describe_sampling(chat.state.sampling)}")
        case _:
            raise UsageError(f'/preset "{argument}" is not valid.', hint="Use NAME, or save NAME.")


async def show_stats(chat: ChatController, argument: str) -> None:
    chat.view.add_note(summarize(chat.state.conversation.stats))


async def copy_message(chat: ChatController, argument: str) -> None:
    """Handle ``/copy`` and ``/copy FILE``: copy the message chosen in the transcript, else the last answer."""
    _copy(chat, _chosen_text(chat), argument)


async def copy_code(chat: ChatController, argument: str) -> None:
    """Handle ``/code`` and ``/code FILE``: copy the last fenced block of the message that ``/copy`` would copy."""
    blocks = code_blocks(_chosen_text(chat))
    if not blocks:
        raise UsageError("There is no block of code in it.", hint="/copy copies the whole text.")
    _copy(chat, blocks[-1], argument)


def code_blocks(text: str) -> list[str]:
    """Return the contents of a text's fenced blocks; the last fence may be open."""
    from markdown_it import MarkdownIt  # late, so that it does not delay the first paint

    return [token.content for token in MarkdownIt().parse(text) if token.type == "fence"]


async def set_pace(chat: ChatController, argument: str) -> None:
    """Handle ``/speed FACTOR``; without an argument, resume at the current speed and show it."""
    try:
        chat.replay.set_speed(float(argument or chat.replay.speed))
    except ValueError:
        raise UsageError(f'/speed "{argument}" is not valid.', hint="Use a number, as in /speed 2.") from None


async def attach(chat: ChatController, argument: str) -> None:
    """Handle ``/file PATH``: begin a question with a mention of the file."""
    path = mentions.unquoted(argument)
    read_text(Path(os.path.expanduser(path)), chat.state.file_limit)
    if not chat.view.restore_prompt(f"{mentions.mention(path)} "):
        raise UsageError("The prompt already has text.", hint=f"Type {mentions.mention(path)} into it.")


async def manage_queue(chat: ChatController, argument: str) -> None:
    """Handle ``/queue send`` and ``/queue clear``; without an argument, return the last question to the prompt."""
    if not argument:
        await chat.take_back()
    elif resolve(argument, ("send", "clear"), "/queue argument") == "send":
        await chat.release_queue()
    else:
        await chat.answers.queue.clear()


def _copy(chat: ChatController, text: str, file: str) -> None:
    """Copy to the clipboard, or into a new ``file``."""
    if not file:
        chat.view.copy(text)
        return
    path = Path(os.path.expanduser(mentions.unquoted(file)))
    export.write_new(path, text)
    chat.view.toast(f"Written to {path.absolute()}.", title="Copied")


def _chosen_text(chat: ChatController) -> str:
    conversation = chat.state.conversation
    answers = (message for message in reversed(conversation.path) if message.role == "assistant")
    copied = conversation.messages.get(chat.view.chosen or "") or next(answers, None)
    text = copied.text if copied else ""
    if copied and copied.role == "assistant":
        text = thoughts.split(text, copied.thought, copied.ending)[1]
    if not text:
        raise UsageError("There is no answer to copy yet.", hint="Ask something first.")
    return text


async def compare(chat: ChatController, argument: str) -> None:
    chat.comparisons.begin(parse_variants(split_words(argument)))


async def search_needle(chat: ChatController, argument: str) -> None:
    if argument and not (argument.isdecimal() and MIN_NEEDLE_TOKENS <= int(argument) <= MAX_NEEDLE_TOKENS):
        raise UsageError(
            f'/needle "{argument}" is not valid.',
            hint=f"Use the length of the text, {MIN_NEEDLE_TOKENS} to {MAX_NEEDLE_TOKENS:,} tokens.",
        )
    chat.comparisons.search_needle(int(argument or NEEDLE_TOKENS))


async def choose(chat: ChatController, argument: str) -> None:
    """Handle ``/model NAME key=value…``; without an argument, list the models on this machine."""
    if not argument:
        await chat.models.show_all()
        return
    name, *words = split_words(argument)
    await chat.models.choose(name, parse_assignments(words))


async def plan(chat: ChatController, argument: str) -> None:
    """Handle ``/plan NAME context=N``; without a name, plan for the model in use."""
    words = split_words(argument)
    name = words.pop(0) if words and "=" not in words[0] else ""
    options = parse_assignments(words)
    context = options.pop("context", None)
    if options or not (context is None or (isinstance(context, int) and context > 0)):
        raise UsageError(f'/plan "{argument}" is not valid.', hint="Use a model and context=N, a number of tokens.")
    chat.models.plan(name, context)


async def show_profile(chat: ChatController, argument: str) -> None:
    active = chat.models.config.profile or "none"
    chat.view.add_note(f"Active profiles: {active}   (kvchat config show says what they set)")


async def think(chat: ChatController, argument: str) -> None:
    """Handle ``/think`` with ``on``, ``off``, an effort such as ``low``, or ``auto``; else show the template."""
    known = chat.state.info.template_variables if chat.state.info else ()
    wanted = {"on": "true", "off": "false"}.get(argument.lower())
    names = [name for name in (SWITCHES if wanted else (EFFORT,)) if name in known]
    if argument and argument != "auto" and not names:
        raise UsageError(
            f"/think {argument} has no effect on this model.",
            f"Its chat template uses {', '.join(known) or 'no variables'}.",
            "/template KEY=VALUE sets one.",
        )
    others = [one for one in chat.models.in_use.template_args if one.partition("=")[0] not in (*SWITCHES, EFFORT)]
    if argument:
        chat.models.set_template_args((*others, *(f"{name}={wanted or argument}" for name in names[:1])))
    else:
        _show_template(chat)


async def template(chat: ChatController, argument: str) -> None:
    """Handle ``/template`` with ``KEY=VALUE…`` (``KEY=`` unsets it), ``FILE`` or ``own``; else show the template."""
    words = split_words(argument)
    if not words:
        _show_template(chat)
    elif "=" in words[0]:
        given = dict(one.partition("=")[::2] for one in (*chat.models.in_use.template_args, *words))
        chat.models.set_template_args([f"{name}={value}" for name, value in given.items() if value])
    elif len(words) == 1:
        await chat.models.use_template("" if words[0] == "own" else os.path.abspath(os.path.expanduser(words[0])))
    else:
        raise UsageError(f'/template "{argument}" is not valid.', hint="Use KEY=VALUE, a FILE or own.")


def _show_template(chat: ChatController) -> None:
    load, info = chat.models.in_use, chat.state.info
    known = ", ".join(info.template_variables) if info else ""
    source = load.chat_template or "the model's own"
    chat.view.add_note(
        f"Chat template: {source}, with {', '.join(load.template_args) or 'no variables'}"
        f" set; it uses {known or 'none'}."
    )


async def pin(chat: ChatController, argument: str) -> None:
    """Handle ``/pin`` with ``N``, ``system`` or ``none``; else pin or unpin the chosen message or last question."""
    if argument == "system":
        _pin_system(chat)
    elif argument == "none":
        pinned = [message for message in chat.state.conversation.path if message.pinned]
        for message in pinned:
            chat.pins.unpin(message)
        if chat.state.params.get("pin_system", False):
            _pin_system(chat)
        chat.view.toast(f"Unpinned {count(len(pinned), 'message')}." if pinned else "No message is pinned.")
    else:
        chosen = chat.state.conversation.messages.get(chat.view.chosen or "")
        message = _question(chat, argument) if argument else chosen or chat.branches.chosen_question()
        if message.pinned:
            chat.pins.unpin(message)
            chat.view.toast("Unpinned.")
        else:
            chat.pins.pin(message)
            chat.view.toast("Pinned: every mode reads it from the next answer on, in addition to its budget.")


def _pin_system(chat: ChatController) -> None:
    pinned = not chat.state.params.get("pin_system", False)
    if pinned and not chat.state.conversation.system:
        raise UsageError("There is no system prompt to pin.", hint="Set one with /system TEXT.")
    chat.set_parameter("pin_system", pinned)
    chat.view.add_note(f"The system prompt is {'pinned: every mode reads it' if pinned else 'no longer pinned'}.")


def _question(chat: ChatController, argument: str) -> Message:
    questions = [message for message in chat.state.conversation.path if message.role == "user"]
    if not (argument.isdecimal() and 1 <= int(argument) <= len(questions)):
        raise UsageError(
            f'/pin "{argument}" is not valid.',
            f"This conversation has {count(len(questions), 'question')}.",
            "/pin system pins the system prompt, /pin none unpins all.",
        )
    return questions[int(argument) - 1]
