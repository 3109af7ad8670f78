"""The program without a locale, a terminal, a home or enough memory; and that it needs no network."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from support.command_line import run_in_sequence
from support.environment import PYTHONPATH, environ
from support.message import lacks

import kvchat
from kvchat import paths

pytestmark = pytest.mark.slow("processes are started, some until memory ends")

PLAIN = {"LC_ALL": "POSIX", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
WATCHED = ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto")
# Every Python process reads this at its start: it records each attempted connection and name lookup.
WATCH = f"""
import os, sys
def watch(event, given):
    if event in {WATCHED}:
        with open(os.environ["TRIED"], "a") as tried:
            print(event, given, file=tried)
sys.addaudithook(watch)
"""


@pytest.fixture
def connections(tmp_path, monkeypatch):
    """The file that records the addresses that this test's processes try to reach; each process creates it."""
    (tmp_path / "sitecustomize.py").write_text(WATCH)
    monkeypatch.setenv("TRIED", str(tmp_path / "tried"))
    monkeypatch.setattr("support.environment.PYTHONPATH", os.pathsep.join((str(tmp_path), PYTHONPATH)))
    for name in [name for name in os.environ if name.startswith("HF_")]:
        monkeypatch.delenv(name)
    return tmp_path / "tried"


def run(
    *arguments: str,
    file_limit: int | None = None,
    stdin: bytes = b"",
    folder: Path | None = None,
    **variables: str,
) -> subprocess.CompletedProcess[bytes]:
    """``kvchat`` with a limit on its file sizes in bytes, and its own files in ``folder``."""

    def restrict() -> None:
        if file_limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, file_limit))

    command = [sys.executable, "-m", "kvchat", *arguments]
    own = {"KVCHAT_DATA_DIR": str(folder), "KVCHAT_CONFIG": f"{folder}/config.toml"} if folder else {}
    env = environ(**own, **variables)
    return subprocess.run(
        command, input=stdin, capture_output=True, timeout=600, env=env, cwd=folder, preexec_fn=restrict
    )


def test_ask_needs_no_locale_home_terminal_or_network(connections):
    result = run("ask", "Hello!", "--max-new-tokens", "4", **PLAIN, HOME="/proc/1/no", KVCHAT_DATA_DIR="/proc/1/no")
    assert (result.returncode, result.stderr) == (0, b"")
    assert result.stdout.strip()
    assert not connections.exists()


def test_connection_attempts_are_recorded(connections):
    command = [sys.executable, "-c", "import socket; socket.getaddrinfo('localhost', 1)"]
    subprocess.run(command, env=environ(), check=True)
    assert connections.read_text().startswith("socket.getaddrinfo")


def test_line_mode_works_in_ascii_without_network(connections):
    result = run("chat", stdin=b"Hello!\n/mode sync\n", **PLAIN)
    assert (result.returncode, result.stderr) == (0, b"")
    assert result.stdout.isascii()
    speakers = [line.split(b" ")[0] for line in result.stdout.splitlines()[1:]]
    assert speakers[:2] == [b"you:", b"model:"]
    assert speakers[-1] == b"[full"
    assert paths.log_file().read_text().count("\n") == 1, "only its start, nothing that libraries print"
    assert not connections.exists(), connections.read_text()


@pytest.mark.parametrize(
    ("command", "code", "fact"),
    [
        (["config", "init"], 2, "config.toml"),
        (["chats", "list"], 1, "chats.db"),
        (["chat", "--plain", "--record", "told.jsonl"], 2, "told.jsonl"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_an_unwritable_disk_is_a_one_line_error(command, code, fact, tmp_path):
    result = run(*command, file_limit=0, folder=tmp_path)
    errors = result.stderr.decode()
    assert (result.returncode, errors.count("\n")) == (code, 1), errors
    assert fact in errors
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size]


def test_the_chat_works_on_an_unwritable_disk(tmp_path):
    result = run("chat", "--plain", stdin=b"Hello!\n/export told.md\n", file_limit=0, folder=tmp_path)
    errors = result.stderr.decode()
    assert b"model: " in result.stdout
    assert not lacks(errors, "only in memory", "engine's messages", "told.md")
    assert "Traceback" not in errors


# ---- No HOME and no passwd entry: what needs no home works, the rest fails with one sentence


NOBODY = """
import pwd
def unknown(uid):
    raise KeyError(uid)
pwd.getpwuid = unknown
"""
ASK = """
import kvchat
from kvchat.protocol.messages import Sampling
assert "".join(kvchat.load("bundled").chat("Hi", Sampling(max_new_tokens=3))).strip()
"""


def homeless(folder: Path) -> dict[str, str]:
    """The environment of a process without a home."""
    (folder / "sitecustomize.py").write_text(NOBODY)
    (folder / "here").mkdir()
    source = str(Path(kvchat.__file__).parent.parent)
    return {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": os.pathsep.join((str(folder), source)),
        "OMP_NUM_THREADS": "1",
        "LANG": "C.UTF-8",
    }


@pytest.mark.parametrize("home", ["", "relative"])
def test_an_empty_or_relative_home_is_ignored(monkeypatch, home):
    monkeypatch.setenv("HOME", home)
    paths.name_home()
    assert os.environ["HOME"] == os.devnull


CODES = {
    **dict.fromkeys(("doctor", "models", "config show", "keys", "plan", "profile list"), 0),
    "chats list": 1,
    "config init": 2,
}


@pytest.mark.slow("a process imports torch")
def test_without_a_home_nothing_ends_in_a_traceback(tmp_path):
    done = run_in_sequence([command.split() for command in CODES], homeless(tmp_path), tmp_path / "here", ASK)
    assert {command: one.code for command, one in zip(CODES, done, strict=True)} == CODES
    assert not any("Traceback" in one.err for one in done)
    assert [len(one.err.splitlines()) for one in done if one.code] == [1, 1]
    assert list((tmp_path / "here").iterdir()) == []
