"""No HOME and no entry among the users: what needs no home works, the rest is refused in a sentence."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.in_turn import run_in_turn

import kvchat

NOBODY = """
import pwd
def unknown(uid):
    raise KeyError(uid)
pwd.getpwuid = unknown
"""
ASK = """
import kvchat
from kvchat.protocol.messages import Sampling
print(*kvchat.load("bundled").chat("Hi", Sampling(max_new_tokens=3)))
"""


def homeless(folder: Path, home: str | None = None) -> dict[str, str]:
    """The environment of a process without a home, that begins in the folder ``here``."""
    (folder / "sitecustomize.py").write_text(NOBODY)
    (folder / "here").mkdir()
    source = str(Path(kvchat.__file__).parent.parent)
    return {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": os.pathsep.join((str(folder), source)),
        "OMP_NUM_THREADS": "1",
        "LANG": "C.UTF-8",
        **({} if home is None else {"HOME": home}),
    }


def run(folder: Path, *arguments: str, home: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder / "here",
        env=homeless(folder, home),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.slow("a process imports torch and answers")
@pytest.mark.parametrize("home", ["", "relative"])
def test_the_python_api_needs_no_home(tmp_path, home):
    asked = run(tmp_path, "-c", ASK, home=home)
    assert asked.returncode == 0, asked.stderr
    assert asked.stdout.strip()
    assert list((tmp_path / "here").iterdir()) == []


CODES = {
    **dict.fromkeys(("ask Hi", "doctor", "models", "config show", "keys", "plan", "profile show"), 0),
    "chats list": 1,
    "config init": 2,
}


@pytest.mark.slow("a process imports torch")
def test_no_command_fails_in_a_traceback(tmp_path):
    done = run_in_turn([command.split() for command in CODES], homeless(tmp_path), tmp_path / "here")
    assert {command: one.code for command, one in zip(CODES, done, strict=True)} == CODES
    assert done[0].out.strip()
    assert not any("Traceback" in one.err for one in done)
    assert [len(one.err.splitlines()) for one in done if one.code] == [1, 1]
    assert list((tmp_path / "here").iterdir()) == []
