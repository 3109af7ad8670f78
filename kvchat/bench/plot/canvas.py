"""The figures that plots are drawn in: made without a display, of one style, saved to SVG or PNG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvchat import files, install
from kvchat.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = (".svg", ".png")
MODE, BASELINE, EXPOSED, FAINT = "#2b7bba", "#a9b4c0", "#e08a2e", "#6b7785"
# Texts of an SVG stay texts; a fixed salt gives equal files for equal data.
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "kvchat"}

Row = Mapping[str, Any]


def check(file: Path) -> None:
    """Check that a plot can be written to ``file``; cheap, so that it can run before a long measurement.

    Raises:
        UsageError: an unknown ending, a missing folder, or matplotlib is not installed.
    """
    if file.suffix.lower() not in FORMATS:
        raise UsageError(
            f"{file} is no name for a plot.",
            "It ends in neither .svg nor .png.",
            "Give a name that ends in .svg or .png.",
        )
    if not file.absolute().parent.is_dir():
        raise UsageError(f"There is no folder {file.absolute().parent}.", hint="Make it first.")
    if find_spec("matplotlib") is None:
        raise UsageError("A plot needs matplotlib.", "It is not installed.", f"Run: {install.extra('plot')}")


def empty(width: float, height: float) -> Figure:
    """Make an empty figure of ``width`` x ``height`` inches; without pyplot, which would look for a display."""
    from matplotlib.figure import Figure  # an optional extra, and slow to import

    return Figure((width, height), layout="constrained")


def save(figure: Figure, file: Path, result: Mapping[str, Any], title: str) -> None:
    """Write the figure under a title with model and machine.

    Raises:
        UsageError: the file cannot be written.
    """
    figure.suptitle(f"{result['model']['name']}: {title}\n{_environment(result)}", fontsize=10)
    write(figure, file)


def write(figure: Figure, file: Path) -> None:
    """Write the figure.

    Raises:
        UsageError: the file cannot be written.
    """
    from matplotlib import rc_context

    drawn, form = BytesIO(), file.suffix.lower().removeprefix(".")
    with rc_context(STYLE):
        figure.savefig(drawn, format=form, dpi=150, metadata={"Date": None} if form == "svg" else None)
    try:
        files.write(file, drawn.getvalue())
    except OSError as error:
        raise files.unwritable(file, error, "Give another --plot.") from None


def shares(panel: Axes, lines: Sequence[str], columns: Sequence[str], matrix: Sequence[Sequence[float | None]]) -> None:
    """Draw shares from red to green with their percents; None is an empty cell."""
    drawn = [[float("nan") if value is None else value for value in line] for line in matrix]
    panel.imshow(drawn, cmap="RdYlGn", vmin=0, vmax=1, aspect="auto")
    panel.set_xticks(range(len(columns)), columns, fontsize=7)
    panel.set_yticks(range(len(lines)), lines, fontsize=7)
    for i, line in enumerate(matrix):
        for j, value in enumerate(line):
            if value is not None:
                panel.text(j, i, f"{100 * value:.0f}", ha="center", va="center", fontsize=7)


def smooth(values: Sequence[float], over: int = 16) -> list[float]:
    """The mean of each value and those before it, at most ``over``."""
    return [sum(part) / len(part) for part in (values[max(0, i + 1 - over) : i + 1] for i in range(len(values)))]


def _environment(result: Mapping[str, Any]) -> str:
    e = result["environment"]
    device = e["gpu"] or f"{e['processor']}, {e['threads']} threads"
    return f"{device}; {result['model']['dtype']}; torch {e['torch']}, transformers {e['transformers']}"
