"""Random frames, most of which resemble messages."""

from __future__ import annotations

import dataclasses
import json
import os
import struct
from collections.abc import Iterable
from typing import Any, Literal, get_args, get_origin, get_type_hints

from hypothesis import settings
from hypothesis import strategies as st

# Frames that each test sends; KVCHAT_TEST_FRAMES=10000 is the long form.
FRAMES = int(os.environ.get("KVCHAT_TEST_FRAMES", "100"))
fuzzed = settings(max_examples=FRAMES)

WORDS = ("full", "streaming", "speculative", "user", "assistant", "system", "cpu", "auto", "bundled", "\x00", "<|end|>")
KEYS = ("full", "streaming", "speculative", "budget", "sink", "window", "tau", "mode", "self")
BOUNDS = (-1, 0, 1, 2**31, 2**63 - 1, 2**63, -(2**63) - 1, 10**400)

INTEGERS = st.integers(0, 5000) | st.integers() | st.sampled_from(BOUNDS)
TEXTS = st.text(max_size=20) | st.sampled_from(WORDS)
SCALARS = st.none() | st.booleans() | INTEGERS | st.floats() | TEXTS
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)
NESTED = st.integers(1, 3000).map(lambda depth: b'{"type": "Switch", "params": ' + b'{"a": ' * depth + b"}" * depth)


def framed(*bodies: bytes) -> bytes:
    """Bodies with their length prefixes."""
    return b"".join(struct.pack(">I", len(body)) + body for body in bodies)


def bodies(kinds: Iterable[type]) -> st.SearchStrategy[bytes]:
    """Bodies of frames: most are messages, some with a wrong field; others are arbitrary JSON or bytes."""
    kinds = tuple(kinds)
    messages = st.one_of(map(_message, kinds)).map(_dumped)
    names = st.sampled_from([kind.__name__ for kind in kinds])
    strange = st.dictionaries(st.sampled_from(["type", "text", "params"]), JSON, max_size=3).map(_dumped)
    loose = st.builds(lambda name, rest: _dumped({"type": name, **rest}), names, st.dictionaries(TEXTS, JSON))
    cut = st.builds(lambda body, end: body[: len(body) - end], messages, st.integers(1, 5))
    return st.one_of(*[messages] * 6, strange, loose, cut, NESTED, JSON.map(_dumped), st.binary(max_size=200))


def _message(kind: type) -> st.SearchStrategy[dict[str, Any]]:
    return _fields(kind).map(lambda fields: {"type": kind.__name__, **fields})


def _fields(kind: Any) -> st.SearchStrategy[dict[str, Any]]:
    values = {name: _mostly_valid(hint) for name, hint in get_type_hints(kind).items()}
    without_default = {
        field.name
        for field in dataclasses.fields(kind)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    }
    return st.fixed_dictionaries(
        {name: value for name, value in values.items() if name in without_default},
        optional={name: value for name, value in values.items() if name not in without_default},
    )


def _mostly_valid(hint: Any) -> st.SearchStrategy[Any]:
    return st.one_of(*[_valid(hint)] * 15, JSON)


def _valid(hint: Any) -> st.SearchStrategy[Any]:
    if dataclasses.is_dataclass(hint):
        return _fields(hint)
    if get_origin(hint) is Literal:
        return st.sampled_from(get_args(hint))
    inner = [_mostly_valid(argument) for argument in get_args(hint) if argument is not Ellipsis]
    match get_origin(hint):
        case origin if origin is tuple:
            return st.lists(inner[0], max_size=3)
        case origin if origin is dict:
            return st.dictionaries(st.sampled_from(KEYS), inner[1], max_size=3)
    if inner:
        return st.one_of(inner)
    simple = {int: INTEGERS, float: st.floats(), bool: st.booleans(), str: TEXTS, type(None): st.none(), Any: JSON}
    return simple[hint]


def _dumped(value: Any) -> bytes:
    return json.dumps(value).encode()
