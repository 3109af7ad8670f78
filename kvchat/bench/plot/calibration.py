"""The plot of a calibration: which KV heads resemble each other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvchat.bench.plot.canvas import empty, write

if TYPE_CHECKING:
    from matplotlib.axes import Axes


COLUMNS = 4  # of panels


def calibration(similarity: Sequence[Any], representatives: Sequence[Sequence[int]], file: Path) -> None:
    """Draw the overlap ``[layers, H, H]`` of KV heads, a panel per layer; the representatives' rows are marked.

    Raises:
        UsageError: the file cannot be written.
    """
    heads, rows = len(similarity[0]), -(-len(similarity) // COLUMNS)
    side = max(2.0, 0.35 * heads)
    figure = empty(COLUMNS * side, rows * (side + 0.3) + 0.5)
    panels = figure.subplots(rows, COLUMNS, squeeze=False).flat
    for layer, panel in enumerate(panels):
        if layer < len(similarity):
            _heat_map(panel, f"layer {layer}", similarity[layer], representatives[layer])
        else:
            panel.remove()
    figure.suptitle("Overlap of the KV heads' most attended tokens; ▸ represents", fontsize=10)
    write(figure, file)


def _heat_map(panel: Axes, title: str, matrix: Sequence[Sequence[float]], marked: Sequence[int]) -> None:
    panel.set_title(title)
    panel.imshow(matrix, cmap="Blues", vmin=0, vmax=1)
    panel.set_xticks([])
    panel.set_yticks(range(len(matrix)), ["▸" if head in marked else "" for head in range(len(matrix))])
    panel.tick_params(length=0)
    for i, row in enumerate(matrix):
        for j, value in enumerate(row):
            panel.text(
                j, i, f"{value:.2f}", ha="center", va="center", fontsize=7, color="white" if value > 0.7 else "black"
            )
