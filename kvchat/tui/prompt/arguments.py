"""Values offered for the arguments of slash commands while they are typed, the present one marked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvchat.config.modes import registered
from kvchat.config.schema import SamplingSettings
from kvchat.config.validation_errors import choices, expected
from kvchat.tui import sampling
from kvchat.tui.prompt import folders
from kvchat.tui.prompt.folders import Entries
from kvchat.tui.prompt.suggestions import Suggestion
from kvchat.tui.state import ChatState


@dataclass(frozen=True)
class Surroundings:
    """The state and theme while a command is typed; ``entries`` lists a folder."""

    state: ChatState
    themes: Sequence[str]
    theme: str
    entries: Entries = folders.read


Values = Callable[[Surroundings, Sequence[str]], Iterator[Suggestion]]
"""Given the words of the argument before the one being typed, everything that may stand in its place."""


def modes(now: Surroundings, words: Sequence[str]) -> Iterator[Suggestion]:
    """``/mode``: a mode, then its parameters."""
    if not words:
        for name, parameters in registered().items():
            yield Suggestion(name, name, parameters.title, name == now.state.mode)
        return
    mode = next((name for name in registered() if name.startswith(words[0])), "")
    given = {word.partition("=")[0] for word in words[1:]}
    for name, field in registered()[mode].model_fields.items() if mode else ():
        if name not in given:
            value = now.state.params.get(name) if mode == now.state.mode else field.default
            yield _parameter(f"{name}=", name, value, field)


def values_to_set(now: Surroundings, words: Sequence[str]) -> Iterator[Suggestion]:
    """``/set``: a parameter of the sampling or the mode with its present value, then what it takes."""
    if not words:
        for name, field in parameters(now.state):
            yield _parameter(f"{name} ", name, present(now.state, name), field)
        return
    for name, field in parameters(now.state):
        if name == words[0] and len(words) == 1:
            value = present(now.state, name)
            present_one = () if value in (None, ()) else (shown(value),)
            for text in choices(field) or present_one:
                yield Suggestion(text, text, "", text == shown(value))


def themes(now: Surroundings, words: Sequence[str]) -> Iterator[Suggestion]:
    """``/theme``"""
    if not words:
        yield from (Suggestion(name, name, "", name == now.theme) for name in now.themes)


def tokens(name: str) -> Values:
    """``/budget`` and its like: the present value."""

    def value(now: Surroundings, words: Sequence[str]) -> Iterator[Suggestion]:
        text = shown(now.state.params.get(name))
        if not words and text.isdecimal():
            yield Suggestion(text, text, "", is_present=True)

    return value


def one_of(*choices: str) -> Values:
    """One of a few words."""

    def words_of(now: Surroundings, words: Sequence[str]) -> Iterator[Suggestion]:
        if not words:
            yield from (Suggestion(choice, choice) for choice in choices)

    return words_of


def parameters(state: ChatState) -> Iterator[tuple[str, Any]]:
    """Everything that ``/set`` changes with its field: the sampling, then the present mode's parameters."""
    yield from SamplingSettings.model_fields.items()
    yield from state.parameters.items()


def present(state: ChatState, name: str) -> Any:
    """The value in force of a parameter of the sampling or the mode."""
    return getattr(state.sampling, name) if name in sampling.NAMES else state.params.get(name)


def shown(value: Any) -> str:
    """A value as it is typed; None is chosen by kvchat."""
    if value is None or value == ():
        return "auto" if value is None else "none"
    if isinstance(value, tuple):
        return " ".join(map(repr, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def in_words(state: ChatState, name: str) -> str:
    """The value in force as people read it: what is left to the model with the model's own value."""
    text = shown(present(state, name))
    return f"auto, now {state.info.temperature:g}" if (name, text) == ("temperature", "auto") and state.info else text


def describe(state: ChatState) -> str:
    """All values that ``/set`` changes, a line each, with what they take."""
    rows = [(name, in_words(state, name), expected(field)) for name, field in parameters(state)]
    names, values = (max(len(row[column]) for row in rows) for column in (0, 1))
    return "\n".join(f"{name:<{names}}  {value:<{values}}  {takes}" for name, value, takes in rows)


def _parameter(text: str, name: str, value: Any, field: Any) -> Suggestion:
    return Suggestion(text, f"{name} {shown(value)}", f"{expected(field)}: {field.description}")
