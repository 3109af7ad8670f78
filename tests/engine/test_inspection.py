"""Looking at a session where memory is short: kvchat's own error, and the session goes on."""

from __future__ import annotations

import pytest
from support.tiny_runner import loaded

from kvchat.engine import session as session_module
from kvchat.engine.session import Session
from kvchat.errors import OutOfMemoryError

LOOKS = {
    "snapshot": lambda session: session.snapshot(),
    "details": lambda session: session.details(),
    "attended": lambda session: session.attended(0),
    "prices": lambda session: session.prices(),
}


def no_memory(*_):
    raise RuntimeError("std::bad_alloc")


@pytest.mark.parametrize("look", LOOKS)
def test_a_look_without_memory_is_explained(monkeypatch, look):
    session = Session(loaded("llama", num_hidden_layers=2))
    session.prefill([1, 2, 3])
    with monkeypatch.context() as short:
        for part, name in (
            (session._metrics, "snapshot"),
            (session._metrics, "details"),
            (session._switcher, "prices"),
        ):
            short.setattr(part, name, no_memory)
        short.setattr(session_module, "attended", no_memory)
        with pytest.raises(OutOfMemoryError, match="stored"):
            LOOKS[look](session)
    LOOKS[look](session)
    session.close()
