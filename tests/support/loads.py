"""``Load`` commands in one call."""

from __future__ import annotations

from typing import Any

from kvchat.protocol.figures import Params
from kvchat.protocol.messages import Load


def load_in(mode: str, params: Params | None = None, **fields: Any) -> Load:
    """A ``Load`` that starts in ``mode`` with its ``params``."""
    return Load(mode=mode, given={mode: params or {}}, **fields)
