"""A server with a fake session, loaded."""

import pytest
from support.fake_session import FakeLoader, FakeSession
from support.worker_child import Child, Clock, tick

from kvchat.protocol.messages import Load, Loaded


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def session(clock):
    return FakeSession(on_token=lambda _session, _n: tick(clock, 0.05))


@pytest.fixture
def child(session, clock):
    child = Child(FakeLoader(session), clock)
    child.send(Load("bundled", mode="speculative", given={"speculative": {"budget": 128}}))
    assert [e.stage for e in child.until(Loaded)[:-1]] == ["starting PyTorch", "reading the weights"]
    yield child
    child.close()
