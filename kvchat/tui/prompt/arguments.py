"""Arguments of slash commands: parsing, suggestions while they are typed, and changes of sampling."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvchat.config.modes import AUTO, choosable, effective_params
from kvchat.config.presets import names as preset_names
from kvchat.config.schema import SamplingSettings, checked_sampling
from kvchat.config.validation_errors import choices, expected
from kvchat.errors import UsageError, check_known
from kvchat.protocol.figures import Params
from kvchat.protocol.messages import Sampling
from kvchat.tui.prompt import mentions
from kvchat.tui.prompt.mentions import Entries, Suggestion
from kvchat.tui.state import ChatState

NAMES = tuple(field.name for field in dataclasses.fields(Sampling))


@dataclass(frozen=True)
class Surroundings:
    """The state and theme while a command is typed; ``entries`` lists a folder."""

    state: ChatState
    themes: Sequence[str]
    theme: str
    entries: Entries = mentions.read


def themes(now: Surroundings, words: Sequence[str]) -> Iterator[Suggestion]:
    if not words:
        yield from (Suggestion(name, name, "", name == now.theme) for name in now.themes)


Values = Callable[[Surroundings, Sequence[str]], Iterator[Suggestion]]
"""Yields suggestions for the word being typed, given the words before it."""


def modes(now: Surroundings, words: Sequence[str]) -> Iterator[Suggestion]:
    """Suggest for ``/mode`` a mode, then its parameters."""
    if not words:
        for name, parameters in choosable().items():
            yield Suggestion(name, name, parameters.title, name == now.state.asked)
        return
    mode = next((name for name in choosable() if name.startswith(words[0])), "")
    given = {word.partition("=")[0] for word in words[1:]}
    for name, field in choosable()[mode].model_fields.items() if mode else ():
        if name not in given:
            value = now.state.params.get(name) if mode == now.state.mode else field.default
            yield _parameter(f"{name}=", name, value, field)


def values_to_set(now: Surroundings, words: Sequence[str]) -> Iterator[Suggestion]:
    """Suggest for ``/set`` a parameter of sampling or the mode, then its values."""
    if not words:
        for name, field in parameters(now.state):
            yield _parameter(f"{name} ", name, current(now.state, name), field)
        return
    for name, field in parameters(now.state):
        if name == words[0] and len(words) == 1:
            value = current(now.state, name)
            present = () if value in (None, ()) else (shown(value),)
            for text in choices(field) or present:
                yield Suggestion(text, text, "", text == shown(value))


def presets(now: Surroundings, words: Sequence[str]) -> Iterator[Suggestion]:
    """Suggest for ``/preset`` the saved presets, and saving one."""
    if not words:
        yield from (Suggestion(name, name) for name in preset_names())
        yield Suggestion("save ", "save NAME", "save the system prompt, sampling and mode")


def tokens(name: str) -> Values:
    """Suggest the current value for ``/budget`` and similar commands."""

    def value(now: Surroundings, words: Sequence[str]) -> Iterator[Suggestion]:
        text = shown(now.state.params.get(name))
        if not words and text.isdecimal():
            yield Suggestion(text, text, "", is_current=True)

    return value


def one_of(*choices: str) -> Values:

    def words_of(now: Surroundings, words: Sequence[str]) -> Iterator[Suggestion]:
        if not words:
            yield from (Suggestion(choice, choice) for choice in choices)

    return words_of


def parameters(state: ChatState) -> Iterator[tuple[str, Any]]:
    """Yield names and fields of what ``/set`` changes: sampling, then the current mode's parameters."""
    yield from SamplingSettings.model_fields.items()
    yield from state.parameters.items()


def current(state: ChatState, name: str) -> Any:
    """Return the current value of a parameter of sampling or the mode."""
    if name in NAMES:
        return getattr(state.sampling, name)
    if name in state.params or state.asked != AUTO:
        return state.params.get(name)
    return getattr(effective_params(AUTO, state.settings, state.given), name)


def shown(value: Any) -> str:
    """Return a value as it is typed; None lets kvchat choose and is typed ``auto``."""
    if value is None or value == ():
        return "auto" if value is None else "none"
    if isinstance(value, tuple):
        return " ".join(map(repr, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def in_words(state: ChatState, name: str) -> str:
    """Describe the current value: a default temperature with the model's value, or as ``the server's``."""
    text = shown(current(state, name))
    if state.is_served and name != "max_new_tokens" and current(state, name) == getattr(Sampling(), name, None):
        return "the server's"
    return f"auto, now {state.info.temperature:g}" if (name, text) == ("temperature", "auto") and state.info else text


def describe(state: ChatState) -> str:
    """Return a line for each value that ``/set`` changes, with the allowed values."""
    rows = [(name, in_words(state, name), expected(field)) for name, field in parameters(state)]
    names, values = (max(len(row[column]) for row in rows) for column in (0, 1))
    return "\n".join(f"{name:<{names}}  {value:<{values}}  {takes}" for name, value, takes in rows)


def _parameter(text: str, name: str, value: Any, field: Any) -> Suggestion:
    return Suggestion(text, f"{name} {shown(value)}", f"{expected(field)}: {field.description}")


def split_words(argument: str) -> list[str]:
    """Split an argument as a shell does."""
    try:
        return shlex.split(argument)
    except ValueError as error:
        raise UsageError(f"The argument {argument} cannot be read.", f"{error}.", "Close the quotes.") from None


def parse_assignments(words: list[str]) -> Params:
    """Parse ``["budget=512", "first_full=no"]``."""
    params: Params = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals:
            raise UsageError(
                f'"{word}" is not a parameter.', hint="Parameters are written key=value, as in budget=512."
            )
        params[key] = parse_literal(text)
    return params


def parse_literal(text: str) -> int | float | bool | str:
    """Parse a number or a boolean; any other text is returned unchanged."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"yes": True, "true": True, "on": True, "no": False, "false": False, "off": False}.get(text.lower(), text)


def change(sampling: Sampling, key: str, value: str) -> Sampling:
    """Return ``sampling`` with one parameter changed.

    ``none`` clears the seed, the stop strings or the temperature, which is then the model's own.

    Raises:
        UsageError: there is no such parameter, or the value is invalid.
    """
    check_known(key, NAMES, "sampling parameter")
    return checked_sampling(sampling, **{key: _value(sampling, key, value)})


def describe_sampling(sampling: Sampling) -> str:
    """Return the values that differ from the defaults, on one line."""
    default = Sampling()
    changed = [
        f"{name} {getattr(sampling, name)}" for name in NAMES if getattr(sampling, name) != getattr(default, name)
    ]
    return " · ".join(changed) or "defaults"


def _value(sampling: Sampling, key: str, text: str) -> Any:
    """Return the new value; a stop string is appended, with ``\\n`` as a newline."""
    if key == "stop":
        return () if text.lower() == "none" else (*sampling.stop, text.replace("\\n", "\n"))
    return None if key in ("seed", "temperature") and text.lower() in ("none", "auto") else text


def compose(parts: Iterable[mentions.Part], state: ChatState) -> str:
    """Return the question with the files that it mentions; a text that replaces an answer is unchanged.

    Raises:
        KvchatError: a file cannot be sent.
    """
    parts = tuple(parts)
    if state.edits_answer:
        return "".join(part.text for part in parts)
    return mentions.attach(parts, state.file_limit)
