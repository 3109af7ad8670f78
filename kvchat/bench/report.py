"""A report of several results, with the tables of each experiment."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from kvchat import units
from kvchat.bench.frame import Result, incompatible, load, wilson
from kvchat.bench.settings import NATURAL
from kvchat.errors import UsageError
from kvchat.foreign_text import visible

Row = Mapping[str, Any]


def read(files: Sequence[Path]) -> list[Result]:
    """Read results that belong in one report.

    Raises:
        UsageError: a file is not a result, or two results come from different environments or models.
    """
    results = [load(file) for file in files]
    for file, result in zip(files[1:], results[1:], strict=True):
        if reason := incompatible(results[0], result):
            raise UsageError(
                f"{files[0]} and {file} cannot be in one report.",
                f"They differ: {reason}.",
                "Measure both in one environment, or write two reports.",
            )
    return results


def rendered(results: Sequence[Result]) -> str:
    """Return all tables of the results, in Markdown."""
    return "\n\n".join(table.markdown() for result in results for table in tables(result))


def _ratios(row: Row) -> dict[str, float]:
    return {name: ratio for name, ratio in row.get("times_as_fast", {}).items() if name != row["variant"]}


class Column(NamedTuple):
    """The head of a column, and the function that makes a row's cell."""

    head: str
    cell: Callable[[Row], str]


def figure(name: str, digits: int = 0, unit: str = "") -> Callable[[Mapping[str, Any]], str]:
    return lambda row: units.figure(row.get(name), unit, digits)


def share(name: str, digits: int = 0) -> Callable[[Mapping[str, Any]], str]:
    """Return a function that formats the share ``name`` of a row in percent."""
    return lambda row: units.MISSING if row.get(name) is None else f"{100 * row[name]:.{digits}f} %"


def size(name: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda row: units.size(row.get(name))


def interval(name: str) -> Callable[[Mapping[str, Any]], str]:
    """Return a function that formats the interval of shares ``name`` of a row in percent."""
    return lambda row: units.MISSING if not row.get(name) else " – ".join(f"{100 * each:.0f}" for each in row[name])


def variant(row: Mapping[str, Any]) -> str:
    """Return a variant as words: ``sync:budget=512,m=5`` -> ``sync, budget=512, m=5``."""
    return ", ".join(part for part in row["variant"].replace(":", ",").split(",") if part)


COLUMNS: dict[str, tuple[Column, ...]] = {
    "agreement": (
        Column("mode", variant),
        Column("KL mean", figure("kl_mean", 4)),
        Column("median", figure("kl_median", 4)),
        Column("99 %", figure("kl_99", 3)),
        Column("99.9 %", figure("kl_999", 3)),
        Column("perplexity", figure("perplexity", 2)),
        Column("perplexity of full", figure("perplexity_full", 2)),
        Column("same top token", share("same_top", 1)),
        Column("95 %", interval("same_top_interval")),
        Column("mass covered", share("covered", 1)),
        Column("worst head", share("covered_least", 1)),
        Column("tokens read", figure("read_mean")),
    ),
    "coverage": (
        Column("text", lambda row: row["kind"]),
        Column("mode", variant),
        Column("covered", share("covered", 1)),
        Column("best pages", share("best_pages", 1)),
        Column("best tokens", share("best_tokens", 1)),
        Column("worst head", lambda row: row["worst_head"]),
        Column("covered there", share("worst_covered", 1)),
        Column("best tokens there", share("worst_best_tokens", 1)),
        Column("tokens read", figure("read_mean")),
    ),
    "decode": (
        Column("mode", lambda row: variant(row) + changed(row)),
        Column("context", figure("context")),
        Column("ms", lambda row: row["failed"] if "failed" in row else units.figure(row["ms"], "", 2)),
        Column("as in a chat", figure("chat_ms", 2)),
        Column("tokens/s", figure("tokens_per_s", 1)),
        Column("times as fast", lambda row: ", ".join(f"{ratio:.2f} {name}" for name, ratio in _ratios(row).items())),
        Column("speed kept under load", share("kept")),
        Column("others' CPU share", share("others")),
        Column("K/V on the device", size("kv_device_bytes")),
        Column("moved per token", size("moved_bytes")),
    ),
    "draft": (
        Column("context", figure("context")),
        Column("task", lambda row: row["task"]),
        Column("temperature", lambda row: f"{row['temperature']:g}"),
        Column("drafts", lambda row: row["draft"]),
        Column("accepted", share("accepted")),
        Column("drafted", figure("drafted")),
        Column("tokens per round", figure("tokens_a_round", 1)),
        Column("ms per token", figure("ms", 1)),
        Column("without", figure("ms_without", 1)),
        Column("times as fast", figure("gain", 2)),
        Column("by processor time", figure("processor_gain", 2)),
        Column("same tokens", lambda row: "yes" if row["same"] else "no"),
    ),
    "peers": (
        Column("peer", variant),
        Column("context", figure("context")),
        Column("start to first token", lambda row: row.get("failed") or units.seconds(row["first_token_s"])),
        Column("of that, loading", lambda row: units.seconds(row.get("loading_s"))),
        Column("prompt, tokens/s", figure("prompt_tokens_per_s")),
        Column("ms per token", figure("ms", 1)),
        Column(
            "times llama.cpp's speed", lambda row: units.figure(row.get("times_as_fast", {}).get("llama.cpp"), "", 2)
        ),
        Column("peak", size("peak_bytes")),
        Column("others' CPU share", share("others")),
    ),
    "prefill": (
        Column("tokens", figure("tokens")),
        Column("seconds", figure("seconds", 3)),
        Column("times one forward", figure("times_one_shot", 2)),
        Column("peak", size("peak_bytes")),
        Column("one forward's peak", size("one_shot_peak_bytes")),
    ),
    "long-chat": (
        Column("what", lambda row: row["action"]),
        Column("terminal", lambda row: row["size"]),
        Column("times", figure("times")),
        Column("median", figure("p50", 0, "ms")),
        Column("95 %", figure("p95", 0, "ms")),
        Column("longest", figure("longest", 0, "ms")),
        Column("computed, median", figure("computed", 0, "ms")),
        Column("95 %", figure("computed_p95", 0, "ms")),
        Column("others' CPU share", share("others")),
        Column("peak memory", size("peak_bytes")),
    ),
}


def tables(result: Result) -> list[Table]:
    """Return the tables of a result, and what it was measured on.

    Raises:
        UsageError: the experiment is unknown, its rows are from another version, or cells are missing.
    """
    name = result["experiment"]
    if "summary" not in result:
        raise UsageError(
            f"The result of {name} is not complete.",
            f"{len(result['rows'])} rows of {result.get('cells', 'some')} cells were measured.",
            "Measure it again.",
        )
    try:
        return _noted(_tables(name, result), [made_by(result)])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(
            f"The result of {name} cannot be read.", f"{type(error).__name__}: {error}.", "Measure it again."
        ) from None


def _noted(made: list[Table], notes: Sequence[str]) -> list[Table]:
    """Add ``notes`` about all tables below the last one."""
    return [*made[:-1], replace(made[-1], notes=(*made[-1].notes, *notes))] if made else []


def _tables(name: str, result: Result) -> list[Table]:
    title, rows = f"{name}: {result['what']}", result["summary"]
    if "parts" in result:
        return _parts(result)
    if name == "recall":
        return _recall(title, rows)
    if name not in COLUMNS:
        raise UsageError(f'There is no table of "{name}".', hint="Use a result of another experiment.")
    return [tabulated(title, COLUMNS[name], rows)]


def _recall(title: str, rows: list[Row]) -> list[Table]:
    """Return a row for each variant and a column for each task and length, summed over depths; for switches a grid."""
    found = []
    plain = [row for row in rows if "asked" not in row]
    if plain:
        places = list(dict.fromkeys((row["task"], row["tokens"]) for row in plain))
        lines = [
            (variant({"variant": name}), *(_right(plain, variant=name, task=t, tokens=n) for t, n in places))
            for name in dict.fromkeys(row["variant"] for row in plain)
        ]
        heads = ("mode", *(f"{task}, {length:,} tokens" for task, length in places))
        found.append(Table(title, heads, tuple(lines)))
    if mine := [row for row in rows if "asked" in row]:
        found.append(_grid(f"{title}: {mine[0]['task']}, by asked", mine))
    return found


def _parts(result: Result) -> list[Table]:
    """Return a table for each part, with published figures next to measured ones."""
    found, taken = [], 0.0
    for name, words in result["parts"].items():
        rows = [row for row in result["summary"] if row["part"] == name]
        taken += rows[0].get("part_seconds", 0) if rows else 0
        if refused := [row["refused"] for row in rows if "refused" in row]:
            found.append(Table(words["title"], ("",), ((refused[0],),)))
            continue
        measured, published = (
            dict.fromkeys(key for row in rows for key in row[of]) for of in ("measured", "published")
        )
        columns = [Column("", lambda row: row["row"])]
        for key in (*measured, *(key for key in published if key not in measured)):
            columns += [Column(key, _of("measured", key))] if key in measured else []
            columns += [Column(f"{key}, published", _of("published", key))] if key in published else []
        found.append(tabulated(words["title"], columns, rows, words["differs"]))
    return _noted(found, (f"Measured in {units.seconds(taken)}.",)) if taken else found


def _of(side: str, key: str) -> Callable[[Row], str]:
    """Return a function that formats a measured or published figure, empty if there is none."""

    def cell(row: Row) -> str:
        value = row[side].get(key)
        return value if isinstance(value, str) else "" if value is None else f"{value:,.4g}"

    return cell


def _grid(title: str, rows: list[Row]) -> Table:
    """Tabulate right answers by the variants of the story and of the question, with each row's total and interval."""
    columns = list(dict.fromkeys(row["asked"] for row in rows))
    lines = []
    for name in dict.fromkeys(row["variant"] for row in rows):
        cells = (_right(rows, with_interval=False, variant=name, asked=each) for each in columns)
        lines.append((variant({"variant": name}), *cells, _right(rows, variant=name)))
    heads = ("mode", *(variant({"variant": str(each)}) for each in columns))
    return Table(title, (*heads, "all (95 %)"), tuple(lines))


def _right(rows: list[Row], with_interval: bool = True, **place: Any) -> str:
    """Return the right answers at a place, their total number, and the interval of the share in percent."""
    mine = [row for row in rows if place.items() <= row.items()]
    right, cases = sum(row["right"] for row in mine), sum(row["cases"] for row in mine)
    found = wilson(right, cases) if with_interval else None
    return f"{right} of {cases}" + ("" if found is None else f" ({100 * found[0]:.0f} – {100 * found[1]:.0f} %)")


@dataclass(frozen=True)
class Table:
    """Cells of text under heads, the first column left-aligned, the others right, with ``notes`` below."""

    title: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()

    def markdown(self) -> str:
        ruler = ("---", *["---:"] * (len(self.heads) - 1))
        cells = [
            [visible(c).replace("\n", " ").replace("|", "\\|") for c in row] for row in (self.heads, ruler, *self.rows)
        ]
        lines = [f"| {' | '.join(row)} |" for row in cells]
        return "\n".join([f"### {visible(self.title)}", "", *lines, *(f"\n{visible(note)}" for note in self.notes)])


def line(row: Mapping[str, Any]) -> str:
    start = f"{row['context']:>7} {row['variant'] + changed(row):<32} "
    if "failed" in row:
        return f"{start}{row['failed']}"
    ratios = "".join(f"  {ratio:5.2f} x {name}" for name, ratio in _ratios(row).items())
    moved = f"  moves {units.size(row['moved_bytes'])}" if row.get("moved_bytes") else ""
    exposed = row.get("exposed_ms")
    recall = "" if exposed is None else f", exposed {exposed:.2f} of {row['recall_ms']:.2f} ms"
    bound = f", at least {row['link_ms']:.2f} ms over the link" if row.get("link_ms") else ""
    kept = f"  {100 * row['kept']:.0f} % of its speed under load" if "kept" in row else ""
    return f"{start}{row['ms']:8.2f} ms {row['tokens_per_s']:7.1f} tok/s{ratios}{moved}{recall}{bound}{kept}"


def changed(row: Mapping[str, Any]) -> str:
    """Return the change rate as text, or "" if it was not fixed."""
    rate = row.get("change_rate", NATURAL)
    return "" if rate == NATURAL else f", {100 * rate:g} % new"


def made_by(result: Result) -> str:
    """Return the command, the model if there is one, and the machine."""
    model, e = result["model"], result["environment"]
    command = f"`{result['command']}`; " if result.get("command") else ""
    if not model:
        return f"{command}{e['processor']}, {e['cores']} cores; Python {e['python']}, textual {e['textual']}."
    weights = f"{model['name']} in {model['dtype']}" + (f", {model['weights']}" if model["weights"] else "")
    device = e["gpu"] or f"{e['processor']}, {units.count(e['threads'], 'thread')}"
    return f"{command}{weights}; {device}; torch {e['torch']}, transformers {e['transformers']}."


def tabulated(title: str, columns: Sequence[Column], rows: Sequence[Mapping[str, Any]], *notes: str) -> Table:
    """Return a table with a line for each row; a ``refused`` row has the reason in its second cell.

    A column without any measured value is left out.
    """
    measured = [row for row in rows if "refused" not in row]
    absent = {"", units.MISSING}
    shown = [each for at, each in enumerate(columns) if at < 2 or {each.cell(row) for row in measured} - absent]
    cells = tuple(
        (shown[0].cell(row), row["refused"], *[""] * (len(shown) - 2))
        if "refused" in row
        else tuple(column.cell(row) for column in shown)
        for row in rows
    )
    return Table(title, tuple(column.head for column in shown), cells, notes)
