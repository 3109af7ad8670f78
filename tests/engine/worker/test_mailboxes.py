"""Commands that wait take no more memory than they may."""

from __future__ import annotations

import io

import pytest
from support.fake_session import FakeLoader, FakeSession

from kvchat.engine import worker
from kvchat.protocol import wire
from kvchat.protocol.messages import (
    Stop,
)


def test_more_commands_than_memory_should_hold_end_the_engine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(worker, "MAX_WAITING_BYTES", 1000 * worker.COMMAND_BYTES)
    server = worker.Server(io.BytesIO(), FakeLoader(FakeSession()))
    server.read(io.BytesIO(wire.encode(Stop()) * 2000))
    assert server._inbox.closed
    assert capsys.readouterr().err.startswith("kvchat: 98")
    assert len(server._inbox._commands) < 1000


def test_what_has_been_done_waits_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "MAX_WAITING_BYTES", 2 * worker.COMMAND_BYTES + 100)
    inbox = worker.Inbox()
    for _ in range(1000):
        inbox.put(Stop(), 40)
        assert inbox.get(1) == Stop()
