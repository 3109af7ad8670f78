"""``.ci/sweeps``: its commands are those of today, and every combination is one that its mode takes."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import typer

from kvchat.bench import sweep
from kvchat.cli.main import app

SCRIPT = Path(__file__).parents[1] / ".ci" / "sweeps"
# In place of Python: notes its arguments and fails.
NOTES = """#!/usr/bin/env bash
printf '%s\\t' "$@" >> "$NOTED"; echo >> "$NOTED"
exit 3
"""


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """The exit code, and the parameters of every sweep as the command line reads them; each fails."""
    folder = tmp_path_factory.mktemp("sweeps")
    python, noted = folder / "python", folder / "noted"
    python.write_text(NOTES, encoding="utf-8")
    python.chmod(0o755)
    env = os.environ | {"PYTHON": str(python), "NOTED": str(noted)}
    code = subprocess.run([SCRIPT, folder / "out"], env=env, capture_output=True, check=False).returncode
    command = typer.main.get_command(app).commands["bench"].commands["sweep"]
    lines = [line.split("\t")[4:-1] for line in noted.read_text(encoding="utf-8").splitlines()]
    return code, [command.make_context("sweep", words).params for words in lines]


def test_every_sweep_runs_though_those_before_it_failed_and_has_a_file_of_its_own(ran):
    code, sweeps = ran
    assert code == 1
    assert {given["mode"] for given in sweeps} == set(sweep.GRIDS)
    assert len({given["out"] for given in sweeps}) == len(sweeps)
    assert all(given["out"].parent.is_dir() for given in sweeps)


def test_every_combination_is_taken_by_its_mode_and_there_are_few(ran):
    for given in ran[1]:
        mode = given["mode"]
        budgets = tuple(given["budget"] or (256,))
        variants = sweep.variants(sweep.Settings(mode, budgets, sweep.grid(mode, given["vary"])))
        assert 6 <= len(variants) <= 18, "a few minutes"


def test_every_parameter_that_a_default_was_chosen_for_is_varied(ran):
    varied = {(given["mode"], text.partition("=")[0]) for given in ran[1] for text in given["vary"]}
    assert varied >= {
        *(("speculative", name) for name in ("tau", "sink", "window")),
        *(("streaming", name) for name in ("R", "sigma", "delta", "sink")),
        *(("freeze", name) for name in ("tau", "K", "floor")),
        *(("sync", name) for name in ("rho", "m")),
    }
