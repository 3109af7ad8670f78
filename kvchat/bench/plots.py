"""Plots of measurements, drawn with matplotlib (the extra ``plot``) to SVG or PNG by the file's ending.

They are made without a display, and of one style.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from io import BytesIO
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvchat import files, libraries
from kvchat.bench.report import named
from kvchat.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage


__all__ = ["calibration", "check", "draw"]
MODE, BASELINE, EXPOSED, FAINT = "#2b7bba", "#a9b4c0", "#e08a2e", "#6b7785"
# Of reading a prompt: a label, the figure, the place of the bar in its line, its color.
WAYS = (("in chunks", "seconds", -0.2, MODE), ("one forward", "one_shot_seconds", 0.2, BASELINE))
COLUMNS = 4  # of the panels of heads
HEAD_COLUMNS = 4  # of panels
FORMATS = (".svg", ".png")
# Texts of an SVG stay texts; a fixed salt gives equal files for equal data.
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "kvchat"}
Row = Mapping[str, Any]


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


def _heads(panel: Axes, title: str, matrix: Sequence[Sequence[float]]) -> None:
    panel.set_title(title, fontsize=8)
    panel.imshow(matrix, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    panel.set_xlabel("KV head", fontsize=8)
    panel.set_ylabel("layer", fontsize=8)


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


DRAWN: dict[str, Callable[[Mapping[str, Any], Path], None]] = {
    "agreement": agreement,
    "data": data,
    "decode": decode,
    "prefill": prefill,
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
        raise UsageError(f'There is no picture of "{name}".', hint=f"There are pictures of {', '.join(sorted(DRAWN))}.")
    try:
        drawn(result, file)
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(
            f"The result of {name} cannot be drawn.", f"{type(error).__name__}: {error}.", "Measure it again."
        ) from None


def calibration(similarity: Sequence[Any], representatives: Sequence[Sequence[int]], file: Path) -> None:
    """Draw the overlap ``[layers, H, H]`` of KV heads, a panel per layer; the representatives' rows are marked.

    Raises:
        UsageError: the file cannot be written.
    """
    heads, rows = len(similarity[0]), -(-len(similarity) // HEAD_COLUMNS)
    side = max(2.0, 0.35 * heads)
    figure = empty(HEAD_COLUMNS * side, rows * (side + 0.3) + 0.5)
    panels = figure.subplots(rows, HEAD_COLUMNS, squeeze=False).flat
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
        raise UsageError("A plot needs matplotlib.", "It is not installed.", f"Run: {libraries.extra('plot')}")
