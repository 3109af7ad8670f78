"""``kvchat bench report`` and ``compare``: what is done with results that were kept."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvchat.bench import plot as plots
from kvchat.bench import report as reports
from kvchat.cli.bench_options import Plot
from kvchat.cli.output import echo, report


def report_results(
    results: Annotated[list[Path], typer.Argument(metavar="RESULTS...", help="files that --out wrote")],
    latex: Annotated[bool, typer.Option("--latex", help="LaTeX instead of Markdown")] = False,
    plot: Plot = None,
) -> None:
    """The tables of results, and with --plot their pictures; refuses to mix environments or models."""
    if plot:
        plots.check(plot)
    read = reports.read(results)
    echo(reports.rendered(read, latex))
    if plot:
        for result, file in zip(read, _numbered(plot, len(read)), strict=True):
            plots.draw(result, file)
            report(str(file))


def compare_results(
    before: Annotated[Path, typer.Argument(metavar="A.json")],
    after: Annotated[Path, typer.Argument(metavar="B.json")],
) -> None:
    """Print the changes from one result to another of the same experiment, and possible reasons for them."""
    echo(reports.compared(before, after).markdown())


def _numbered(file: Path, count: int) -> list[Path]:
    """One file for each of several pictures: ``a.png``, ``a-2.png``."""
    return [file, *(file.with_stem(f"{file.stem}-{number}") for number in range(2, count + 1))]
