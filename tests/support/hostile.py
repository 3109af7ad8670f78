"""Texts that try to control the terminal, and messages of the protocol filled with them."""

from __future__ import annotations

import dataclasses
import re
from typing import Any, get_args, get_origin, get_type_hints

from kvchat.protocol.figures import Params

# By name; the title's (OSC 0) ends with the bell and the clipboard's (OSC 52) with the string terminator.
SEQUENCES = {
    "OSC 52": "\x1b]52;c;aGFja2Vk\x1b\\",
    "OSC 0": "\x1b]0;hacked\x07",
    "cursor position report": "\x1b[6n",
    "device attributes": "\x1b[c",
    "DCS": "\x1bP+q544e\x1b\\",
    "C1 CSI": "\x9b31m",
    "C1 OSC": "\x9d0;hacked\x9c",
    "bidi override": "\u202etxet\u202c",
    "bidi isolate": "\u2067txet\u2069",
    "NUL": "\x00",
    "carriage return": "a\rb",
    "backspace": "c\x08d",
    "DEL": "\x7f",
}
MARKUP = "[bold]markup[/]"
# What bytes for a terminal must never contain.
FORBIDDEN = (
    "\x1b]52",
    "\x1b]0",
    "\x1b[6n",
    "\x1b[c",
    "\x1bP",
    "\x9b",
    "\x9d",
    "\x9c",
    "\u202e",
    "\u2067",
    "\x00",
    "\x08",
)


def hostile(name: str) -> str:
    """A text with all sequences and markup that begins with its name."""
    return f"«{name}»" + "".join(SEQUENCES.values()) + MARKUP


def fill(cls: type, **given: Any) -> Any:
    """Make a message with a hostile text in every field that holds text, except those given."""
    filled = {name: _value(hint, f"{cls.__name__}.{name}") for name, hint in get_type_hints(cls).items()}
    return cls(**{**filled, **given})


def names_in(text: str) -> set[str]:
    """The names of the hostile texts that are in a text."""
    return set(re.findall(r"«([\w.]+)»", text))


def forbidden_in(written: bytes) -> list[str]:
    """The forbidden sequences, as ``repr``, in bytes for a terminal."""
    return [repr(sequence) for sequence in FORBIDDEN if sequence.encode() in written]


def _value(hint: Any, name: str) -> Any:
    if hint is str:
        return hostile(name)
    if hint == Params:
        return {hostile(f"{name}.key"): hostile(f"{name}.value")}
    if get_origin(hint) is dict:
        return {hostile(f"{name}.of"): _value(get_args(hint)[1], name)}
    if hint in (int, float, bool):
        return hint(1)
    if dataclasses.is_dataclass(hint):
        return fill(hint)
    if get_origin(hint) is tuple and Ellipsis not in get_args(hint):
        return tuple(_value(kind, name) for kind in get_args(hint))
    kinds = [kind for kind in get_args(hint) if kind not in (type(None), Ellipsis)]
    value = _value(kinds[0], name)
    return (value,) if Ellipsis in get_args(hint) else value
