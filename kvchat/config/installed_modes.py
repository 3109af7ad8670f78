"""KV modes of other packages: entry points of the group ``kvchat.modes``, each checked before it is used."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from pydantic import BaseModel

GROUP = "kvchat.modes"


def entries() -> list[EntryPoint]:
    """The entry points there are, in an order that does not depend on the installation."""
    return sorted(entry_points(group=GROUP), key=lambda entry: (entry.name, entry.value))


def package(entry: EntryPoint) -> str:
    """The package of an entry point, with its version."""
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist else "an unknown package"


def check(cls: Any, base: type[BaseModel]) -> None:
    """Check the value of an entry point: whether it is the parameter class of a mode, a subclass of ``base``.

    Raises:
        ValueError: it is none, or lacks a name, a title, an implementation, a default or the meaning of a figure.
    """
    if not _is_subclass(cls, base):
        raise ValueError(f"its value is not a subclass of {base.__module__}.{base.__name__}")
    for attribute in ("name", "title", "implementation"):
        if not isinstance(getattr(cls, attribute, None), str):
            raise ValueError(f"{cls.__name__} has no {attribute}")
    if not re.fullmatch(r"[a-z][a-z0-9_]*", cls.name) or hasattr(BaseModel, cls.name) or cls.name in ("mode", "params"):
        raise ValueError(f'"{cls.name}" is no name for a mode: lower-case letters, digits and _ make one')
    if not re.fullmatch(r"[\w.]+:\w+", cls.implementation):
        raise ValueError(f'its implementation "{cls.implementation}" is not package.module:Class')
    if not isinstance(cls.figures, Mapping) or not all(
        isinstance(part, str) for row in cls.figures.items() for part in row
    ):
        raise ValueError("its figures are no labels with what each means")
    missing = [name for name, field in cls.model_fields.items() if field.is_required()]
    if missing:
        raise ValueError(f"its parameter {missing[0]} has no default")
    cls()  # a validator of its own may refuse the defaults


def _is_subclass(cls: Any, base: type) -> bool:
    return isinstance(cls, type) and issubclass(cls, base)
