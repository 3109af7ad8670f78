"""The queries of a prompt's last tokens, which some modes use to choose which of its tokens to keep.

They are recorded in every mode, because users and comparisons can enter another mode after prefill.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvchat.kv.geometry import Geometry

ROWS = 32  # tokens: SnapKV's window, and 8 MiB of an 8B model


class PromptQueries:
    """Queries ``rows [layers, H_q, ROWS, d_k]``, the newest last; ``span`` has the positions of their tokens.

    They belong to the last prompt only: the span does not extend over decoded tokens before it. A single token after a
    decoded one is not a prompt: when an answer is partly undone or continued, its last token is prefilled again.
    """

    def __init__(self, geometry: Geometry, device: torch.device) -> None:
        g = geometry
        self.rows = torch.zeros((g.layers, g.q_heads, ROWS, g.d_k), dtype=g.dtype, device=device)
        self.span = range(0)
        self._seen: dict[int, Tensor] = {}

    def note(self, layer: int, query: Tensor) -> None:
        """Record a prefill's ``query [H_q, n, d_k]`` of one layer; ``commit`` needs those of all layers."""
        new = query[:, -ROWS:]
        self._seen[layer] = torch.cat((self.rows[layer][:, new.shape[1] :], new), 1)

    def commit(self, start: int, tokens: int) -> None:
        """Keep the noted queries, if any, of a prefill of ``tokens`` tokens that began at position ``start``."""
        continues, end = bool(self.span) and self.span.stop == start, start + tokens
        if self._seen and (continues or tokens > 1):
            for layer, rows in self._seen.items():
                self.rows[layer].copy_(rows)
            self.span = range(max(self.span.start if continues else start, end - ROWS), end)
        self.discard()

    def discard(self) -> None:
        self._seen.clear()

    def truncate(self, tokens: int) -> None:
        if self.span.stop > tokens:
            for rows in self.rows:  # one layer at a time, because memory may be short
                rows.copy_(rows.roll(self.span.stop - tokens, 1))
            self.span = range(min(self.span.start, tokens), tokens)

    def of(self, layer: int, most: int = ROWS) -> tuple[range, Tensor]:
        """Return the positions of the last ``most`` prompt tokens (or fewer) and their queries ``[H_q, n, d_k]``."""
        span = self.span[-most:]
        return span, self.rows[layer][:, ROWS - len(span) :]

    def copied(self) -> tuple[Tensor, range]:
        return self.rows.clone(), self.span

    def restore(self, rows: Tensor, span: range) -> None:
        self.rows.copy_(rows)
        self.span = span
