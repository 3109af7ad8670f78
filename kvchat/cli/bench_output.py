"""Keep a measurement's rows while it runs, and print the result when it is complete."""

from __future__ import annotations

import hashlib
import json
import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvchat import paths
from kvchat.bench import plot as plots
from kvchat.bench.frame import Frame
from kvchat.bench.identity import Result
from kvchat.bench.model_choice import ModelChoice
from kvchat.bench.summaries import tables
from kvchat.cli.output import echo, report
from kvchat.errors import UsageError


class Run:
    """One measurement of the command line: what is wrong with its files is said before it begins.

    ``settings`` are the experiment's. Without ``out`` the rows lie in kvchat's own folder, by settings and
    model, until the result is printed.

    Raises:
        UsageError: on making, the folder of ``out`` or the plot's file is wrong.
    """

    def __init__(
        self,
        name: str,
        settings: Any,
        choice: ModelChoice,
        out: Path | None = None,
        as_json: bool = False,
        plot: Path | None = None,
    ) -> None:
        if out and not out.absolute().parent.is_dir():
            raise UsageError(f"There is no folder {out.absolute().parent}.", hint="Make it first.")
        if out and out.is_dir():
            raise UsageError(f"{out} is a folder.", "", "Give --out the name of a file.")
        if plot:
            plots.check(plot)
        self.choice = choice
        self.frame = Frame(out or _own_file(name, settings, choice), report, command=_command(sys.argv[1:]))
        self._out, self._as_json, self._plot = out, as_json, plot

    def done(self, result: Result) -> Result:
        """Print the complete result, and draw it where that was asked for."""
        if self._as_json:
            echo(json.dumps(result, indent=2))
        else:
            echo("\n\n".join(table.markdown() for table in tables(result)))
        if self._plot:
            plots.draw(result, self._plot)
            report(str(self._plot))
        if self._out:
            report(str(self._out))
        elif self.frame.file:
            with suppress(OSError):
                self.frame.file.unlink()
        return result


def _command(arguments: Sequence[str]) -> str:
    """The command line without what says where results go."""
    words, ignored = ["kvchat"], False
    for word in arguments:
        if not ignored and word.partition("=")[0] not in ("--out", "--plot", "--json"):
            words.append(word)
        ignored = word in ("--out", "--plot")
    return shlex.join(words)


def _own_file(name: str, settings: Any, choice: ModelChoice) -> Path:
    key = hashlib.sha256(repr((settings, choice)).encode()).hexdigest()[:12]
    return paths.state_dir() / "bench" / f"{name.replace(' ', '-')}-{key}.json"
