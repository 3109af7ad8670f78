"""Sources of settings: file, environment and flags; which source wins; errors with file, line and column.

Precedence: defaults < bundled profile < own profile (``profiles``) < config.toml < ``KVCHAT_*`` < flags. Every source
is a ``SettingsSource`` and is checked on its own, so a wrong value is reported even where another source overrides it.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import tomli
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from kvchat import files, paths
from kvchat.config.schema import Settings
from kvchat.config.validation_errors import choices, field_at, reason
from kvchat.errors import UsageError, nearest

Key = tuple[str, ...]
S = TypeVar("S", bound=BaseModel)
KEYS = "keys"  # the section whose names are ids of actions, with dots in them
DEVICE: Key = ("model", "device")
SECTIONS = tuple(f"KVCHAT_{section.upper()}_" for section in Settings.model_fields)  # how the settings' variables begin
RESERVED = {"KVCHAT_CONFIG", "KVCHAT_DATA_DIR", "KVCHAT_API_KEY"}


@dataclass(frozen=True)
class SettingsSource:
    """The values that a source sets, the origin of each and of a file's tables, and the lines to show in an error."""

    values: dict[Key, Any] = field(default_factory=dict)
    origins: dict[Key, str] = field(default_factory=dict)
    excerpts: dict[Key, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Resolved:
    """All settings, and the origin of each that is not a default."""

    settings: Settings
    origins: dict[Key, str]

    def lines(self) -> Iterator[str]:
        """Yield a line of TOML per key, with its origin as a comment; the line of an unset value is all comment."""
        for key in (*(key for key, _ in leaves()), *((KEYS, id) for id in self.settings.keys.given())):
            value, origin = at(self.settings, key), self.origins.get(key, "default")
            name = dotted(key)
            assignment = f"{name} = {to_toml(value)}" if value is not None else f"# {name} is unset"
            yield f"{assignment}   # {origin}"


# ---- sources ---------------------------------------------------------------------------------------


def load(
    flags: SettingsSource | None = None,
    environ: Mapping[str, str] = os.environ,
    profiles: Callable[[str], Iterable[SettingsSource]] = lambda device: (),
) -> Resolved:
    """Return all settings.

    ``profiles`` returns the sources for a device ("auto", "cpu", "cuda" or "cuda:N"), weakest first, and checks them.

    Raises:
        UsageError: a source has an unknown key or a wrong value, or config.toml is not TOML.
    """
    own = (file_source(paths.config_file()), environment_source(environ), flags or SettingsSource())
    check_all(*(partial(check, source) for source in own))
    devices = [source.values[DEVICE] for source in own if DEVICE in source.values]
    return _merged([*profiles(devices[-1] if devices else at(Settings(), DEVICE)), *own])


def resolve(*sources: SettingsSource) -> Resolved:
    """Merge the sources; later ones win.

    Raises:
        UsageError: the errors of all sources.
    """
    check_all(*(partial(check, source) for source in sources))
    return _merged(sources)


def _merged(sources: Sequence[SettingsSource]) -> Resolved:
    values = {key: value for source in sources for key, value in source.values.items()}
    origins = {key: source.origins[key] for source in sources for key in source.values}
    return Resolved(Settings.model_validate(_nest(values)), origins)


def file_source(path: Path, name: str = "") -> SettingsSource:
    """Return the settings of a TOML file, none if it does not exist; errors call it ``name``, by default its file name.

    Raises:
        UsageError: the file cannot be read or is not TOML.
    """
    name = name or path.name
    try:
        text = files.decoded(files.read(path), name)
        values = flatten(files.toml(text))
    except (FileNotFoundError, NotADirectoryError):  # HOME=/dev/null is not a folder
        return SettingsSource()
    except OSError as error:
        raise files.unreadable(str(path), error) from None
    except tomli.TOMLDecodeError as error:
        excerpt = _excerpt(text.split("\n")[error.lineno - 1], error.colno - 1)
        where = f"{name}:{error.lineno}: {error.msg}.\n  {path}{excerpt}"
        raise UsageError(where) from None
    lines = text.split("\n")
    places = _places(lines, values)
    return SettingsSource(
        values,
        {key: f"{name}:{number}" for key, (number, _) in places.items()},
        {key: f"\n  {path}{_excerpt(lines[number - 1], column)}" for key, (number, column) in places.items()},
    )


def environment_source(environ: Mapping[str, str]) -> SettingsSource:
    """Return the settings of ``KVCHAT_<SECTION>_<KEY>`` variables; empty ones count as unset.

    Raises:
        UsageError: a variable begins like a setting's, but there is no such setting.
    """
    names = _variables()
    given = {name: value for name, value in environ.items() if value and name.startswith(SECTIONS)}
    for name in given.keys() - names.keys() - RESERVED:
        raise UsageError(f"{name}: there is no such setting.{_near(name, names)}", hint="See kvchat config show.")
    return SettingsSource({names[name]: value for name, value in given.items()}, {names[name]: name for name in given})


def unknown_variables(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return a sentence for each KVCHAT_ variable without effect, except those that ``environment_source`` refuses."""
    names = _variables()
    unknown = [name for name in sorted(environ) if name.startswith("KVCHAT_") and name not in (*names, *RESERVED)]
    return [
        f"{name} has no effect: kvchat has no such variable.{_near(name, (*names, *RESERVED))}"
        for name in unknown
        if not name.startswith(SECTIONS)
    ]


def _variables() -> dict[str, Key]:
    """Return the key of every setting by its environment variable."""
    return {"_".join(("KVCHAT", *key)).upper(): key for key, _ in leaves()}


def flag_source(flags: Mapping[str, tuple[Iterable[Key], Any]]) -> SettingsSource:
    """Return the settings of flags: each has the keys that it sets and its value, None if it was not given."""
    given = {flag: (tuple(keys), value) for flag, (keys, value) in flags.items() if value is not None}
    return SettingsSource(
        {key: value for keys, value in given.values() for key in keys},
        {key: flag for flag, (keys, _) in given.items() for key in keys},
    )


def leaves(section: type[BaseModel] = Settings, at: Key = ()) -> Iterator[tuple[Key, FieldInfo]]:
    """Yield every key that can be set, in order."""
    for name, info in section.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            yield from leaves(info.annotation, (*at, name))
        else:
            yield (*at, name), info


def dotted(key: Key) -> str:
    """Return the key as TOML writes it; a name that contains a dot is quoted."""
    return ".".join(f'"{name}"' if "." in name else name for name in key)


def template() -> str:
    """Return a config.toml that sets nothing and describes everything."""
    lines = ["# kvchat's settings. Commented lines show the defaults.\n"]
    table: Key = ()
    for key, info in leaves():
        if key[:-1] != table:
            table = key[:-1]
            lines.append(f"\n[{'.'.join(table)}]")
        value = "" if info.default is None else to_toml(info.default)
        lines += [f"# {info.description}", f"# {key[-1]} = {value}".rstrip()]
    lines.append(f"\n[{KEYS}]\n# {Settings.model_fields[KEYS].description}")
    return "\n".join(lines) + "\n"


def typed(key: Key, value: Any) -> Any:
    """Parse the value that a person typed for a setting.

    Raises:
        UsageError: the setting does not take this value; the message is one sentence.
    """
    try:
        return at(Settings.model_validate(_nest({key: value})), key)
    except ValidationError as error:
        raise UsageError(_reason(key, error.errors()[0], Settings)) from None


# ---- refusals --------------------------------------------------------------------------------------


def check(source: SettingsSource, model: type[S] = Settings) -> S:  # type: ignore[assignment]  # the default is an S
    """Parse the source alone as ``model``, whose sections have defaults.

    Raises:
        UsageError: there are unknown keys or wrong values; the message has the line of each.
    """
    try:
        return model.model_validate(_nest(source.values))
    except ValidationError as error:
        # One flag may set several keys; its refusal is listed once.
        messages = dict.fromkeys(_refusal(source, details, model) for details in error.errors())
        raise UsageError("\n".join(messages)) from None


def check_all(*checks: Callable[[], object]) -> None:
    """Run all checks.

    Raises:
        UsageError: some failed; the message has the errors of all.
    """
    refusals = []
    for each in checks:
        try:
            each()
        except UsageError as refused:
            refusals.append(str(refused))
    if refusals:
        raise UsageError("\n".join(refusals))


def _refusal(source: SettingsSource, details: ErrorDetails, model: type[BaseModel]) -> str:
    key = tuple(str(part) for part in details["loc"])
    near = [known for known in source.origins if known[: len(key)] == key or key[: len(known)] == known]
    set_by = min(near, key=lambda known: abs(len(known) - len(key)))
    excerpt = source.excerpts.get(set_by, "")
    named = f"{'.'.join(key)}: " if excerpt else ""
    return f"{source.origins[set_by]}: {named}{_reason(key, details, model)}{excerpt}"


def _reason(key: Key, details: ErrorDetails, model: type[BaseModel]) -> str:
    value, kind = json.dumps(details["input"], ensure_ascii=False, default=str), details["type"]
    if kind == "extra_forbidden":
        return f"there is no such setting.{_near(key[-1], _siblings(model, key)) or _elsewhere(model, key[-1])}"
    if kind.startswith("model_"):
        return f"a table [{'.'.join(key)}] is expected, not {value}."
    field = field_at(model, key)
    near = _near(str(details["input"]), choices(field) if field else ())
    return f"{value} is not valid: {reason(model, details)}.{near}"


def _siblings(model: type[BaseModel], key: Key) -> Iterable[str]:
    """Return the keys of the section that ``key`` would belong to."""
    parent = field_at(model, key[:-1])
    section = parent.annotation if parent else model
    return section.model_fields if isinstance(section, type) and issubclass(section, BaseModel) else ()


def _elsewhere(model: type[BaseModel], name: str) -> str:
    """Return which sections have a setting of this name."""
    sections = ", ".join(f"[{'.'.join(known[:-1])}]" for known, _ in leaves(model) if known[-1] == name)
    return f' "{name}" belongs in {sections}.' if sections else ""


def _near(given: str, known: Iterable[str]) -> str:
    near = nearest(given, known)
    return f' Did you mean "{near}"?' if near else ""


def _excerpt(line: str, column: int | None = None) -> str:
    """Return the source line with a caret below ``column``, by default below its value."""
    if column is None:
        column = re.match(r"\s*([^=]*=\s*(?=\S))?", line).end()  # type: ignore[union-attr]  # it matches anything
    return f"\n  {line.replace(chr(9), ' ')}\n  {' ' * column}^"


# ---- trees -----------------------------------------------------------------------------------------


def _places(lines: list[str], keys: Iterable[Key]) -> dict[Key, tuple[int, int | None]]:
    """Return the line of each table and key (inside a value, the value's line), and the column of a header's name."""
    places: dict[Key, tuple[int, int | None]] = {}
    table: Key = ()
    is_text = False  # inside a string of several lines
    for number, line in enumerate(lines, 1):
        header = re.match(r"\s*\[([^],[]+)\]\s*(#|$)", line)
        named = header or re.match(r"\s*([^#=]+)=", line)
        if named and not is_text:
            key: Key = () if header else table
            for name in re.finditer(r"""[^\s."']+|"[^"]*"|'[^']*'""", named[1]):
                key = _leaf((*key, name[0].strip("\"'")))
                places.setdefault(key, (number, named.start(1) + name.start() if header else None))
            table = key if header else table
        is_text ^= (line.count('"""') + line.count("'''")) % 2 == 1
    for key in keys:
        outer = (key[:length] for length in range(len(key), 0, -1))
        places[key] = next((places[known] for known in outer if known in places), (1, None))
    return places


def flatten(tree: Mapping[str, Any], at: Key = ()) -> dict[Key, Any]:
    """Return the values of nested tables by their keys."""
    flat: dict[Key, Any] = {}
    for name, value in tree.items():
        flat |= flatten(value, (*at, name)) if isinstance(value, dict) else {_leaf((*at, name)): value}
    return flat


def _leaf(key: Key) -> Key:
    """Return ``key``, with the id of an action as one name whether or not the file quotes it."""
    return (KEYS, ".".join(key[1:])) if key[0] == KEYS and len(key) > 1 else key


def _nest(values: Mapping[Key, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for (*parents, last), value in values.items():
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return tree


def at(settings: BaseModel, key: Key) -> Any:
    value: Any = settings
    for name in key:
        value = getattr(value, name)
    return value


def to_toml(value: Any) -> str:
    import tomlkit  # 70 ms that only `kvchat config` needs

    text: str = tomlkit.item(list(value) if isinstance(value, tuple) else value).as_string()
    return text
