"""A layer's attention rule (scale, window, soft cap, sinks): plain data, the same for every model."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class AttentionSpec:
    """One layer's attention rule; compared by identity, because a tensor has no truth value.

    ``scaling`` multiplies q·k. With ``window`` a query at position q may attend to position kv only if
    kv > q - window (and kv <= q, as always). ``softcap`` c bounds the scaled scores: c·tanh(score / c).
    ``sinks`` [H_q] are learned logits that take part in the softmax and carry no value.
    """

    scaling: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
