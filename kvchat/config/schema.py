"""Settings: what can be set, where each value came from, and refusals that name file, line and column.

Precedence: defaults < bundled profile < own profile (``profiles``) < config.toml < ``KVCHAT_*`` < flags. Every source
is a ``Layer`` and is checked on its own, so a wrong value is reported even where another source overrides it.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import tomli
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from kvchat import paths
from kvchat.config.modes import (
    PARAMETERS,
    FreezeParameters,
    FullParameters,
    SpeculativeParameters,
    StreamingParameters,
    SyncParameters,
    available_modes,
)
from kvchat.errors import UsageError
from kvchat.protocol import messages
from kvchat.protocol.messages import Params

Key = tuple[str, ...]
S = TypeVar("S", bound=BaseModel)
RESERVED = {"KVCHAT_CONFIG", "KVCHAT_DATA_DIR"}
DEFAULTS = messages.Sampling()


class Section(BaseModel):
    """Base of all: frozen, unknown keys refused, the literal below a field is its description."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


class ModelSettings(Section):
    name: str = Field("bundled", min_length=1)
    """bundled, a folder, or a model's id on the hub"""
    device: str = Field("auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    """auto, cpu, cuda or cuda:N"""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """number format of weights and K/V (auto: the model's own on a GPU, float32 on a CPU)"""
    quantize: Literal["none", "4bit"] = "none"
    """4bit: keep the weights in 4 bits (nf4), a third of the memory (pip install 'kvchat[bnb]')"""
    fast: bool = True
    """swap small pieces of the model for faster ones, checked when it is loaded"""
    system: str = ""
    """system prompt before every conversation; empty for none"""


class KvSettings(Section):
    mode: Literal["full", "freeze", "streaming", "sync", "speculative"] = "full"
    """the KV mode a conversation starts in"""
    full: FullParameters = FullParameters()
    """parameters of the full mode, whenever it is entered"""
    freeze: FreezeParameters = FreezeParameters()
    """parameters of the freeze mode, whenever it is entered"""
    streaming: StreamingParameters = StreamingParameters()
    """parameters of the streaming mode, whenever it is entered"""
    sync: SyncParameters = SyncParameters()
    """parameters of the sync mode, whenever it is entered"""
    speculative: SpeculativeParameters = SpeculativeParameters()
    """parameters of the speculative mode, whenever it is entered"""

    @field_validator("mode")
    @classmethod
    def _is_available(cls, mode: str) -> str:
        if not PARAMETERS[mode].available:
            raise ValueError(f"the {mode} mode is not available yet; available: {', '.join(available_modes())}.")
        return mode

    def params(self, mode: str) -> Params:
        """The parameters somebody set for ``mode``; the rest is left to kvchat."""
        section = getattr(self, mode, None)
        return section.model_dump(exclude_unset=True) if section else {}


class SamplingSettings(Section):
    temperature: float = Field(DEFAULTS.temperature, ge=0)
    """0 always takes the likeliest token"""
    top_k: int = Field(DEFAULTS.top_k, ge=0)
    """draw among the k likeliest tokens; 0 for all"""
    top_p: float = Field(DEFAULTS.top_p, gt=0, le=1)
    """draw among the likeliest tokens that together have this probability"""
    min_p: float = Field(DEFAULTS.min_p, ge=0, le=1)
    """draw among tokens at least this fraction as likely as the likeliest"""
    repetition_penalty: float = Field(DEFAULTS.repetition_penalty, gt=0)
    """over 1 makes tokens already there less likely"""
    seed: int | None = Field(DEFAULTS.seed, ge=0, lt=2**63)
    """the same seed gives the same text; unset draws anew each time"""
    stop: Annotated[tuple[str, ...], BeforeValidator(lambda v: (v,) if isinstance(v, str) else v)] = DEFAULTS.stop
    """strings that end the answer"""
    max_new_tokens: int = Field(DEFAULTS.max_new_tokens, ge=1)
    """length of an answer at most, in tokens"""

    def sampling(self) -> messages.Sampling:
        """The same as the engine takes it."""
        return messages.Sampling(**self.model_dump())


class UiSettings(Section):
    theme: str = "kvchat-dark"
    """name of a bundled or own theme"""
    history: bool = True
    """keep prompts for the next start"""


class Settings(Section):
    model: ModelSettings = ModelSettings()
    """the model and where it runs"""
    kv: KvSettings = KvSettings()
    """how K/V is kept"""
    sampling: SamplingSettings = SamplingSettings()
    """how the next token is drawn"""
    ui: UiSettings = UiSettings()
    """the application"""


@dataclass(frozen=True)
class Layer:
    """What one source sets, where it says so, and the lines to show when it is wrong."""

    values: dict[Key, Any] = field(default_factory=dict)
    origins: dict[Key, str] = field(default_factory=dict)
    excerpts: dict[Key, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Resolved:
    """All settings, and for each that is not a default where it was set."""

    settings: Settings
    origins: dict[Key, str]

    def lines(self) -> Iterator[str]:
        """Every key as a line of TOML with its origin as a comment; an unset value is a comment as a whole."""
        for key, _ in leaves():
            value, origin = _at(self.settings, key), self.origins.get(key, "default")
            assignment = f"{'.'.join(key)} = {_toml(value)}" if value is not None else f"# {'.'.join(key)} is unset"
            yield f"{assignment}   # {origin}"


# ---- sources ---------------------------------------------------------------------------------------


def load(
    flags: Layer | None = None,
    environ: Mapping[str, str] = os.environ,
    profiles: Callable[[str], Iterable[Layer]] = lambda device: (),
) -> Resolved:
    """The settings in force; ``profiles`` gives those of a device ("auto", "cpu", "cuda" or "cuda:N"), weakest first.

    Raises:
        UsageError: a source has an unknown key or a wrong value, or config.toml is not TOML.
    """
    said = (file_layer(paths.config_file()), env_layer(environ), flags or Layer())
    return resolve(*profiles(resolve(*said).settings.model.device), *said)


def resolve(*layers: Layer) -> Resolved:
    """Layers merged, later ones win."""
    values: dict[Key, Any] = {}
    origins: dict[Key, str] = {}
    for layer in layers:
        check(layer)
        values |= layer.values
        origins |= layer.origins
    return Resolved(Settings.model_validate(_nest(values)), origins)


def file_layer(path: Path, name: str = "") -> Layer:
    """What a TOML file sets; nothing where there is no file. ``name`` is what to call it, by default its own.

    Raises:
        UsageError: the file cannot be read or is not TOML.
    """
    name = name or path.name
    try:
        text = path.read_bytes().decode()
        values = _flatten(tomli.loads(text))
    except FileNotFoundError:
        return Layer()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{name}: byte {error.start} is not UTF-8.") from None
    except tomli.TOMLDecodeError as error:
        line = text.split("\n")[error.lineno - 1] if error.lineno <= text.count("\n") + 1 else ""
        raise UsageError(f"{name}:{error.lineno}: {error.msg}.", _excerpt(line, error.colno - 1)) from None
    lines = text.split("\n")
    numbers = _line_numbers(lines)
    return Layer(
        values,
        {key: f"{name}:{numbers[key]}" for key in values},
        {key: _excerpt(lines[numbers[key] - 1]) for key in values},
    )


def env_layer(environ: Mapping[str, str]) -> Layer:
    """What ``KVCHAT_<SECTION>_<KEY>`` variables set; empty ones count as unset.

    Raises:
        UsageError: a variable that begins like a setting but is none.
    """
    names = {"_".join(("KVCHAT", *key)).upper(): key for key, _ in leaves()}
    sections = tuple(f"KVCHAT_{section.upper()}_" for section in Settings.model_fields)
    given = {name: value for name, value in environ.items() if value and name.startswith(sections)}
    for name in given.keys() - names.keys() - RESERVED:
        raise UsageError(f"{name}: there is no such setting.{_near(name, names)}", hint="See kvchat config show.")
    return Layer({names[name]: value for name, value in given.items()}, {names[name]: name for name in given})


def flag_layer(flags: Mapping[str, tuple[Iterable[Key], Any]]) -> Layer:
    """What command-line flags set: flag -> the keys it sets and its value, None where it was not given."""
    given = {flag: (tuple(keys), value) for flag, (keys, value) in flags.items() if value is not None}
    return Layer(
        {key: value for keys, value in given.values() for key in keys},
        {key: flag for flag, (keys, _) in given.items() for key in keys},
    )


def leaves(section: type[BaseModel] = Settings, at: Key = ()) -> Iterator[tuple[Key, FieldInfo]]:
    """Every key that can be set, in order."""
    for name, info in section.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            yield from leaves(info.annotation, (*at, name))
        else:
            yield (*at, name), info


def template() -> str:
    """A config.toml that sets nothing and describes everything."""
    lines = ["# kvchat's settings. What is commented out shows the defaults.\n"]
    table: Key = ()
    for key, info in leaves():
        if key[:-1] != table:
            table = key[:-1]
            lines.append(f"\n[{'.'.join(table)}]")
        value = "" if info.default is None else _toml(info.default)
        lines += [f"# {info.description}", f"# {key[-1]} = {value}".rstrip()]
    return "\n".join(lines) + "\n"


# ---- refusals --------------------------------------------------------------------------------------


def check(layer: Layer, model: type[S] = Settings) -> S:  # type: ignore[assignment]  # the default is an S
    """The layer alone as ``model``, whose sections have defaults.

    Raises:
        UsageError: an unknown key or a wrong value, each with its line.
    """
    try:
        return model.model_validate(_nest(layer.values))
    except ValidationError as error:
        # one flag may set several keys: what it is refused for is said once
        messages = dict.fromkeys(_refusal(layer, details, model()) for details in error.errors())
        raise UsageError("\n".join(messages)) from None


def _refusal(layer: Layer, details: ErrorDetails, defaults: BaseModel) -> str:
    key = tuple(str(part) for part in details["loc"])
    set_by = next(known for known in layer.origins if known[: len(key)] == key or key[: len(known)] == known)
    origin, excerpt = layer.origins[set_by], layer.excerpts.get(set_by)
    named = f"{origin}: {'.'.join(key)}: " if excerpt else f"{origin}: "
    return named + _reason(key, details, defaults) + (excerpt or "")


def _reason(key: Key, details: ErrorDetails, defaults: BaseModel) -> str:
    value, kind = json.dumps(details["input"], ensure_ascii=False, default=str), details["type"]
    if kind == "literal_error":
        words = re.findall(r"'([^']*)'", details["ctx"]["expected"])
        return f"{value} is not one of {', '.join(words)}.{_near(str(details['input']), words)}"
    if kind == "extra_forbidden":
        return f"there is no such setting.{_near(key[-1], _at(defaults, key[:-1]).__class__.model_fields)}"
    if kind == "value_error":
        return str(details["ctx"]["error"])
    if kind.startswith("model_"):
        return f"a table [{'.'.join(key)}] is expected, not {value}."
    return f"{value} is refused: {details['msg'][0].lower()}{details['msg'][1:]}."


def _near(given: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(given, list(known), n=1)
    return f' Did you mean "{near[0]}"?' if near else ""


def _excerpt(line: str, column: int | None = None) -> str:
    """The source line with a caret below ``column``, by default below its value."""
    if column is None:
        column = re.match(r"\s*([^=]*=\s*(?=\S))?", line).end()  # type: ignore[union-attr]  # it matches anything
    return f"\n  {line.replace(chr(9), ' ')}\n  {' ' * column}^"


# ---- trees -----------------------------------------------------------------------------------------


def _line_numbers(lines: list[str]) -> dict[Key, int]:
    """The line on which the statement of each key begins: the first prefix of the file that has the key ends it."""
    numbers: dict[Key, int] = {}
    start = 1
    for end in range(1, len(lines) + 1):
        try:
            keys = _flatten(tomli.loads("\n".join(lines[:end])))
        except tomli.TOMLDecodeError:
            continue
        for key in keys:
            numbers.setdefault(key, start)
        start = end + 1
    return numbers


def _flatten(tree: Mapping[str, Any], at: Key = ()) -> dict[Key, Any]:
    flat: dict[Key, Any] = {}
    for name, value in tree.items():
        flat |= _flatten(value, (*at, name)) if isinstance(value, dict) else {(*at, name): value}
    return flat


def _nest(values: Mapping[Key, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for (*parents, last), value in values.items():
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return tree


def _at(settings: BaseModel, key: Key) -> Any:
    value: Any = settings
    for name in key:
        value = getattr(value, name)
    return value


def _toml(value: Any) -> str:
    import tomlkit  # 70 ms that only `kvchat config` needs

    text: str = tomlkit.item(list(value) if isinstance(value, tuple) else value).as_string()
    return text
