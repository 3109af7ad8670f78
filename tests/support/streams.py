"""Messages from a blocking stream."""

from __future__ import annotations

from typing import BinaryIO

from kvchat.protocol import wire
from kvchat.protocol.messages import Command, Event


def read_command(stream: BinaryIO) -> Command | None:
    """The next command, None at the end."""
    body = wire.read(stream)
    return None if body is None else wire.decode_command(body)


def read_event(stream: BinaryIO) -> Event | None:
    """The next event, None at the end."""
    body = wire.read(stream)
    return None if body is None else wire.decode_event(body)
