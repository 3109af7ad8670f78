"""Lint, format and types are part of the one test command."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow("all files are read, and torch's types")
@pytest.mark.parametrize("check", ["ruff check", "ruff format --check", "mypy"])
def test_style(check):
    command = [sys.executable, "-m", *check.split()]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stdout + result.stderr
