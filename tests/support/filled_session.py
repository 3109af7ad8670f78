"""Sessions that hold any tokens, in modes that leave some of them out."""

from __future__ import annotations

from typing import Any

from kvchat.engine.session import Session

STREAMING = {"budget": 128, "sink": 32, "R": 1, "sigma": 0, "delta": 0}
# Of pages, which come and go on a CPU too.
SPECULATIVE = {"budget": 192, "sink": 32, "window": 64, "unit": "page", "index": "bounds"}


def filled(session: Session, tokens: int, mode: str = "full", **params: Any) -> Session:
    """``session``, in which ``tokens`` tokens are stored, in a mode."""
    session.prefill([(7 * i) % 4000 + 10 for i in range(tokens)])
    session.switch(mode, **params)
    return session
