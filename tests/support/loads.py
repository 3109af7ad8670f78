"""What a session is asked for, in one call."""

from __future__ import annotations

from typing import Any

from kvchat.protocol.figures import Params
from kvchat.protocol.messages import Load


def entering(mode: str, params: Params | None = None, **fields: Any) -> Load:
    """The ``Load`` that begins in ``mode``, with ``params`` given for it."""
    return Load(mode=mode, given={mode: params or {}}, **fields)
