"""Command-line options: their types, the settings that they set, and how a shell completes them.

Options for settings are generated from the schema, in groups that commands share.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import typer
from typer.models import OptionInfo

from kvchat import paths
from kvchat.config import modes, presets, schema, sources
from kvchat.config.modes import SHARED, BudgetParameters, FullParameters, ModeParameters
from kvchat.config.schema import KvSection, ModelSettings, SamplingSettings, UiSettings
from kvchat.config.sources import Key, SettingsSource
from kvchat.config.validation_errors import choices
from kvchat.errors import UsageError, did_you_mean, resolve

Section = type[schema.Section] | type[ModeParameters]
# The settings that each option sets; for a mode's parameters they depend on the value.
NAME: Key = ("model", "name")
KEYS = {
    "model": (NAME,),
    "keep": (("ui", "conversations"),),
    **{key[1]: (key,) for key, _ in sources.leaves() if len(key) == 2 and key != NAME},
}
Prompt = Annotated[
    list[str] | None, typer.Argument(metavar="PROMPT", help="the first question, sent when the model is ready")
]
Files = Annotated[
    list[Path] | None, typer.Option("-f", "--file", help="a text file to put before the prompt; repeatable")
]
Resume = Annotated[
    bool, typer.Option("-c", "--continue", help="continue the latest conversation, in its mode; -m chooses the model")
]
Record = Annotated[
    Path | None, typer.Option(metavar="FILE", help="record text and measurements to FILE, for kvchat replay")
]
Plain = Annotated[bool, typer.Option("--plain", help="line by line, without colors, for screen readers and pipes")]
Offer = tuple[str, str]
Completer = Callable[[str], list[Offer]]
FEW = 6  # the most choices that help lists for an option


def setting(section: Section, name: str, *flags: str, complete: Completer | None = None) -> Any:
    """Return the option of a setting, with help and choices from its schema."""
    field = section.model_fields[name]
    words, kinds = choices(field), (field.annotation, *get_args(field.annotation))
    number = next((f"<{kind.__name__}>" for kind in (int, float) if kind in kinds), None)
    return typer.Option(
        *flags,
        help=f"{field.description}{'; repeatable' if get_origin(field.annotation) is tuple else ''}",
        metavar="|".join(words if len(words) <= FEW else [name.upper()]) or number,
        autocompletion=complete or one_of(words),
    )


def optional(section: Section, name: str, *flags: str, complete: Completer | None = None) -> Any:
    """Return the type of an option that changes its setting only if it is given.

    Numbers stay text, as in the environment, so that the settings check them and word the errors.
    """
    annotation = section.model_fields[name].annotation
    kind: Any = bool if annotation is bool else list[str] if get_origin(annotation) is tuple else str
    return Annotated[kind | None, setting(section, name, *flags, complete=complete)]


def taking(*groups: Mapping[str, Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of these groups, between its arguments and its own options; ``flags`` reads them."""
    shared = {name: hint for group in groups for name, hint in group.items()}

    def decorated(command: Callable[..., None]) -> Callable[..., None]:
        def run(**given: Any) -> None:
            command(**{name: value for name, value in given.items() if name not in shared})

        own = inspect.signature(command, eval_str=True).parameters.values()
        options = [each for each in own if any(isinstance(hint, OptionInfo) for hint in get_args(each.annotation))]
        arguments = [each for each in own if each not in options]
        middle = [parameter(name, hint, None) for name, hint in shared.items()]
        return signed(run, command.__doc__ or "", [*arguments, *middle, *options])

    return decorated


def parameter(name: str, hint: Any, default: Any) -> inspect.Parameter:
    """Return a keyword parameter of a command."""
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)


def signed(run: Callable[..., None], doc: str, parameters: Iterable[inspect.Parameter]) -> Callable[..., None]:
    """Give ``run``, which takes any keywords, the signature of a command with these parameters, for typer to read."""
    named = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in parameters]
    run.__signature__ = inspect.Signature(named)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in named}
    run.__doc__ = doc
    return run


def flags(params: Mapping[str, Any]) -> SettingsSource:
    """Return the settings among a command's options.

    Raises:
        UsageError: a ``--param`` is not KEY=VALUE, or no mode has it; ``--mode`` abbreviates several modes; or the
            ``--preset``, which the other options override, cannot be used.
    """
    model = params.get("named") or params.get("model")  # ``ModelArgument`` or -m
    params = {**params, "model": model, "mode": mode_named(params.get("mode"))}
    named = [name for name in sorted(SHARED) if params.get(name) is not None]
    shared = {name: _keys_of_shared(name, params[name], params.get("mode")) for name in named}
    keys = {**KEYS, **shared}
    given = {name: None if params.get(name) in ([], ()) else params.get(name) for name in keys}
    options = {f"--{name.replace('_', '-')}": (keys[name], value) for name, value in given.items()}
    asked = sources.flag_source({**options, **_params(params.get("param") or (), params.get("mode"))})
    if not (name := params.get("preset")):
        return asked
    preset = presets.read(presets.find(name)).values
    origins = {**dict.fromkeys(preset, f"--preset {name}"), **asked.origins}
    return SettingsSource({**preset, **asked.values}, origins)


def mode_named(given: str | None) -> str | None:
    """Return the mode that ``given`` names or abbreviates, as in ``/mode``; other text is refused later.

    Raises:
        UsageError: it abbreviates several modes.
    """
    begins_one = given and any(name.startswith(given.lower()) for name in modes.choosable())
    return resolve(given, modes.choosable(), "KV mode") if given and begins_one else given


def _keys_of_shared(parameter: str, value: Any, mode: str | None) -> tuple[Key, ...]:
    """Return the keys of a shared parameter: in ``mode`` and in every other mode that shares it and accepts the value.

    If no mode accepts the value, return the key in ``mode``, or else in all modes that share it, which then refuse it.
    """
    is_shared = mode is None or parameter in modes.shared_by(mode)
    sharing = [name for name in modes.having(parameter) if is_shared and parameter in modes.shared_by(name)]
    accepting = modes.accepting(parameter, value)
    meant = [name for name in modes.having(parameter) if name == mode or (name in sharing and name in accepting)]
    return tuple(("kv", name, parameter) for name in meant or sharing)


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
    """Return the key of a parameter: in the mode named before it, or ``mode``, or the only mode that has it.

    Raises:
        UsageError: there is no such mode or parameter, or several modes have it.
    """
    named, dot, name = parameter.rpartition(".")
    if dot:
        if named not in modes.having(name):
            modes.parse(named, {name: value})  # the error says whether the mode or the parameter is unknown
        return ("kv", named, name)
    having = modes.having(name)
    if not having:
        known = {key for cls in modes.choosable().values() for key in cls.model_fields}
        raise UsageError(f'No mode has a parameter "{name}".', did_you_mean(name, known))
    if mode not in having and len(having) > 1:
        forms = " or ".join(f"--param {other}.{name}=" for other in having)
        raise UsageError(f"--param {name} is a parameter of {' and '.join(having)}.", hint=f"Write {forms}, or --mode.")
    return ("kv", mode if mode in having else having[0], name)


def one_of(words: Sequence[str]) -> Completer:
    """Make a completer for a setting with few choices."""

    def complete(incomplete: str) -> list[Offer]:
        return [(word, "") for word in words if word.startswith(incomplete)]

    return complete


def complete_model(incomplete: str) -> list[Offer]:
    """Return the models in the usual folders; the shell completes paths."""
    from kvchat.models import catalog

    return [(model.name, model.kind) for model in catalog.find(()) if model.name.startswith(incomplete)]


ModelArgument = Annotated[
    str | None,
    typer.Argument(metavar="MODEL", help="the model, instead of -m", autocompletion=complete_model, show_default=False),
]


complete_device = one_of(("auto", "cpu", "cuda"))
NamedDevice = Annotated[str, setting(ModelSettings, "device", complete=complete_device)]


def complete_mode(incomplete: str) -> list[Offer]:
    return [(name, mode.title) for name, mode in modes.choosable().items() if name.startswith(incomplete)]


def complete_param(incomplete: str) -> list[Offer]:
    """Return the parameters of all modes as ``KEY=``; after the equals sign, the parameter's choices in every mode."""
    name, equals, _ = incomplete.partition("=")
    if not equals:
        fields = {name: field for mode in modes.choosable().values() for name, field in mode.model_fields.items()}
        return [(f"{name}=", field.description or "") for name, field in fields.items() if name.startswith(incomplete)]
    fields = {mode: modes.choosable()[mode].model_fields[name] for mode in modes.having(name)}
    words = {f"{name}={word}": mode for mode, field in fields.items() for word in choices(field)}
    return [(word, mode) for word, mode in words.items() if word.startswith(incomplete)]


def complete_theme(incomplete: str) -> list[Offer]:
    """Return the bundled themes and the user's own."""
    files = [*paths.bundled_themes_dir().glob("*.toml"), *paths.user_themes_dir().glob("*.toml")]
    return one_of(sorted({file.stem for file in files}))(incomplete)


def complete_preset(incomplete: str) -> list[Offer]:
    return one_of(presets.names())(incomplete)


LOAD = {
    "model": optional(ModelSettings, "name", "-m", "--model", complete=complete_model),
    "device": optional(ModelSettings, "device", complete=complete_device),
    "gpus": optional(ModelSettings, "gpus"),
    "split": optional(ModelSettings, "split"),
    "dtype": optional(ModelSettings, "dtype"),
    "quantize": optional(ModelSettings, "quantize"),
    "force": optional(ModelSettings, "force", "--force"),
    "chat_template": optional(ModelSettings, "chat_template", "--chat-template"),
    "template_args": optional(ModelSettings, "template_args", "--template-arg"),
    "host_dtype": optional(KvSection, "host_dtype"),
}
PARAMS = {
    "budget": optional(BudgetParameters, "budget"),
    "draft": optional(FullParameters, "draft"),
    "param": Annotated[
        list[str] | None,
        typer.Option(
            metavar="[MODE.]KEY=VALUE",
            help="a parameter of the mode, or of MODE; repeatable",
            autocompletion=complete_param,
        ),
    ],
}
MODE = {"mode": optional(KvSection, "mode", complete=complete_mode), **PARAMS}
SYSTEM = {
    "preset": Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="a system prompt, sampling and mode saved with /preset; other options override it",
            autocompletion=complete_preset,
        ),
    ],
    "system": optional(ModelSettings, "system"),
    "pin_system": optional(ModeParameters, "pin_system", "--pin-system/--no-pin-system"),
}
SAMPLING = {
    name: optional(SamplingSettings, name)
    for name in (
        "max_new_tokens",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "stop",
        "seed",
    )
}
UI = {
    "theme": optional(UiSettings, "theme", complete=complete_theme),
    "keep": optional(UiSettings, "conversations", "--keep/--no-keep"),
}

SERVED = {
    "keep": Annotated[
        bool | None,
        typer.Option("--keep", help="also save K/V to disk, so that conversations need no prefill after a restart"),
    ],
}
