"""The command line in tests: a terminal as stdin, and a process that runs several commands in turn."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple


class Terminal(io.TextIOWrapper):
    """The stdin of a user at a terminal who types nothing."""

    def isatty(self) -> bool:
        return True


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


CODE = """
import io, json, sys
from contextlib import redirect_stderr, redirect_stdout
from kvchat.cli.main import main
done = []
for arguments in json.loads(sys.stdin.read()):
    sys.argv[1:] = arguments
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    with redirect_stdout(out), redirect_stderr(err):
        try:
            main()
        except SystemExit as left:
            code = left.code or 0
    done.append([code, out.buffer.getvalue().decode(), err.buffer.getvalue().decode()])
json.dump(done, sys.stdout)
"""


def run_in_sequence(
    commands: Sequence[Sequence[str]], environment: dict[str, str], folder: Path | None = None, before: str = ""
) -> list[Outcome]:
    """Run commands in turn in one process, after the Python code ``before``; return the outcome of each."""
    command = [sys.executable, "-c", before + CODE]
    ran = subprocess.run(
        command, input=json.dumps(commands), capture_output=True, text=True, timeout=600, env=environment, cwd=folder
    )
    assert ran.returncode == 0, ran.stderr
    return [Outcome(*done) for done in json.loads(ran.stdout)]
