"""Servers with scripted frames, and a real one in a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support.fake_server import HELLO, FakeServer
from support.llama_server import LlamaServer

from kvchat.protocol.messages import Load
from kvchat.remote.session import RemoteSession, open_session

Serve = Callable[..., FakeServer]


@pytest.fixture(autouse=True)
def _own_keys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVCHAT_CONFIG", str(tmp_path / "config" / "config.toml"))
    monkeypatch.delenv("KVCHAT_API_KEY", raising=False)


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Start a fake server of a kind that streams some frames."""
    with ExitStack() as started:
        yield lambda kind="vLLM", frames=HELLO: started.enter_context(FakeServer(kind, frames))


@pytest.fixture
def connect() -> Iterator[Callable[..., RemoteSession]]:
    """Open sessions, and close them at the end."""
    opened: list[RemoteSession] = []

    def connected(url: str, **load: Any) -> RemoteSession:
        opened.append(open_session(Load(model=url, **load)))
        return opened[-1]

    yield connected
    for session in opened:
        session.close()


@pytest.fixture(scope="module")
def llama() -> Iterator[LlamaServer]:
    """llama.cpp's server with SmolLM2 and a context of 512 tokens."""
    pytest.importorskip("xllamacpp")
    with LlamaServer(context=512) as server:
        yield server
