"""Messages from a blocking stream."""

from __future__ import annotations

from typing import BinaryIO

from kvchat.protocol import wire
from kvchat.protocol.messages import Event


def read_event(stream: BinaryIO) -> Event | None:
    body = wire.read(stream)
    return None if body is None else wire.decode_event(body)
