"""No HOME and no entry among the users: what needs no home works, the rest is refused in a sentence."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

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


def run(folder: Path, *arguments: str, home: str | None = None) -> subprocess.CompletedProcess[str]:
    (folder / "sitecustomize.py").write_text(NOBODY)
    source = str(Path(kvchat.__file__).parent.parent)
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": os.pathsep.join((str(folder), source)),
        "OMP_NUM_THREADS": "1",
        "LANG": "C.UTF-8",
        **({} if home is None else {"HOME": home}),
    }
    (folder / "here").mkdir(exist_ok=True)
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder / "here",
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.parametrize("home", [None, "", "relative"])
def test_an_answer_needs_no_home(tmp_path, home):
    asked = run(tmp_path, "-m", "kvchat", "ask", "Hi", "--max-new-tokens", "3", home=home)
    assert asked.returncode == 0, asked.stderr
    assert asked.stdout.strip()
    assert "Traceback" not in asked.stderr
    assert list((tmp_path / "here").iterdir()) == []


def test_the_python_api_needs_no_home(tmp_path):
    asked = run(tmp_path, "-c", ASK)
    assert asked.returncode == 0, asked.stderr
    assert asked.stdout.strip()


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        *((("doctor",), 0), (("models",), 0), (("config", "show"), 0), (("keys",), 0), (("plan",), 0)),
        *((("profile", "show"), 0), (("chats", "list"), 1), (("config", "init"), 2)),
    ],
    ids=str,
)
def test_no_command_fails_in_a_traceback(tmp_path, arguments, code):
    done = run(tmp_path, "-m", "kvchat", *arguments)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert not code or len(done.stderr.strip().split("\n")) == 1
    assert list((tmp_path / "here").iterdir()) == []
