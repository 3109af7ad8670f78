"""Command-line options: their types, and the settings that they set."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from kvchat.cli.completion import (
    complete_device,
    complete_mode,
    complete_model,
    complete_param,
    complete_theme,
    words_of,
)
from kvchat.config import modes, sources
from kvchat.config.modes import SHARED
from kvchat.config.sources import Key, SettingsSource
from kvchat.errors import UsageError, did_you_mean
from kvchat.tui.prompt.words import resolve

SAMPLING = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "stop")

# What each option sets; those of a mode's parameters depend on the value.
KEYS: dict[str, tuple[Key, ...]] = {
    "model": (("model", "name"),),
    "device": (("model", "device"),),
    "dtype": (("model", "dtype"),),
    "quantize": (("model", "quantize"),),
    "host_dtype": (("kv", "host_dtype"),),
    "system": (("model", "system"),),
    "mode": (("kv", "mode"),),
    "theme": (("ui", "theme"),),
    **{name: (("sampling", name),) for name in SAMPLING},
}


def number(metavar: str, help: str) -> Any:
    """An option whose value the settings check: they refuse what is no number in their own words."""
    return typer.Option(metavar=metavar, help=help, parser=_parsed)


def _parsed(text: str) -> int | float | str:
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text


Model = Annotated[
    str | None,
    typer.Option("-m", "--model", help="bundled, a folder, or a model's id on the hub", autocompletion=complete_model),
]
Device = Annotated[str | None, typer.Option(help="auto, cpu, cuda or cuda:N", autocompletion=complete_device)]
Dtype = Annotated[
    str | None,
    typer.Option(help="auto, float32, bfloat16 or float16", autocompletion=words_of(("model", "dtype"))),
]
Quantize = Annotated[
    str | None,
    typer.Option(
        help="auto, none, int8, int4 (need kvchat[ao]) or nf4 (needs kvchat[bnb])",
        autocompletion=words_of(("model", "quantize")),
    ),
]
HostDtype = Annotated[
    str | None,
    typer.Option(help="full K/V pages in host memory: model or int8", autocompletion=words_of(("kv", "host_dtype"))),
]
Mode = Annotated[str | None, typer.Option(help="KV mode, see `kvchat modes`", autocompletion=complete_mode)]
Budget = Annotated[int | None, number("<int>", "tokens per KV head a decoded token may attend to")]
Param = Annotated[
    list[str] | None,
    typer.Option(
        metavar="[MODE.]KEY=VALUE",
        help="a parameter of the mode, or of the one named; repeatable",
        autocompletion=complete_param,
    ),
]
PinSystem = Annotated[
    bool | None, typer.Option("--pin-system/--no-pin-system", help="attend to all of the system prompt, in every mode")
]
System = Annotated[str | None, typer.Option(help="system prompt")]
MaxNewTokens = Annotated[int | None, number("<int>", "length of the answer at most")]
Temperature = Annotated[float | None, number("<float>", "0 always takes the likeliest token")]
TopK = Annotated[int | None, number("<int>", "draw among the k likeliest tokens; 0 for all")]
TopP = Annotated[float | None, number("<float>", "draw among the likeliest with this probability together")]
MinP = Annotated[float | None, number("<float>", "draw among tokens this fraction as likely as the best")]
RepetitionPenalty = Annotated[float | None, number("<float>", "over 1: what is there becomes less likely")]
StopAt = Annotated[list[str] | None, typer.Option(help="a string that ends the answer; repeatable")]
Seed = Annotated[int | None, number("<int>", "the same seed gives the same text")]
Prompt = Annotated[str | None, typer.Argument(help="the first question; it is sent when the model is ready")]
Files = Annotated[list[Path] | None, typer.Option("-f", "--file", help="put before the prompt; repeatable")]
Theme = Annotated[str | None, typer.Option(help="name of a theme", autocompletion=complete_theme)]
Resume = Annotated[bool, typer.Option("-c", "--continue", help="go on with the latest conversation")]
Record = Annotated[
    Path | None, typer.Option(metavar="FILE", help="write what is said and measured to FILE, for kvchat replay")
]
Plain = Annotated[bool, typer.Option("--plain", help="line by line, without colors, for screen readers and pipes")]


def flags(params: Mapping[str, Any]) -> SettingsSource:
    """The settings among a command's options.

    Raises:
        UsageError: a ``--param`` is not KEY=VALUE, or no mode has it; or several modes begin like ``--mode``.
    """
    params = {**params, "mode": mode_named(params.get("mode"))}
    shared = {name: _keys_of_shared(name, params.get(name), params.get("mode")) for name in sorted(SHARED)}
    keys = {**KEYS, **shared}
    given = {name: None if params.get(name) == [] else params.get(name) for name in keys}
    options = {f"--{name.replace('_', '-')}": (keys[name], value) for name, value in given.items()}
    return sources.flag_source({**options, **_params(params.get("param") or (), params.get("mode"))})


def mode_named(given: str | None) -> str | None:
    """The mode that ``given`` is or begins, as in ``/mode``; what begins none stays, for the settings to refuse.

    Raises:
        UsageError: it begins several.
    """
    begins_one = given and any(name.startswith(given.lower()) for name in modes.registered())
    return resolve(given, modes.registered(), "KV mode") if given and begins_one else given


def _keys_of_shared(parameter: str, value: Any, mode: str | None) -> tuple[Key, ...]:
    """Where a parameter that means the same in every mode is set: in ``mode`` and every other that accepts the value.

    If no mode accepts it, ``mode`` or else all modes refuse it.
    """
    meant = [name for name in modes.having(parameter) if name == mode or name in modes.accepting(parameter, value)]
    return tuple(("kv", name, parameter) for name in meant or modes.having(parameter))


def _params(given: Iterable[str], mode: str | None) -> dict[str, tuple[tuple[Key, ...], str]]:
    options = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f'--param "{text}" is not KEY=VALUE.', hint="For example: --param budget=512")
        keys = _keys_of_shared(name, value, mode) if name in SHARED else (_key_of(name, value, mode),)
        options[f"--param {name}"] = (keys, value)
    return options


def _key_of(parameter: str, value: str, mode: str | None) -> Key:
    """Where the parameter of one mode is set: in the one named before it, in ``mode``, or in the only one that has it.

    Raises:
        UsageError: there is no such mode or parameter, or it is not said which mode is meant.
    """
    named, dot, name = parameter.rpartition(".")
    if dot:
        modes.parse(named, {name: value})
        return ("kv", named, name)
    having = modes.having(name)
    if not having:
        known = {key for cls in modes.registered().values() for key in cls.model_fields}
        raise UsageError(f'No mode has a parameter "{name}".', did_you_mean(name, known))
    if mode not in having and len(having) > 1:
        ways = " or ".join(f"--param {other}.{name}=" for other in having)
        raise UsageError(f"--param {name} is a parameter of {' and '.join(having)}.", hint=f"Write {ways}, or --mode.")
    return ("kv", mode if mode in having else having[0], name)
