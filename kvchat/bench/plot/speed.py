"""Plots of times: a decoded token, also by the length of the conversation, a prompt, a long generation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvchat.bench.plot.canvas import BASELINE, EXPOSED, FAINT, MODE, Row, empty, save
from kvchat.bench.rows import named

if TYPE_CHECKING:
    from matplotlib.axes import Axes


# Of reading a prompt: a label, the figure, the place of the bar in its line, its color.
WAYS = (("in chunks", "seconds", -0.2, MODE), ("one forward", "one_shot_seconds", 0.2, BASELINE))


def decode(result: Mapping[str, Any], file: Path) -> None:
    """Draw ms per decoded token: a panel per context, a bar per variant, a dashed line at the floor.

    Exposed recall is the orange end of a bar. A variant that failed has its reason instead of a bar.

    Raises:
        UsageError: the file cannot be written.
    """
    groups = [(context, list(rows)) for context, rows in groupby(result["rows"], key=lambda row: row["context"])]
    heights = [len(rows) + 1.5 for _, rows in groups]
    figure = empty(10, 0.28 * sum(heights) + 1.2)
    panels = figure.subplots(len(groups), sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for panel, (context, rows) in zip(panels, groups, strict=True):
        panel.set_title(f"{context:,} tokens", loc="left")
        _bars(panel, rows)
        if floor := result["floor_ms"]:
            panel.axvline(floor, color="black", linestyle="--", linewidth=1, label=f"floor {floor:.3g} ms")
    panels[-1].set_xlabel("ms per decoded token")
    handles = {
        label: handle for panel in panels for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4, frameon=False)
    save(figure, file, result, "ms per decoded token")


def lengths(result: Mapping[str, Any], file: Path) -> None:
    """Draw ms per decoded token by the context, a line per variant.

    Raises:
        UsageError: the file cannot be written.
    """
    rows = [row for row in result["summary"] if "refused" not in row]
    figure = empty(7, 4.5)
    panel = figure.subplots()
    for variant in dict.fromkeys(row["variant"] for row in rows):
        mine = [row for row in rows if row["variant"] == variant]
        panel.plot([row["context"] for row in mine], [row["ms"] for row in mine], marker="o", label=variant)
    panel.set(xlabel="tokens stored", ylabel="ms a token", ylim=(0, None))
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    save(figure, file, result, "ms per decoded token by the length of the conversation")


def prefill(result: Mapping[str, Any], file: Path) -> None:
    """Draw the seconds of a prompt by its length, in chunks and, where that was measured, in one forward.

    Raises:
        UsageError: the file cannot be written.
    """
    rows = result["summary"]
    figure = empty(7, 0.6 * len(rows) + 1.8)
    panel = figure.subplots()
    panel.set_yticks(range(len(rows)), [f"{row['tokens']:,} tokens" for row in rows])
    for label, key, place, color in WAYS:
        bars = [(y + place, row[key]) for y, row in enumerate(rows) if row.get(key) is not None]
        if bars:
            places, seconds = zip(*bars, strict=True)
            drawn = panel.barh(places, seconds, height=0.38, color=color, label=label)
            panel.bar_label(drawn, fmt=" %.3g s")
    panel.set(xlabel="seconds", ylim=(len(rows) - 0.4, -0.6))
    panel.margins(x=0.15)  # room for the figures
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    save(figure, file, result, "reading a prompt")


def long_run(result: Mapping[str, Any], file: Path) -> None:
    """Draw the time of a step, and K/V on device and host, by what is stored.

    Raises:
        UsageError: the file cannot be written.
    """
    figure, rows = empty(7, 6), result["summary"]
    above, below = figure.subplots(2, sharex=True)
    stored = [row["stored"] for row in rows]
    above.plot(stored, [row["ms"] for row in rows], marker="o", color=MODE)
    above.set(ylabel="ms a token", ylim=(0, None))
    for label, key in (("on the device", "kv_device_bytes"), ("on the host", "kv_host_bytes")):
        below.plot(stored, [row[key] / 2**20 for row in rows], marker="o", label=label)
    below.set(xlabel="tokens stored", ylabel="K/V in MiB", ylim=(0, None))
    below.legend(frameon=False, fontsize=8)
    save(figure, file, result, result["what"])


def _bars(panel: Axes, rows: Sequence[Row]) -> None:
    panel.set_yticks(range(len(rows)), [named(row) for row in rows])
    panel.set_ylim(len(rows) - 0.4, -0.6)
    panel.margins(x=0.3)  # room for the figures beside the bars
    panel.spines[["top", "right"]].set_visible(False)
    for y, row in enumerate(rows):
        if "failed" in row:
            panel.text(0, y, f" {row['failed'][:90]}", va="center", color=FAINT)
            continue
        of_mode = "change_rate" in row
        panel.barh(y, row["ms"], color=MODE if of_mode else BASELINE, label="kvchat" if of_mode else "transformers")
        exposed = min(row["ms"], row.get("exposed_ms") or 0.0)
        if exposed > 0:
            panel.barh(y, exposed, left=row["ms"] - exposed, color=EXPOSED, label="exposed recall")
        panel.text(row["ms"], y, f" {row['ms']:.3g} ms · {row['tokens_per_s']:.0f} tok/s", va="center")
