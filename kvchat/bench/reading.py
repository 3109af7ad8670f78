"""How many stored tokens the last decoded token read."""

from __future__ import annotations

import statistics

from kvchat.engine.session import Session


def tokens_read(session: Session) -> float:
    """Mean over layers and KV heads; waits for the device."""
    layers = range(session.info.layers)
    return statistics.fmean(session.attended(layer).float().sum(1).mean().item() for layer in layers)
