"""Errors for values that are not valid, in plain words derived from a field's annotation and bounds."""

from __future__ import annotations

import json
import types
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from kvchat.errors import UsageError, did_you_mean

M = TypeVar("M", bound=BaseModel)

BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


def validated(model: type[M], values: Mapping[str, Any], whose: str) -> M:
    """Parse ``values``, which may be text, as a ``model``; errors say ``whose`` they are.

    Raises:
        UsageError: a name is unknown, or a value is not valid.
    """
    try:
        return model.model_validate(values)
    except ValidationError as error:
        details = error.errors()[0]
    key = ".".join(map(str, details["loc"])) or "parameters"
    if details["type"] == "extra_forbidden":
        raise UsageError(f'{whose} has no parameter "{key}".', did_you_mean(key, model.model_fields))
    sentence = reason(model, details)
    title = f"{whose}: {key} = {details['input']!r} is not valid."
    raise UsageError(title, f"{sentence[0].upper()}{sentence[1:]}.", advice(field_at(model, details["loc"])))


def reason(model: type[BaseModel], details: ErrorDetails) -> str:
    """Return why pydantic refused a value of ``model``, as a clause such as ``it must be a whole number above 0``.

    The message of a validator's own ``ValueError`` is returned unchanged.
    """
    if details["type"] == "value_error":
        return str(details["ctx"]["error"])
    field = field_at(model, details["loc"])
    if field and len(details["loc"]) > 1 and _section(field).model_config.get("extra") == "allow":
        return "it must be non-empty text"  # a key of the user's own in an open section
    return f"it must be {expected(field)}" if field else "it must be a table"


def field_at(model: type[BaseModel], key: Sequence[int | str]) -> FieldInfo | None:
    """Return the field that ``key`` leads to or into, None if there is none."""
    field = None
    fields = model.model_fields
    for name in key:
        if name not in fields:
            break
        field = fields[str(name)]
        fields = _section(field).model_fields
    return field


def expected(field: FieldInfo) -> str:
    """Return the values the field takes, such as ``a number of at least 0 and below 1``.

    The description of a field with a pattern says what the pattern allows.
    """
    kind = _kind(field.annotation)
    if any(getattr(constraint, "pattern", None) for constraint in field.metadata):
        return field.description or "other text"
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(str, get_args(kind)))}"
    if kind in (int, float):
        return f"{'a whole number' if kind is int else 'a number'}{_range(field)}"
    if _section(field) is not BaseModel:
        return "a table"
    words = {bool: "true or false", str: "text that is not empty" if field.metadata else "text"}
    return words.get(kind) or _listed(kind) or f"as described: {field.description}"


def advice(field: FieldInfo | None) -> str:
    """Return the hint for a refused value."""
    if field is None or field.is_required():
        return "Choose another value."
    default = field.get_default(call_default_factory=True)
    shown = "" if default in (None, "", ()) else f", {json.dumps(default)}"
    return f"Choose another value, or keep the default{shown}."


def choices(field: FieldInfo) -> tuple[str, ...]:
    """Return the values of a field that takes only a few; none for other fields."""
    kind = _kind(field.annotation)
    if kind is bool:
        return ("true", "false")
    return tuple(map(str, get_args(kind))) if get_origin(kind) is Literal else ()


def _kind(annotation: Any) -> Any:
    """Return the annotation without ``None``."""
    if get_origin(annotation) not in (Union, types.UnionType):
        return annotation
    kinds = [kind for kind in get_args(annotation) if kind is not types.NoneType]
    return kinds[0] if len(kinds) == 1 else annotation


def _section(field: FieldInfo) -> type[BaseModel]:
    """Return the section that the field holds, ``BaseModel`` itself if it holds none."""
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else BaseModel


def _range(field: FieldInfo) -> str:
    bounds = {
        name: format(Decimal(str(getattr(constraint, name))), "f")
        for constraint in field.metadata
        for name in ("ge", "gt", "le", "lt")
        if hasattr(constraint, name)
    }
    if bounds.keys() == {"ge", "le"}:
        return f" from {bounds['ge']} to {bounds['le']}"
    words = BOUNDS | {"ge": "of at least"}
    return "".join(f" and {words[name]} {bounds[name]}" for name in words if name in bounds).removeprefix(" and")


def _listed(kind: Any) -> str:
    if get_origin(kind) is not tuple:
        return ""
    items = get_args(kind)
    if items[-1] is not Ellipsis:
        return f"a list of {len(items)} {'numbers' if set(items) <= {int, float} else 'strings'}"
    return "a list of non-empty strings" if get_origin(items[0]) else "a list of strings"
