"""What a command asks: read from files, pipes and stdin, never without an end."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from support.command_line import Run
from support.message import lacks

from kvchat.cli import chat
from kvchat.cli.chat import compose
from kvchat.errors import DoesNotFitError, UsageError


def test_a_file_without_an_end_is_refused_as_a_device() -> None:
    with pytest.raises(UsageError, match=r"/dev/zero.*device"):
        compose("what is this?", [Path("/dev/zero")], b"")


def test_a_pipe_is_read_and_one_that_does_not_end_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    threading.Thread(target=pipe.write_text, args=("from a pipe",), daemon=True).start()
    assert "from a pipe" in compose("", [pipe], b"")
    monkeypatch.setattr(chat, "MAX_BYTES", 2**20)
    endless = threading.Thread(target=_write_until_closed, args=(pipe,), daemon=True)
    endless.start()
    with pytest.raises(DoesNotFitError, match=r"1\.0 MiB.*131,072 tokens"):
        compose("", [pipe], b"")
    endless.join()


def test_stdin_without_an_end_is_refused(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "MAX_BYTES", 100)
    outcome = run("ask", stdin=b"x" * 101)
    assert (outcome.code, outcome.out) == (3, "")
    assert not lacks(outcome.err, "stdin", "100 B", "12 tokens")


def _write_until_closed(pipe: Path) -> None:
    with pipe.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"x" * 2**16)
        except BrokenPipeError:
            return


def test_lines_of_windows_end_as_models_know_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes(b"one\r\ntwo\r\n")
    monkeypatch.setattr(chat, "piped", lambda: b"three\r\nfour\r\n")
    (asked,) = chat.turns("five\r\nsix", [file], "")
    assert "\r" not in asked.content
    for lines in ("one\ntwo\n", "three\nfour\n", "five\nsix"):
        assert lines in asked.content
