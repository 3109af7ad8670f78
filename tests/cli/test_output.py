"""What the commands write: raw to a pipe, without control characters to a terminal."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.hostile import MARKUP, SEQUENCES, forbidden_in, hostile
from support.pty_run import PtyRun

from kvchat.cli.output import progress

SUPPORT = Path(__file__).parents[1]
PIECES = [*SEQUENCES.values(), MARKUP]
ASK = f"""
import sys
sys.path.insert(0, {str(SUPPORT)!r})
import kvchat
from kvchat.cli import main
from kvchat.errors import DoesNotFitError
from support.fake_session import FakeSession
from support.hostile import hostile
session = FakeSession({PIECES!r}, failure=DoesNotFitError(hostile("refusal")))
session.notes = (hostile("note"),)
session.extras = dict([(hostile("figure"), hostile("value"))])  # of a mode of another package
def open_session(load, progress):
    progress(hostile("stage"))
    return session.open(load, progress)
kvchat.open_session = open_session
sys.argv = ["kvchat", "ask", "hello", "--switch-at", "1:streaming", "--stats"]
main.main()
"""


@contextmanager
def in_a_terminal(command: list[str], **streams: int) -> Iterator[PtyRun]:
    run = PtyRun(command, dict(os.environ), **streams)
    try:
        yield run
    finally:
        run.close()


def test_ask_on_a_terminal_writes_no_control_character() -> None:
    with in_a_terminal([sys.executable, "-c", ASK]) as run:
        assert run.finish() == 3  # the refused switch
    assert not forbidden_in(run.written)
    shown = run.written.decode()
    names = "«stage»", "«note»", "«figure»", "«value»", "«refusal»"
    for name in (*names, "␛]52;c;aGFja2Vk␛\\", "‹U+009B›31m", MARKUP):
        assert name in shown


def test_ask_writes_the_very_bytes_to_a_file_and_stays_clean_on_the_terminal(tmp_path: Path) -> None:
    answer = tmp_path / "answer"
    with answer.open("wb") as file, in_a_terminal([sys.executable, "-c", ASK], stdout=file.fileno()) as run:
        run.finish()
    assert answer.read_bytes() == "".join(PIECES).encode() + b"\n"
    assert not forbidden_in(run.written)
    assert "«note»" in run.written.decode()


@pytest.mark.parametrize(
    "arguments",
    [
        ["ask", "hi", "-m", "./" + hostile("model")],
        ["ask", "-f", hostile("file")],
        ["config", "validate", hostile("x")],
    ],
    ids=["model", "file", "settings"],
)
def test_names_in_errors_are_harmless(arguments: list[str]) -> None:
    arguments = [argument.replace("\x00", "") for argument in arguments]  # no argument of a program holds NUL
    with in_a_terminal([sys.executable, "-m", "kvchat", *arguments]) as run:
        assert run.finish() == 2
    assert not forbidden_in(run.written)
    assert "␛]52;c;aGFja2Vk" in run.written.decode()


@pytest.mark.parametrize("arguments", [["config", "show"], ["config", "init"], ["locate"]], ids=" ".join)
def test_values_and_paths_from_outside_are_harmless(arguments: list[str], tmp_path: Path) -> None:
    folder = tmp_path / hostile("folder").replace("\x00", "").replace("/", "")
    folder.mkdir()
    settings = folder / "config.toml"
    if arguments != ["config", "init"]:
        settings.write_text('[model]\nsystem = "\\u001b]0;hacked\\u0007\\u009b31m"\n')
    environ = {**os.environ, "KVCHAT_CONFIG": str(settings), "KVCHAT_DATA_DIR": str(folder)}
    run = PtyRun([sys.executable, "-m", "kvchat", *arguments], environ)
    try:
        assert run.finish() == 0
    finally:
        run.close()
    assert not forbidden_in(run.written)
    assert "hacked" in run.written.decode()


def test_a_wrong_model_is_refused_before_torch_is_imported() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "kvchat", "ask", "hi", "-m", "./no-such-model"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert result.returncode == 2
    assert '"./no-such-model"' in result.stderr
    assert " kvchat.cli.ask" in result.stderr
    assert " torch" not in result.stderr


def test_a_stage_stays_in_its_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "40")
    progress("reading " * 20)
    assert len(capsys.readouterr().err.removeprefix("\r\x1b[K")) == 39
