"""Commands that wait take no more memory than they may."""

from __future__ import annotations

import io

import pytest
from support.fake_session import FakeLoader, FakeSession
from support.worker_child import CHAT, Child

from kvchat.engine import worker
from kvchat.protocol import wire
from kvchat.protocol.messages import (
    Stop,
    Tokenize,
    Tokenized,
    Turn,
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


def test_of_a_prompt_the_number_of_tokens_comes_or_all_of_them(child: Child, session: FakeSession) -> None:
    session.tokenize = lambda turns, args: [5, 6, 7]
    child.send(Tokenize(CHAT.turns, is_counted=True), Tokenize(CHAT.turns))
    assert child.until(Tokenized)[-1] == Tokenized(3)
    assert child.until(Tokenized)[-1] == Tokenized(3, (5, 6, 7))


def test_what_is_too_long_to_send_is_refused_and_ends_nothing(
    child: Child, session: FakeSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    session.tokenize = lambda turns, args: [5] * len(turns[0].content)
    monkeypatch.setattr(wire, "MAX_MESSAGE_BYTES", 1000)
    child.send(Tokenize((Turn("user", "a" * 600),)), Tokenize((Turn("user", "abc"),)))
    refused, told = child.until(Tokenized)
    assert (refused.kind, told) == ("UsageError", Tokenized(3, (5, 5, 5)))
