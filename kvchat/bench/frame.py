"""The frame of every measurement: cell after cell, kept in a file as they finish, continued by the same command.

A cell is what is measured at once, named by its coordinates such as the variant and the case; it gives one or more
rows, each with the cell's coordinates in it. The file holds whole cells, and of one in progress the pieces that it was
measured in: whatever ends the program costs one cell, or one piece of it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvchat import files, text_file, units
from kvchat.bench.identity import Experiment, Result, difference
from kvchat.errors import KvchatError, UsageError

Row = dict[str, Any]
Cell = Mapping[str, Any]
Report = Callable[[str], None]


class Frame:
    """Keeps a measurement's rows, and tells of them.

    ``file`` None keeps them in memory only; ``report`` gets lines for a person; ``command`` is noted in the result.
    ``rows`` are those measured so far, also by a run before this one.
    """

    def __init__(
        self,
        file: Path | None = None,
        report: Report = lambda line: None,
        clock: Callable[[], float] = time.monotonic,
        command: str = "",
    ) -> None:
        self.file = file
        self.command = command
        self.report = report
        self.rows: list[Row] = []
        self._clock = clock
        self._result: Result = {"pieces": {}}

    def measure(
        self,
        experiment: Experiment,
        cells: Sequence[Cell],
        measure: Callable[[Cell], Sequence[Row]],
        line: Callable[[Row], str],
    ) -> Result:
        """Measure the cells that are not in the file yet; return the result with the rows of all, in the cells' order.

        A cell that is refused becomes a row with the reason in ``refused``, and is tried again by the next run.

        Raises:
            UsageError: the file holds another measurement, or cannot be read or written.
            KvchatError: no cell could be measured; the first one's reason.
            KeyboardInterrupt: as it came; finished cells are kept.
        """
        result = self._result = self._begin(experiment, len(cells))
        todo = [cell for cell in cells if not _finished(cell, result["rows"])]
        if len(todo) < len(cells):
            self.report(f"{len(cells) - len(todo)} of {len(cells)} measured before, kept in {self.file}")
        began, refused = self._clock(), list[KvchatError]()
        self.rows = result["rows"]
        try:
            for done, cell in enumerate(todo, 1):
                rows, error = _measured(cell, measure)
                if error:
                    refused.append(error)
                else:
                    result["pieces"].pop(_named(cell), None)
                self.rows = result["rows"] = [*(row for row in self.rows if not _of(cell, row)), *rows]
                self._keep(result)
                left = (self._clock() - began) / done * (len(todo) - done)
                ahead = f"{len(cells) - len(todo) + done}/{len(cells)}"
                ahead += f", {units.seconds(left)} left" if left else ""
                for row in rows:
                    self.report(f"[{ahead}] {row['refused'] if 'refused' in row else line(row)}")
        except KeyboardInterrupt:
            self._tell_kept(result, cells)
            raise
        if refused and all("refused" in row for row in result["rows"]):
            raise refused[0]
        result["rows"] = [row for cell in cells for row in result["rows"] if _of(cell, row)]
        return result

    def piece(self, cell: Cell, name: str, measure: Callable[[], Any]) -> Any:
        """A piece of a cell, as JSON gives it back: kept at once, and not measured by the next run."""
        pieces = self._result["pieces"].setdefault(_named(cell), {})
        if name not in pieces:
            began = self._clock()
            value = _plain(measure())
            pieces[name] = {"value": value, "seconds": self._clock() - began}
            self._keep(self._result)
            self.report(f"{_named(cell)}: {name}, {units.seconds(pieces[name]['seconds'])}")
        return pieces[name]["value"]

    def spent(self, cell: Cell) -> float:
        """Seconds that the pieces took that are kept of a cell."""
        pieces: Mapping[str, Mapping[str, float]] = self._result["pieces"].get(_named(cell), {})
        return sum(piece["seconds"] for piece in pieces.values())

    def finish(self, result: Result, summary: Sequence[Row]) -> Result:
        """Keep the ``summary`` of all rows beside them, without pieces; the result with it."""
        complete: Result = _plain({**result, "summary": list(summary)})
        complete.pop("pieces", None)
        self._keep(complete)
        return complete

    def _begin(self, experiment: Experiment, cells: int) -> Result:
        fresh: Result = _plain({**experiment.head(), "command": self.command, "cells": cells, "rows": [], "pieces": {}})
        if self.file is None or not self.file.is_file() or not self.file.stat().st_size:
            return fresh
        kept = load(self.file)
        if other := difference(kept, fresh):
            raise UsageError(
                f"{self.file} holds another measurement.",
                f"They differ: {other}.",
                "Give another --out, or delete the file.",
            )
        return {**fresh, **kept, "cells": cells}

    def _keep(self, result: Result) -> None:
        if self.file is None:
            return
        try:
            files.write(self.file, (json.dumps(result) + "\n").encode())
        except OSError as error:
            raise files.unwritable(self.file, error, "Give another --out.") from None

    def _tell_kept(self, result: Result, cells: Sequence[Cell]) -> None:
        if self.file is not None:
            finished = sum(_finished(cell, result["rows"]) for cell in cells)
            pieces = sum(map(len, result["pieces"].values()))
            more = f", and {pieces} pieces of others" if pieces else ""
            self.report(
                f"{finished} of {len(cells)} are kept in {self.file}{more}; the same command measures what is missing."
            )


def load(file: Path) -> Result:
    """Read a result.

    Raises:
        UsageError: the file cannot be read, or is no result.
    """
    try:
        result = json.loads(text_file.read(file))
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"{file} is no result of kvchat bench.", f"It is no JSON: {error}.", "Give a file that --out wrote."
        ) from None
    if not _is_result(result):
        raise UsageError(
            f"{file} is no result of kvchat bench.",
            "It lacks the experiment, its settings, its environment or its rows.",
            "Give a file that --out wrote.",
        )
    found: Result = result
    return found


def _is_result(result: Any) -> bool:
    kinds = {"experiment": str, "settings": dict, "methods": dict, "model": dict, "environment": dict, "rows": list}
    return (
        isinstance(result, dict)
        and all(isinstance(result.get(name), kind) for name, kind in kinds.items())
        and all(isinstance(row, dict) for name in ("rows", "summary") for row in result.get(name, ()))
    )


def _measured(cell: Cell, measure: Callable[[Cell], Sequence[Row]]) -> tuple[list[Row], KvchatError | None]:
    try:
        return [_plain({**cell, **row}) for row in measure(cell)], None
    except KvchatError as error:
        return [_plain({**cell, "refused": str(error)})], error


def _named(cell: Cell) -> str:
    return " ".join(map(str, cell.values()))


def _of(cell: Cell, row: Row) -> bool:
    return all(row.get(name) == value for name, value in cell.items())


def _finished(cell: Cell, rows: Sequence[Row]) -> bool:
    """A cell all of whose rows failed is not finished."""
    return any(_of(cell, row) and "refused" not in row for row in rows)


def _plain(value: Any) -> Any:
    """The value as JSON gives it back: lists for tuples."""
    return json.loads(json.dumps(value))
