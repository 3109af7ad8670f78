"""Tables of results, in Markdown and LaTeX."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvchat import units
from kvchat.foreign_text import visible

LATEX = str.maketrans(
    {
        "\\": r"\textbackslash{}",
        "&": r"\&",
        "%": r"\%",
        "$": r"\$",
        "#": r"\#",
        "_": r"\_",
        "{": r"\{",
        "}": r"\}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "|": r"\textbar{}",
    }
)


@dataclass(frozen=True)
class Table:
    """Cells of text under heads; the first column is left-aligned, the others right. ``notes`` stand below."""

    title: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()

    def markdown(self) -> str:
        """A heading, the table and its notes."""
        ruler = ("---", *["---:"] * (len(self.heads) - 1))
        lines = [f"| {' | '.join(_bar(cell) for cell in cells)} |" for cells in (self.heads, ruler, *self.rows)]
        return "\n".join([f"### {visible(self.title)}", "", *lines, *(f"\n{visible(note)}" for note in self.notes)])

    def latex(self) -> str:
        """A floating table for the package booktabs."""
        columns = "l" + "r" * (len(self.heads) - 1)
        heads, *rows = (" & ".join(_escaped(cell) for cell in cells) + r" \\" for cells in (self.heads, *self.rows))
        caption = " ".join(_escaped(text) for text in (f"{self.title}.", *self.notes))
        body = [heads, r"\midrule", *rows]
        return "\n".join(
            [
                r"\begin{table}",
                r"\centering",
                rf"\caption{{{caption}}}",
                rf"\begin{{tabular}}{{{columns}}}",
                r"\toprule",
                *body,
                r"\bottomrule",
                r"\end{tabular}",
                r"\end{table}",
            ]
        )


@dataclass(frozen=True)
class Column:
    """A head, and how a row's cell is made."""

    head: str
    cell: Callable[[Mapping[str, Any]], str]


def tabulated(title: str, columns: Sequence[Column], rows: Sequence[Mapping[str, Any]], *notes: str) -> Table:
    """A table with a line for each row; a row that was ``refused`` has its reason in the second cell."""
    cells = tuple(
        (columns[0].cell(row), row["refused"], *[""] * (len(columns) - 2))
        if "refused" in row
        else tuple(column.cell(row) for column in columns)
        for row in rows
    )
    return Table(title, tuple(column.head for column in columns), cells, notes)


def figure(name: str, digits: int = 0, unit: str = "") -> Callable[[Mapping[str, Any]], str]:
    """A cell with the number ``name`` of a row."""
    return lambda row: units.figure(row.get(name), unit, digits)


def share(name: str, digits: int = 0) -> Callable[[Mapping[str, Any]], str]:
    """A cell with the share ``name`` of a row in percent."""
    return lambda row: units.MISSING if row.get(name) is None else f"{100 * row[name]:.{digits}f} %"


def size(name: str) -> Callable[[Mapping[str, Any]], str]:
    """A cell with the bytes ``name`` of a row."""
    return lambda row: units.size(row.get(name))


def interval(name: str) -> Callable[[Mapping[str, Any]], str]:
    """A cell with the interval of shares ``name`` of a row in percent."""
    return lambda row: units.MISSING if not row.get(name) else " – ".join(f"{100 * each:.0f}" for each in row[name])


def variant(row: Mapping[str, Any]) -> str:
    """A variant as words: ``sync:budget=512,m=5`` -> ``sync, budget=512, m=5``."""
    return ", ".join(part for part in row["variant"].replace(":", ",").split(",") if part)


def _bar(cell: str) -> str:
    return visible(cell).replace("\n", " ").replace("|", "\\|")


def _escaped(text: str) -> str:
    return visible(text).replace("\n", " ").translate(LATEX)
