"""A report of several results: their tables in Markdown or LaTeX, and comparisons of two."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvchat.bench.frame import load
from kvchat.bench.identity import Result, difference, incompatible
from kvchat.bench.summaries import tables
from kvchat.bench.table import Table
from kvchat.errors import UsageError

Row = Mapping[str, Any]


def read(files: Sequence[Path]) -> list[Result]:
    """Read results that may stand in one report.

    Raises:
        UsageError: a file is no result, or two were measured in environments or on models that differ.
    """
    results = [load(file) for file in files]
    for file, result in zip(files[1:], results[1:], strict=True):
        if reason := incompatible(results[0], result):
            raise UsageError(
                f"{files[0]} and {file} do not stand in one report.",
                f"They differ: {reason}.",
                "Measure both in one environment, or make two reports.",
            )
    return results


def rendered(results: Sequence[Result], latex: bool = False) -> str:
    """All tables of the results.

    Raises:
        UsageError: a result is not complete, or not readable.
    """
    made = [table for result in results for table in tables(result)]
    return "\n\n".join(table.latex() if latex else table.markdown() for table in made)


def compared(one: Path, other: Path) -> Table:
    """Every figure in which two results of one experiment differ, a line each: before, after and the ratio.

    Raises:
        UsageError: the results are of different experiments or not complete, or share no row.
    """
    before, after = load(one), load(other)
    if before["experiment"] != after["experiment"]:
        raise UsageError(
            f"{one} and {other} are results of different experiments.",
            f"{before['experiment']} and {after['experiment']}.",
            "Compare two results of one experiment.",
        )
    for file, result in ((one, before), (other, after)):
        if "summary" not in result:
            raise UsageError(f"{file} is not complete.", "", "The command that began it measures the rest.")
    pairs = _pairs(before["summary"], after["summary"])
    if not pairs:
        raise UsageError(f"{one} and {other} have no row in common.", hint="Measure both with the same settings.")
    lines = tuple(line for place, (a, b) in pairs.items() for line in _lines(place, a, b))
    return Table(
        f"{before['experiment']}: {one.name} and {other.name}", HEADS, lines or (SAME,), _differences(before, after)
    )


def _differences(before: Result, after: Result) -> tuple[str, ...]:
    """By what else than chance the figures may differ: the measurement, and the machine or model that it ran on."""
    measurement, machine = difference(before, after), incompatible(before, after)
    notes = [f"They are different measurements: {measurement}."] if measurement else []
    if machine and machine != measurement:
        notes.append(f"They do not stand side by side: {machine}.")
    return tuple(notes)


HEADS = ("row", "figure", "before", "after", "ratio")
SAME = ("all rows", "all figures", "equal", "equal", "1.000")


def _pairs(before: Sequence[Row], after: Sequence[Row]) -> dict[str, tuple[Row, Row]]:
    """Rows of the same coordinates: the texts and whole numbers that a row is named by."""
    named = [{_place(row): row for row in rows} for rows in (before, after)]
    return {place: (row, named[1][place]) for place, row in named[0].items() if place in named[1]}


COORDINATES = (
    *("part", "row", "variant", "told", "asked", "size", "action"),
    *("task", "tokens", "depth", "turn", "context", "change_rate", "stored"),
)


def _place(row: Row) -> str:
    return ", ".join(f"{row[name]}" for name in COORDINATES if name in row)


def _lines(place: str, before: Row, after: Row) -> list[tuple[str, ...]]:
    before, after = ({**row, **row.get("measured", {})} for row in (before, after))
    figures = [
        name
        for name, value in before.items()
        if name not in COORDINATES and _is_number(value) and _is_number(after.get(name)) and value != after[name]
    ]
    return [(place, name, *_change(before[name], after[name])) for name in figures]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _change(before: float, after: float) -> tuple[str, str, str]:
    return f"{before:.4g}", f"{after:.4g}", f"{after / before:.3f}" if before else "n/a"
