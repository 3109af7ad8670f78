"""Messages as bytes: a 4-byte big-endian length and that many bytes of UTF-8 JSON.

The JSON is an object with the message's class name under ``"type"`` and its fields beside it. What arrives is checked
against the fields' types, so that no caller has to: text is no number, a number is finite, an unknown
field is refused, a missing one takes its default, and a command is no event.
"""

from __future__ import annotations

import dataclasses
import json
import struct
from functools import cache, reduce
from operator import or_
from typing import Annotated, Any, BinaryIO, Literal, NotRequired, Required, cast, get_args, get_type_hints

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from kvchat.protocol.messages import Command, Event

Message = Command | Event
TYPES: dict[str, type] = {cls.__name__: cls for cls in get_args(Command) + get_args(Event)}
MAX_MESSAGE_BYTES = 64 * 2**20


def encode(message: Message) -> bytes:
    """A message with its length prefix; a lone surrogate in a text becomes ``?``.

    Raises:
        ValueError: it holds something that JSON has no form for.
    """
    fields = {"type": type(message).__name__, **vars(message)}
    try:
        text = json.dumps(fields, ensure_ascii=False, separators=(",", ":"), default=vars, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{type(message).__name__} cannot be sent: {error}") from None
    body = text.encode("utf-8", "replace")
    return struct.pack(">I", len(body)) + body


def decode_command(body: bytes) -> Command:
    """The command in ``body`` (without its length prefix).

    Raises:
        ValueError: the bytes are no JSON object of a command's type with its fields of the right types.
    """
    return cast("Command", _decode(body, _adapter(Command)))


def decode_event(body: bytes) -> Event:
    return cast("Event", _decode(body, _adapter(Event)))


def read(stream: BinaryIO) -> bytes | None:
    """The next message's body from a blocking stream, None at its end.

    Raises:
        ValueError: the stream does not speak the protocol.
    """
    header = stream.read(4)
    if len(header) < 4:
        return None
    length = parse_length(header)
    body = stream.read(length)
    return body if len(body) == length else None


def parse_length(header: bytes) -> int:
    """The length in a 4-byte prefix.

    Raises:
        ValueError: longer than ``MAX_MESSAGE_BYTES``, so the stream is something else.
    """
    length: int = struct.unpack(">I", header)[0]
    if length > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {length} bytes; the stream does not speak kvchat's protocol")
    return length


def _decode(body: bytes, adapter: TypeAdapter[dict[str, Any]]) -> Message:
    try:
        fields = adapter.validate_json(body)
    except ValidationError as error:
        raise ValueError(_refusal(body, error)) from None
    return cast("Message", TYPES[fields.pop("type")](**fields))


def _refusal(body: bytes, error: ValidationError) -> str:
    details = error.errors(include_url=False)[0]
    place = ".".join(map(str, details["loc"]))[:80]
    why = f"{place}: {details['msg'][:200]}" if place else details["msg"][:200]
    return f"no message of kvchat's protocol: {body[:80]!r} ({why.encode('unicode_escape').decode()})"


def _wire_form(cls: type) -> Any:
    """The message as a JSON object: its fields, those with a default optional, and ``type``."""
    hints = get_type_hints(cls, include_extras=True)
    optional = {
        field.name
        for field in dataclasses.fields(cls)
        if field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
    }
    fields = {name: NotRequired[hint] if name in optional else Required[hint] for name, hint in hints.items()}
    return cast("Any", TypedDict)(cls.__name__, {"type": Literal[cls.__name__], **fields})


@cache  # each takes as long as importing the messages, and a process reads one of the two
def _adapter(messages: Any) -> TypeAdapter[dict[str, Any]]:
    """Checks strictly, also the dataclasses inside: the sender is kvchat, and a text for a number is a mistake."""
    forms: Any = reduce(or_, map(_wire_form, get_args(messages)))
    return TypeAdapter(
        Annotated[forms, Field(discriminator="type")],
        config=ConfigDict(strict=True, extra="forbid", allow_inf_nan=False),
    )
