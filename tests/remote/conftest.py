"""Fake servers with scripted frames, and a real one in its own process."""

from collections.abc import Callable
from contextlib import ExitStack

import pytest
from support.fake_server import HELLO, FakeServer
from support.llama_server import LlamaServer

from kvchat.protocol.messages import Load
from kvchat.remote.session import RemoteSession, open_session

Serve = Callable[..., FakeServer]


@pytest.fixture(autouse=True)
def _own_keys(monkeypatch, tmp_path):
    monkeypatch.setenv("KVCHAT_CONFIG", str(tmp_path / "config" / "config.toml"))
    monkeypatch.delenv("KVCHAT_API_KEY", raising=False)


@pytest.fixture
def serve():
    """Starts fake servers that stream scripted frames."""
    with ExitStack() as started:
        yield lambda kind="vLLM", frames=HELLO: started.enter_context(FakeServer(kind, frames))


@pytest.fixture
def connect():
    """Opens sessions, and closes them at the end."""
    opened: list[RemoteSession] = []

    def connected(url, **load):
        opened.append(open_session(Load(model=url, **load)))
        return opened[-1]

    yield connected
    for session in opened:
        session.close()


@pytest.fixture(scope="module")
def llama():
    """llama.cpp's server with SmolLM2 and a context of 512 tokens."""
    pytest.importorskip("xllamacpp")
    with LlamaServer(context=512) as server:
        yield server
