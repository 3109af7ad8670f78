"""Messages as bytes: a 4-byte big-endian length and that many bytes of UTF-8 JSON.

The JSON is an object with the message's class name under ``"type"`` and its fields. Arriving messages are validated
strictly by the fields' types; a missing field takes its default.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from functools import cache
from typing import Any, BinaryIO, get_args

from pydantic import TypeAdapter
from pydantic_core import from_json

from kvchat.protocol.messages import Command, Event

Message = Command | Event
COMMANDS: dict[str, type] = {cls.__name__: cls for cls in get_args(Command)}
EVENTS: dict[str, type] = {cls.__name__: cls for cls in get_args(Event)}
MAX_MESSAGE_BYTES = 64 * 2**20


def encode(message: Message) -> bytes:
    """Encode a message with its length prefix; a lone surrogate in a text becomes ``?``.

    Raises:
        ValueError: it contains something that JSON cannot represent.
    """
    fields = {"type": type(message).__name__, **vars(message)}
    try:
        text = json.dumps(fields, ensure_ascii=False, separators=(",", ":"), default=vars, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{type(message).__name__} cannot be sent: {error}") from None
    body = text.encode("utf-8", "replace")
    return struct.pack(">I", len(body)) + body


def decode_command(body: bytes) -> Command:
    """Return the command in ``body`` (without its length prefix).

    Raises:
        ValueError: it is not JSON of a command with fields of the right types.
    """
    command: Command = _decode(body, COMMANDS)
    return command


def decode_event(body: bytes) -> Event:
    event: Event = _decode(body, EVENTS)
    return event


def read(stream: BinaryIO) -> bytes | None:
    """Return the body of the next message from a blocking stream; None at the stream's end.

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
    """Return the length in a 4-byte prefix.

    Raises:
        ValueError: it is more than ``MAX_MESSAGE_BYTES``, so the stream is something else.
    """
    length: int = struct.unpack(">I", header)[0]
    if length > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {length} bytes; the stream does not speak kvchat's protocol")
    return length


def _decode(body: bytes, known: Mapping[str, type]) -> Any:
    try:
        return _adapter(known[from_json(body)["type"]]).validate_json(body, strict=True)
    except (ValueError, KeyError, TypeError) as error:
        why = " ".join(str(error).split())[:200]
        raise ValueError(f"no message of kvchat's protocol: {body[:80]!r} ({why})") from None


_adapter = cache(TypeAdapter)  # made for the first message of each type, because each takes time
