"""Plots of the papers' studies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvchat.bench.plot.canvas import Row, empty, save
from kvchat.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.image import AxesImage


def paper(result: Mapping[str, Any], file: Path) -> None:
    """Draw every figure of a paper's study: lines over decoded tokens, or a matrix.

    Raises:
        UsageError: it has no figure, or the file cannot be written.
    """
    lines = [row for row in result["summary"] if "lines" in row]
    matrices = [row for row in result["summary"] if "matrix" in row]
    pictures = [*dict.fromkeys(row["part"] for row in lines), *matrices]
    if not pictures:
        raise UsageError(f"{result['experiment']} has no picture of these parts.", hint="Measure parts that have one.")
    figure = empty(9, 3.4 * len(pictures) + 0.6)
    for panel, picture in zip(figure.subplots(len(pictures), squeeze=False)[:, 0], pictures, strict=True):
        if isinstance(picture, str):
            _curves(panel, [row for row in lines if row["part"] == picture])
            title = result["parts"][picture]["title"]
        else:
            figure.colorbar(_matrix(panel, picture), ax=panel)
            title = f"{result['parts'][picture['part']]['title']}: {picture['row']}"
        panel.set_title(title, loc="left", fontsize=9)
    save(figure, file, result, result["what"])


def _curves(panel: Axes, rows: Sequence[Row]) -> None:
    for name, values in (pair for row in rows for pair in row["lines"].items()):
        panel.plot(values, label=name, linewidth=1)
    panel.set_xlabel("decoded token")
    panel.legend(frameon=False, fontsize=8)


def _matrix(panel: Axes, row: Row) -> AxesImage:
    """The row's matrix, with the names of its lines and columns where it has any."""
    named_axes = row.get("axes")
    if not named_axes:
        return panel.imshow(row["matrix"], cmap="viridis", aspect="auto")
    panel.set_xticks(range(len(named_axes["columns"])), named_axes["columns"])
    panel.set_yticks(range(len(named_axes["lines"])), named_axes["lines"])
    # Pictures of shares are compared with each other.
    return panel.imshow(row["matrix"], cmap="viridis", aspect="auto", vmin=0, vmax=1)
