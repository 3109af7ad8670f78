"""The queries of a prompt's last tokens, which some modes look at to choose what they keep of it.

They are held whatever the mode is, because a comparison and a person enter a mode after the prompt was read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvchat.kv.geometry import Geometry

ROWS = 32  # tokens: SnapKV's window, and 8 MiB of an 8B model


class PromptQueries:
    """``rows [layers, H_q, ROWS, d_k]``, the newest last; ``span`` are their tokens' positions.

    They are those of the last prompt alone: a decoded token before it ends the span. A single token after a decoded one
    is no prompt: where an answer is taken back in part, or goes on, its last token is read again.
    """

    def __init__(self, geometry: Geometry, device: torch.device) -> None:
        g = geometry
        self.rows = torch.zeros((g.layers, g.q_heads, ROWS, g.d_k), dtype=g.dtype, device=device)
        self.span = range(0)
        self._seen: dict[int, Tensor] = {}

    def note(self, layer: int, query: Tensor) -> None:
        """See a prefill's ``query [H_q, n, d_k]``; it counts from ``commit`` on, which needs that of each layer."""
        new = query[:, -ROWS:]
        self._seen[layer] = torch.cat((self.rows[layer][:, new.shape[1] :], new), 1)

    def commit(self, start: int, tokens: int) -> None:
        """Keep what was seen of a prefill of so many ``tokens`` that began at position ``start``; it may be nothing."""
        goes_on, end = bool(self.span) and self.span.stop == start, start + tokens
        if self._seen and (goes_on or tokens > 1):
            for layer, rows in self._seen.items():
                self.rows[layer].copy_(rows)
            self.span = range(max(self.span.start if goes_on else start, end - ROWS), end)
        self.discard()

    def discard(self) -> None:
        """Forget what was seen since ``commit``."""
        self._seen.clear()

    def truncate(self, tokens: int) -> None:
        if self.span.stop > tokens:
            for rows in self.rows:  # one at a time: where this is called memory may be short
                rows.copy_(rows.roll(self.span.stop - tokens, 1))
            self.span = range(min(self.span.start, tokens), tokens)

    def of(self, layer: int, most: int = ROWS) -> tuple[range, Tensor]:
        """The positions of the last ``most`` tokens of the prompt at most, and their queries ``[H_q, n, d_k]``."""
        span = self.span[-most:]
        return span, self.rows[layer][:, ROWS - len(span) :]

    def copied(self) -> tuple[Tensor, range]:
        return self.rows.clone(), self.span

    def restore(self, rows: Tensor, span: range) -> None:
        self.rows.copy_(rows)
        self.span = span
