"""Plots of how near a mode stays to full: divergence, perplexity, and what a choice of parameters costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvchat.bench.plot.canvas import FAINT, Row, empty, save, smooth

if TYPE_CHECKING:
    from matplotlib.axes import Axes


COLUMNS = 4  # of the panels of heads
PERPLEXITY_OVER = 64  # tokens


def agreement(result: Mapping[str, Any], file: Path) -> None:
    """Draw the KL divergence along the passage, a line per variant, and the attention mass each head covers.

    Raises:
        UsageError: the file cannot be written.
    """
    summary = [row for row in result["summary"] if "refused" not in row]
    figure = empty(10, 3.2 + 2.2 * -(-len(summary) // COLUMNS))
    along, below = figure.subfigures(2, 1, squeeze=False, height_ratios=[3, 2.2 * -(-len(summary) // COLUMNS)])[:, 0]
    panel = along.subplots()
    for row in summary:
        runs = [each["kl"] for each in result["rows"] if each["variant"] == row["variant"] and "kl" in each]
        panel.plot(smooth([sum(step) / len(step) for step in zip(*runs, strict=True)]), label=row["variant"])
    panel.set(xlabel="decoded token", ylabel="KL in nats, mean of 16", yscale="log")
    panel.legend(frameon=False, fontsize=8)
    panels = below.subplots(-(-len(summary) // COLUMNS), COLUMNS, squeeze=False).flat
    for number, each in enumerate(panels):
        if number < len(summary):
            _heads(each, summary[number]["variant"], summary[number]["covered_heads"])
        else:
            each.remove()
    save(figure, file, result, "agreement with full")


def perplexity(result: Mapping[str, Any], file: Path) -> None:
    """Draw what each mode's tokens cost in nats beyond full's, along the passage; in nats where full cannot read it.

    Raises:
        UsageError: the file cannot be written.
    """
    rows = [row for row in result["rows"] if "refused" not in row]
    full = {row["passage"]: row["nats"] for row in rows if row["variant"] == "full"}
    figure = empty(10, 4)
    panel = figure.subplots()
    for variant in dict.fromkeys(row["variant"] for row in rows if not full or row["variant"] != "full"):
        mine = [row for row in rows if row["variant"] == variant and (not full or row["passage"] in full)]
        panel.plot(smooth(_beyond(mine, full), PERPLEXITY_OVER), label=variant, linewidth=1)
    panel.axhline(0, color=FAINT, linewidth=0.8) if full else None
    of = f"nats {'beyond full' if full else 'a token'}, mean of {PERPLEXITY_OVER}"
    panel.set(xlabel="decoded token", ylabel=of)
    panel.legend(frameon=False, fontsize=8)
    save(figure, file, result, "perplexity along the passage")


def _beyond(rows: Sequence[Row], full: Mapping[int, Sequence[float]]) -> list[float]:
    """Each token's nats, less full's where there are any: the mean of the passages."""
    costs = [
        [
            nats - other
            for nats, other in zip(row["nats"], full.get(row["passage"], [0.0] * len(row["nats"])), strict=True)
        ]
        for row in rows
    ]
    return [sum(token) / len(token) for token in zip(*costs, strict=False)]  # the last passage may be shorter


def _heads(panel: Axes, title: str, matrix: Sequence[Sequence[float]]) -> None:
    panel.set_title(title, fontsize=8)
    panel.imshow(matrix, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    panel.set_xlabel("KV head", fontsize=8)
    panel.set_ylabel("layer", fontsize=8)
