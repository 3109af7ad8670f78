"""A server with a fake session, loaded."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.fake_session import FakeLoader, FakeSession
from support.worker_child import Child, Clock, tick

from kvchat.protocol.messages import (
    Load,
    Loaded,
)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def session(clock: Clock) -> FakeSession:
    return FakeSession(on_token=lambda _session, _n: tick(clock, 0.05))


@pytest.fixture
def child(session: FakeSession, clock: Clock) -> Iterator[Child]:
    child = Child(FakeLoader(session), clock)
    child.send(Load("bundled", mode="speculative", given={"speculative": {"budget": 128}}))
    assert [e.stage for e in child.until(Loaded)[:-1]] == ["starting PyTorch", "reading the weights"]
    yield child
    child.close()
