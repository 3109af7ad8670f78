"""The queries of a prompt's last tokens, which some modes look at to choose what they keep of it.

They are held whatever the mode is, because a comparison and a person enter a mode after the prompt was read.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvchat.kv.geometry import Geometry

ROWS = 32  # tokens: SnapKV's window, and 8 MiB of an 8B model


@dataclass(frozen=True)
class Noted:
    """A copy of what was noted, to be put back."""

    rows: Tensor
    spans: tuple[range, ...]


class PromptQueries:
    """``rows [layers, H_q, ROWS, d_k]``, the newest last; ``spans`` are the positions of each layer's.

    They are those of the last prompt alone: a decoded token before it ends the span.
    """

    def __init__(self, geometry: Geometry, device: torch.device) -> None:
        g = geometry
        self.rows = torch.zeros((g.layers, g.q_heads, ROWS, g.d_k), dtype=g.dtype, device=device)
        self.spans = [range(0)] * g.layers

    def note(self, layer: int, start: int, query: Tensor) -> None:
        """Keep the last of a prefill's ``query [H_q, n, d_k]``, whose tokens begin at position ``start``."""
        span, end = self.spans[layer], start + query.shape[1]
        first = span.start if span.stop == start else start
        self.rows[layer].copy_(torch.cat((self.rows[layer], query[:, -ROWS:]), 1)[:, -ROWS:])
        self.spans[layer] = range(max(first, end - ROWS), end)

    def truncate(self, tokens: int) -> None:
        """Forget those of all but the first ``tokens``."""
        for layer, span in enumerate(self.spans):
            if span.stop > tokens:
                self.rows[layer].copy_(self.rows[layer].roll(span.stop - tokens, 1))
                self.spans[layer] = range(min(span.start, tokens), tokens)

    def of(self, layer: int, most: int = ROWS) -> tuple[range, Tensor]:
        """The positions of the last ``most`` tokens of the prompt at most, and their queries ``[H_q, n, d_k]``."""
        span = self.spans[layer][-most:]
        return span, self.rows[layer][:, ROWS - len(span) :]

    def copied(self) -> Noted:
        """What is noted now."""
        return Noted(self.rows.clone(), tuple(self.spans))

    def restore(self, noted: Noted) -> None:
        """Put back what was noted once."""
        self.rows.copy_(noted.rows)
        self.spans = list(noted.spans)
