"""Make text that kvchat did not write harmless for a terminal.

Control characters become visible marks: C0 and DEL become U+2400 and the following, lone surrogates U+FFFD. C1 and
characters that embed, isolate or override a text direction, which could reorder the rest of a line, become ‹U+009B›.
Newlines, tabs and the direction marks of right-to-left texts stay.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

KEPT = "\n\t"
DIRECTIONS = (*range(0x202A, 0x202F), *range(0x2066, 0x206A))

MARKS = {
    **{code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in KEPT},
    0x7F: "\u2421",
    **{code: f"‹U+{code:04X}›" for code in (*range(0x80, 0xA0), *DIRECTIONS)},
    **dict.fromkeys(range(0xD800, 0xE000), "\ufffd"),
}
_OF_TYPED = {code: mark for code, mark in MARKS.items() if code not in DIRECTIONS}
_CONTROL = re.compile("[" + "".join(re.escape(chr(code)) for code in MARKS) + "]")


def visible(text: str) -> str:
    """Return ``text`` with a mark for every control character, and CRLF as a newline."""
    if not _CONTROL.search(text):
        return text
    return text.replace("\r\n", "\n").translate(MARKS)


def typed(text: str) -> str:
    """Return ``text`` like ``visible``, but keep characters that change the direction, because a model reads it."""
    return text.replace("\r\n", "\n").translate(_OF_TYPED) if _CONTROL.search(text) else text


def visible_fields(value: Any) -> Any:
    """Make every string in ``value`` ``visible``: in dataclasses, tuples, lists and dicts, keys included."""
    match value:
        case str():
            return visible(value)
        case tuple() | list():
            return type(value)(map(visible_fields, value))
        case dict():
            return {visible_fields(key): visible_fields(item) for key, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.replace(value, **{name: visible_fields(item) for name, item in vars(value).items()})
    return value
