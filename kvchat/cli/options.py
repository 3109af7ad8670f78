"""Command-line options: their types, and the settings that they set."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import typer

from kvchat.config import sources
from kvchat.config.modes import registered
from kvchat.config.sources import Key, SettingsSource
from kvchat.errors import UsageError, did_you_mean

SAMPLING = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "stop")

Model = Annotated[str | None, typer.Option("-m", "--model", help="bundled, a folder, or a model's id on the hub")]
Device = Annotated[str | None, typer.Option(help="auto, cpu, cuda or cuda:N")]
Dtype = Annotated[str | None, typer.Option(help="auto, float32, bfloat16 or float16")]
Quantize = Annotated[str | None, typer.Option(help="none, or 4bit for weights in 4 bits (needs kvchat[bnb])")]
Mode = Annotated[str | None, typer.Option(help="KV mode, see `kvchat modes`")]
Budget = Annotated[int | None, typer.Option(help="tokens per KV head a decoded token may attend to")]
Param = Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help="a mode's parameter; repeatable")]
System = Annotated[str | None, typer.Option(help="system prompt")]


def flags(params: Mapping[str, Any]) -> SettingsSource:
    """The settings among a command's options.

    Raises:
        UsageError: a ``--param`` is not KEY=VALUE, or no mode has it.
    """
    given = {name: None if params.get(name) == [] else params.get(name) for name in _keys()}
    options = {f"--{name.replace('_', '-')}": (keys, given[name]) for name, keys in _keys().items()}
    return sources.flag_source({**options, **_params(params.get("param") or ())})


def _keys() -> dict[str, tuple[Key, ...]]:
    """What each option sets."""
    return {
        "model": (("model", "name"),),
        "device": (("model", "device"),),
        "dtype": (("model", "dtype"),),
        "quantize": (("model", "quantize"),),
        "system": (("model", "system"),),
        "mode": (("kv", "mode"),),
        "budget": _keys_of("budget"),
        "theme": (("ui", "theme"),),
        **{name: (("sampling", name),) for name in SAMPLING},
    }


def _keys_of(parameter: str) -> tuple[Key, ...]:
    """Where a mode parameter is set: in every mode that has it."""
    return tuple(("kv", name, parameter) for name, cls in registered().items() if parameter in cls.model_fields)


def _params(given: Iterable[str]) -> dict[str, tuple[tuple[Key, ...], str]]:
    known = {key for cls in registered().values() for key in cls.model_fields}
    options = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f'--param "{text}" is not KEY=VALUE.')
        if name not in known:
            raise UsageError(f'No mode has a parameter "{name}".', did_you_mean(name, known))
        options[f"--param {name}"] = (_keys_of(name), value)
    return options
