"""Runs commands in this process, because a new one takes seconds to import torch and transformers."""

import io
import sys

import pytest
from support.command_line import Outcome, Terminal
from support.fake_session import FakeSession

import kvchat
from kvchat.cli import main
from kvchat.models import checkpoint


@pytest.fixture
def run(monkeypatch, capfd):
    """Run a command with these arguments; with ``stdin`` None it is a terminal where nothing is typed."""

    def run(*args, stdin=None):
        stream = io.TextIOWrapper(io.BytesIO(stdin)) if stdin is not None else Terminal(io.BytesIO())
        monkeypatch.setattr(sys, "stdin", stream)
        monkeypatch.setattr(sys, "argv", ["kvchat", *args])
        with pytest.raises(SystemExit) as caught:
            main.main()
        return Outcome(int(caught.value.code or 0), *capfd.readouterr())

    return run


@pytest.fixture
def session(monkeypatch):
    session = FakeSession()
    monkeypatch.setitem(vars(kvchat), "open_session", session.open)
    monkeypatch.setattr(checkpoint, "locate", lambda name, progress: None)
    return session
