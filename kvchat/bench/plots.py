"""Plots of results, drawn with matplotlib (the extra ``plot``) as SVG or PNG, by the file name.

They are made without a display, and of one style.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvchat import files, libraries
from kvchat.bench.report import named
from kvchat.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage


BUDGET = re.compile(r"budget=\w+,?")  # of a variant
FORMATS = (".svg", ".png")
# Texts of an SVG stay texts; a fixed salt gives equal files for equal data.
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "kvchat"}
Row = Mapping[str, Any]


def decode(result: Mapping[str, Any], file: Path) -> None:
    """Plot ms per decoded token against tokens stored: a line per variant, dashed for transformers, and the floor.

    Raises:
        UsageError: the file cannot be written.
    """
    rows = [row for row in result["rows"] if not row.keys() & {"failed", "refused"}]
    figure = empty(8, 5)
    panel = figure.subplots()
    for name in dict.fromkeys(map(named, rows)):
        mine = [row for row in rows if named(row) == name]
        style = "-" if "change_rate" in mine[0] else "--"
        panel.plot([row["context"] for row in mine], [row["ms"] for row in mine], style, marker="o", label=name)
    if floor := result["floor_ms"]:
        panel.axhline(floor, color="black", linestyle=":", linewidth=1, label=f"floor {floor:.3g} ms")
    panel.set(xlabel="tokens stored", ylabel="ms per decoded token", ylim=(0, None))
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    save(figure, file, result, "ms per decoded token")


def agreement(result: Mapping[str, Any], file: Path) -> None:
    """Plot KL divergence against tokens read: a line per mode, a point per budget.

    Raises:
        UsageError: the file cannot be written.
    """
    figure = empty(7, 4.5)
    panel = figure.subplots()
    points = [
        (row["variant"], row["read_mean"], row["kl_mean"])
        for row in result["summary"]
        if "refused" not in row and row["kl_mean"] > 0  # the scale is logarithmic
    ]
    _by_tokens_read(panel, points)
    panel.set(ylabel="KL divergence from full in nats", yscale="log")
    panel.legend(frameon=False, fontsize=8)
    save(figure, file, result, "agreement with full, by tokens read")


def recall(result: Mapping[str, Any], file: Path) -> None:
    """Plot the share of right answers against tokens read: a panel per task, a line per mode, a point per budget.

    Raises:
        UsageError: the file cannot be written.
    """
    rows = [{**row, "variant": row.get("asked", row["variant"])} for row in result["summary"] if row["cases"]]
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    figure = empty(7, 2.6 * len(tasks) + 1.2)
    panels = figure.subplots(len(tasks), squeeze=False)[:, 0]
    for task, panel in zip(tasks, panels, strict=True):
        mine = [row for row in rows if row["task"] == task]
        _by_tokens_read(panel, [_recalled(mine, variant) for variant in dict.fromkeys(row["variant"] for row in mine)])
        panel.set_title(task, loc="left", fontsize=9)
        panel.set(ylabel="share right", ylim=(-0.05, 1.05))
    panels[0].legend(frameon=False, fontsize=8)
    save(figure, file, result, "facts found by what is read")


def _recalled(rows: Sequence[Row], variant: str) -> tuple[str, float, float]:
    """The tokens a variant read and its share of right answers, over all lengths and depths."""
    mine = [row for row in rows if row["variant"] == variant]
    cases = sum(row["cases"] for row in mine)
    read = sum(row["read_tokens"] * row["cases"] for row in mine) / cases
    return variant, read, sum(row["right"] for row in mine) / cases


def _by_tokens_read(panel: Axes, points: Sequence[tuple[str, float, float]]) -> None:
    """Plot (variant, tokens read, figure); variants that differ only in budget share a line."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for variant, read, value in points:
        lines.setdefault(BUDGET.sub("", variant).rstrip(":,"), []).append((read, value))
    for name, found in lines.items():
        panel.plot(*zip(*sorted(found), strict=True), marker="o", label=name)
    panel.set(xlabel="tokens read", xlim=(0, None))


def empty(width: float, height: float) -> Figure:
    """Make an empty figure of ``width`` x ``height`` inches; without pyplot, which would look for a display."""
    from matplotlib.figure import Figure  # an optional extra, and slow to import

    return Figure((width, height), layout="constrained")


def save(figure: Figure, file: Path, result: Mapping[str, Any], title: str) -> None:
    """Write the figure under a title with model and machine.

    Raises:
        UsageError: the file cannot be written.
    """
    from matplotlib import rc_context

    figure.suptitle(f"{result['model']['name']}: {title}\n{_environment(result)}", fontsize=10)
    drawn, form = BytesIO(), file.suffix.lower().removeprefix(".")
    with rc_context(STYLE):
        figure.savefig(drawn, format=form, dpi=150, metadata={"Date": None} if form == "svg" else None)
    files.save(file, drawn.getvalue(), "Use another --plot.")


def _environment(result: Mapping[str, Any]) -> str:
    e = result["environment"]
    device = e["gpu"] or f"{e['processor']}, {e['threads']} threads"
    return f"{device}; {result['model']['dtype']}; torch {e['torch']}, transformers {e['transformers']}"


DRAWN: dict[str, Callable[[Mapping[str, Any], Path], None]] = {
    "agreement": agreement,
    "decode": decode,
    "recall": recall,
}


def draw(result: Mapping[str, Any], file: Path) -> None:
    """Draw a complete result.

    Raises:
        UsageError: the experiment has no picture, or the file cannot be written.
    """
    name = result["experiment"]
    drawn = paper if "parts" in result else DRAWN.get(name)
    if drawn is None:
        raise UsageError(f'There is no plot of "{name}".', hint=f"There are plots of {', '.join(sorted(DRAWN))}.")
    try:
        drawn(result, file)
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(
            f"The result of {name} cannot be drawn.", f"{type(error).__name__}: {error}.", "Measure it again."
        ) from None


def paper(result: Mapping[str, Any], file: Path) -> None:
    """Draw every figure of a paper's study: lines over decoded tokens, or a matrix.

    Raises:
        UsageError: it has no figure, or the file cannot be written.
    """
    lines = [row for row in result["summary"] if "lines" in row]
    matrices = [row for row in result["summary"] if "matrix" in row]
    pictures = [*dict.fromkeys(row["part"] for row in lines), *matrices]
    if not pictures:
        raise UsageError(f"{result['experiment']} has no plot of these parts.", hint="Measure parts that have a plot.")
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


def check(file: Path) -> None:
    """Check that a plot can be written to ``file``; cheap, so that it can run before a long measurement.

    Raises:
        UsageError: an unknown ending, a missing folder, or matplotlib is not installed.
    """
    if file.suffix.lower() not in FORMATS:
        raise UsageError(
            f"{file} is not a plot file.",
            "It does not end in .svg or .png.",
            "Use a name that ends in .svg or .png.",
        )
    files.check_folder(file)
    if find_spec("matplotlib") is None:
        raise UsageError("A plot needs matplotlib.", "It is not installed.", f"Run: {libraries.extra('plot')}")
