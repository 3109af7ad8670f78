"""The ribbon: what the screen shows of where each stored token is, one letter and one digit a cell."""

from __future__ import annotations

import torch
from torch import Tensor

from kvchat.kv.manager import KVManager
from kvchat.kv.modes.base import ModeReport, TokenState
from kvchat.protocol.figures import MAX_RIBBON_CELLS

LETTERS = {
    TokenState.SINK: "S",
    TokenState.WINDOW: "W",
    TokenState.RESIDENT: "D",
    TokenState.RECALLED: "R",
    TokenState.ON_HOST: "H",
    TokenState.FROZEN: "F",
    TokenState.UNREACHABLE: "X",
    TokenState.PINNED: "P",
}


class Ribbon:
    """Reads a KV manager; remembers how many heads read each token to tell what was recalled since."""

    def __init__(self, kv: KVManager) -> None:
        self._kv = kv
        self._counts = torch.zeros(0)

    def cells(self, counts: Tensor, report: ModeReport) -> tuple[int, str, str]:
        """Tokens per cell, the cells' letters, and their read shares as digits.

        ``counts [total]`` are the (layer, KV head) pairs in which the last token's attention read each token.
        """
        total, g = self._kv.total, self._kv.state.geometry
        cell = g.page * max(1, -(-g.pages(total) // MAX_RIBBON_CELLS))
        shares = _shares(counts.double() / (g.layers * g.kv_heads), cell)
        recalled = self._recalled_cells(counts, cell)
        pinned = {position // cell for position in (*range(self._kv.mode.pinned), *self._kv.state.pins)}
        states = (
            TokenState.PINNED
            if i in pinned
            else TokenState.RECALLED
            if i in recalled
            else self._state((i * cell + min((i + 1) * cell, total)) // 2, s, report)
            for i, s in enumerate(shares)
        )
        letters = "".join(LETTERS[state] for state in states)
        return cell, letters, "".join(str(min(9, int(share * 10))) for share in shares)

    def _state(self, position: int, share: float, report: ModeReport) -> TokenState:
        """The state of a cell in whose middle ``position`` lies and of which a ``share`` was read."""
        mode = self._kv.mode
        if mode.sink > position:
            return TokenState.SINK
        if mode.window and position >= self._kv.total - mode.window:
            return TokenState.WINDOW
        if position < report.on_host:
            return TokenState.ON_HOST
        return TokenState.RESIDENT if share >= report.resident_share else report.absent

    def _recalled_cells(self, counts: Tensor, cell: int) -> set[int]:
        """Cells with a token that more layers and heads read now than at the last call."""
        before, self._counts = self._counts, counts.cpu()
        known = min(len(before), len(counts))
        came = (self._counts[:known] > before[:known]).nonzero().flatten()
        return set((came // cell).tolist())


def _shares(shares: Tensor, cell: int) -> list[float]:
    """Mean of ``shares [total]`` over each cell."""
    total = len(shares)
    cells = -(-total // cell)
    padded = torch.zeros(cells * cell, dtype=torch.float64, device=shares.device)
    padded[:total] = shares
    tokens = torch.full((cells,), cell, dtype=torch.float64, device=shares.device)
    if cells:
        tokens[-1] = total - (cells - 1) * cell
    means: list[float] = (padded.view(cells, cell).sum(1) / tokens).tolist()
    return means
