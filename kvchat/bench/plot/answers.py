"""Plots of answers: the share that is right, by mode and by what was asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvchat.bench.plot.canvas import MODE, Row, empty, save, shares

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def recall(result: Mapping[str, Any], file: Path) -> None:
    """Draw a heat-map of the share right for each task (down) and variant (across): depths by lengths.

    Raises:
        UsageError: the file cannot be written.
    """
    summary = result["summary"]
    tasks, variants = (list(dict.fromkeys(row[name] for row in summary)) for name in ("task", "variant"))
    figure = empty(2.2 * len(variants) + 0.8, 1.9 * len(tasks) + 0.8)
    panels = figure.subplots(len(tasks), len(variants), squeeze=False)
    for task, line in zip(tasks, panels, strict=True):
        for variant, panel in zip(variants, line, strict=True):
            _recalled(panel, [row for row in summary if (row["task"], row["variant"]) == (task, variant)])
            panel.set_title(variant if task == tasks[0] else "", fontsize=8)
        line[0].set_ylabel(f"{task}\ndepth")
    save(figure, file, result, "facts found, by length and depth")


def passkey(result: Mapping[str, Any], file: Path) -> None:
    """Draw the share recalled, a bar per variant with its interval at 95 %.

    Raises:
        UsageError: the file cannot be written.
    """
    rows = [row for row in result["summary"] if row["cases"]]
    figure = empty(8, 0.4 * len(rows) + 1.6)
    panel = figure.subplots()
    panel.set_yticks(range(len(rows)), [row["variant"] for row in rows])
    panel.set(xlim=(0, 1.3), xticks=(0, 0.5, 1), ylim=(len(rows) - 0.4, -0.6), xlabel="recalled")
    for y, row in enumerate(rows):
        share, (low, high) = row["right"] / row["cases"], row["interval"]
        panel.barh(y, share, color=MODE)
        panel.errorbar(share, y, xerr=[[max(0.0, share - low)], [max(0.0, high - share)]], color="black", capsize=3)
        panel.text(
            1.02, y, f"{row['right']} of {row['cases']}, {row['read_tokens']:,.0f} read", va="center", fontsize=8
        )
    save(figure, file, result, result["what"])


def turns(result: Mapping[str, Any], file: Path) -> None:
    """Draw the share right by variant (down) and turn (across).

    Raises:
        UsageError: the file cannot be written.
    """
    _table(result, file, ("variant", "turn"), "right by turn")


def switches(result: Mapping[str, Any], file: Path) -> None:
    """Draw the share right by the mode that was told (down) and the mode that was asked (across).

    Raises:
        UsageError: the file cannot be written.
    """
    _table(result, file, ("told", "asked"), "right by the mode that was told and the mode that was asked")


def data(result: Mapping[str, Any], file: Path) -> None:
    """Draw the mean scores by task (down) and variant (across).

    Raises:
        UsageError: the file cannot be written.
    """
    _table(result, file, ("task", "variant"), result["what"])


def _table(result: Mapping[str, Any], file: Path, axes: tuple[str, str], title: str) -> None:
    rows = result["summary"]
    lines, columns = (list(dict.fromkeys(row[name] for row in rows)) for name in axes)
    by_place = {tuple(row[name] for name in axes): _share(row) for row in rows}
    figure = empty((1.3 if axes[1] != "turn" else 0.6) * len(columns) + 2.5, 0.5 * len(lines) + 1.6)
    panel = figure.subplots()
    matrix = [[by_place.get((line, column)) for column in columns] for line in lines]
    shares(panel, list(map(str, lines)), list(map(str, columns)), matrix)
    panel.set(xlabel=axes[1], ylabel=axes[0])
    save(figure, file, result, title)


def _share(row: Row) -> float | None:
    """The score of a row, or the share of its cases that were right."""
    if "score" in row:
        return None if row["score"] is None else float(row["score"])
    return row["right"] / row["cases"] if row["cases"] else None


def _recalled(panel: Axes, rows: Sequence[Row]) -> None:
    lengths, depths = (sorted({row[name] for row in rows}) for name in ("tokens", "depth"))
    right = {(row["depth"], row["tokens"]): _share(row) for row in rows}
    matrix = [[right.get((depth, length)) for length in lengths] for depth in depths]
    shares(panel, [f"{depth:g}" for depth in depths], [f"{length:,}" for length in lengths], matrix)
