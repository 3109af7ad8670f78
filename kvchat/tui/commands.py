"""One table of everything the application can be told: it feeds the slash commands, the help and the palette."""

from __future__ import annotations

import shlex
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvchat.config import modes
from kvchat.errors import UsageError, did_you_mean
from kvchat.protocol.messages import Params
from kvchat.tui import sampling
from kvchat.tui.state import summary

if TYPE_CHECKING:
    from kvchat.tui.screens.chat import ChatScreen

Handler = Callable[["ChatScreen", str], Awaitable[None]]


@dataclass(frozen=True)
class Entry:
    """One command; ``usage`` without the slash and name, ``key`` where a key does the same."""

    name: str
    usage: str
    doc: str
    handler: Handler
    key: str = ""

    @property
    def line(self) -> str:
        """How it is typed."""
        return f"/{self.name} {self.usage}".rstrip()


def is_command(text: str) -> bool:
    """Whether a text is a command: one slash, and one line unless it begins with a known name (``/system``)."""
    if not text.startswith("/") or text.startswith("//"):
        return False
    return "\n" not in text.strip() or text[1:].split(None, 1)[0] in TABLE


def find(name: str) -> Entry:
    """The command of that name.

    Raises:
        UsageError: there is none; names the nearest.
    """
    if name not in TABLE:
        raise UsageError(
            f'There is no command "/{name}".', did_you_mean(name, TABLE), "/help lists all with their use."
        )
    return TABLE[name]


async def run(screen: ChatScreen, line: str) -> None:
    """Run a typed line such as ``/mode streaming budget=512``.

    Raises:
        KvchatError: the command, its argument or what it asks for is refused.
    """
    name, _, argument = line.removeprefix("/").partition(" ")
    await find(name.strip().lower()).handler(screen, argument.strip())


def assignments(words: list[str]) -> Params:
    """``["budget=512", "first_full=no"]`` as parameters.

    Raises:
        UsageError: a word without ``=``.
    """
    params: Params = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals:
            raise UsageError(f'"{word}" is no parameter.', "Parameters are written key=value, as in budget=512.")
        params[key] = literal(text)
    return params


def literal(text: str) -> int | float | bool | str:
    """A number or a truth value where the text is one."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"yes": True, "true": True, "on": True, "no": False, "false": False, "off": False}.get(text.lower(), text)


def _words(argument: str) -> list[str]:
    try:
        return shlex.split(argument)
    except ValueError as error:
        raise UsageError(f"The argument {argument} cannot be read.", f"{error}.") from None


async def _help(screen: ChatScreen, argument: str) -> None:
    screen.action_help()


async def _mode(screen: ChatScreen, argument: str) -> None:
    if not argument:
        screen.say(screen.modes_text())
        return
    name, *words = _words(argument)
    screen.switch(name, assignments(words))


async def _next_mode(screen: ChatScreen, argument: str) -> None:
    screen.action_mode(1)


async def _previous_mode(screen: ChatScreen, argument: str) -> None:
    screen.action_mode(-1)


def _parameter(name: str) -> Handler:
    async def change(screen: ChatScreen, argument: str) -> None:
        if not argument.isdecimal():
            raise UsageError(f'/{name} "{argument}" is refused.', "It takes a whole number of tokens.")
        params: Params = {name: int(argument)}
        if name in screen.mode_parameters():
            screen.switch("", params)
            return
        modes.parse("speculative", params)
        screen.state.later |= params
        screen.say(f"The {screen.state.mode} mode has no {name}; {argument} counts from the next mode on that has one.")

    return change


async def _set(screen: ChatScreen, argument: str) -> None:
    if not argument:
        screen.say(f"Sampling: {sampling.describe(screen.state.sampling)}")
        return
    key, _, value = argument.replace("=", " ", 1).partition(" ")
    if key in sampling.NAMES:
        screen.state.sampling = sampling.change(screen.state.sampling, key, value.strip())
        screen.say(f"Sampling: {sampling.describe(screen.state.sampling)}")
    elif key in screen.mode_parameters():
        screen.switch("", {key: literal(value.strip())})
    else:
        known = (*sampling.NAMES, *screen.mode_parameters())
        raise UsageError(f'There is no parameter "{key}" in {screen.state.mode} mode.', did_you_mean(key, known))


async def _system(screen: ChatScreen, argument: str) -> None:
    conversation = screen.state.conversation
    if not argument:
        screen.say(f"System: {conversation.system or 'none'}   (/system none removes it)")
        return
    conversation.system = None if argument.lower() == "none" else argument
    screen.say("The system text counts from the next answer on; the stored context is rebuilt for it.")


async def _regenerate(screen: ChatScreen, argument: str) -> None:
    await screen.action_regenerate()


async def _new(screen: ChatScreen, argument: str) -> None:
    await screen.action_new()


async def _stop(screen: ChatScreen, argument: str) -> None:
    screen.stop()


async def _rebuild(screen: ChatScreen, argument: str) -> None:
    screen.rebuild()


async def _stats(screen: ChatScreen, argument: str) -> None:
    screen.say(summary(screen.state.stats))


async def _theme(screen: ChatScreen, argument: str) -> None:
    if not argument:
        screen.say(f"Themes: {', '.join(screen.kvchat.themes)}   (now {screen.app.theme})")
        return
    screen.kvchat.use_theme(argument)


async def _panels(screen: ChatScreen, argument: str) -> None:
    screen.action_panels()


async def _copy(screen: ChatScreen, argument: str) -> None:
    text = screen.state.conversation.last_answer()
    if not text:
        raise UsageError("There is no answer to copy yet.")
    screen.copy(text)


async def _restart(screen: ChatScreen, argument: str) -> None:
    await screen.restart()


async def _quit(screen: ChatScreen, argument: str) -> None:
    screen.app.exit()


TABLE: dict[str, Entry] = {
    entry.name: entry
    for entry in (
        Entry("help", "", "keys, commands and modes", _help, "F1"),
        Entry("mode", "NAME key=value…", "switch the KV mode, also mid-answer; alone: list them", _mode),
        Entry("next", "", "next mode", _next_mode, "F6"),
        Entry("previous", "", "previous mode", _previous_mode, "Shift+F6"),
        Entry("budget", "N", "tokens per KV head a decoded token may attend to", _parameter("budget")),
        Entry("sink", "N", "first tokens, always attended", _parameter("sink")),
        Entry("window", "N", "most recent tokens, always attended", _parameter("window")),
        Entry("set", "KEY VALUE", "sampling (temperature, seed, …) or a parameter of the mode; alone: show", _set),
        Entry("system", "TEXT", "the system text; none removes it; alone: show", _system),
        Entry("regen", "", "answer the last question again", _regenerate, "F5"),
        Entry("stop", "", "stop the answer and keep what there is", _stop, "Esc"),
        Entry("rebuild", "", "compute anew, exactly, what was computed with less context", _rebuild),
        Entry("new", "", "new conversation", _new, "Ctrl+N"),
        Entry("stats", "", "what this conversation has cost so far", _stats),
        Entry("copy", "", "copy the last answer to the clipboard", _copy),
        Entry("theme", "NAME", "change the theme; alone: list them", _theme),
        Entry("panels", "", "show or hide the panels", _panels, "F7"),
        Entry("restart", "", "restart the engine; the conversation is kept", _restart),
        Entry("quit", "", "leave", _quit, "Ctrl+Q"),
    )
}
