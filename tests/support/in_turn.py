"""Several commands in one process that is not this one: torch and transformers are imported once for all of them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from support.command_line import Outcome

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


def run_in_turn(
    commands: Sequence[Sequence[str]], environment: dict[str, str], folder: Path | None = None
) -> list[Outcome]:
    """What each of the commands gives."""
    command = [sys.executable, "-c", CODE]
    ran = subprocess.run(
        command, input=json.dumps(commands), capture_output=True, text=True, timeout=600, env=environment, cwd=folder
    )
    assert ran.returncode == 0, ran.stderr
    return [Outcome(*done) for done in json.loads(ran.stdout)]
