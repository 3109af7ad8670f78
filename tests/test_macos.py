"""What runs where nothing of Linux's own is there; no Mac runs these tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

STUB = Path(__file__).parent / "support" / "macos"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(STUB), str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "kvchat", *arguments]
    return subprocess.run(
        command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=120, check=False
    )


def test_the_stub_takes_away_what_only_linux_has():
    code = "import os, sys; assert sys.platform == 'darwin'; os.listdir('/proc')"
    path = os.environ | {"PYTHONPATH": str(STUB)}
    ended = subprocess.run([sys.executable, "-c", code], env=path, capture_output=True, text=True, check=False)
    assert "FileNotFoundError" in ended.stderr


@pytest.mark.parametrize("mode", ["full", "speculative"])
def test_a_question_is_answered(mode):
    asked = "My cat is called Biscuit. What is my cat called?"
    ended = run("ask", asked, "--mode", mode, "--temperature", "0", "--max-new-tokens", "20")
    assert ended.returncode == 0, ended.stderr
    assert "Biscuit" in ended.stdout


def test_models_plan_and_doctor_find_the_machine():
    for arguments in (["models"], ["plan", "bundled"], ["doctor"]):
        ended = run(*arguments)
        assert ended.returncode == 0, (arguments, ended.stderr)
        assert "could not be read" not in ended.stdout, ended.stdout
