"""The application with a fake engine, and the controller with a fake view and client."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace

import pytest
from support import quick_engine, quick_stylesheets
from support.app_driver import prompt, wait_for
from support.fake_view import FakeClient, FakeView
from support.patience import PATIENCE_S
from textual.notifications import Notification
from textual.pilot import Pilot

from kvchat.protocol.messages import Loaded
from kvchat.tui import app as app_module
from kvchat.tui.app import KvchatApp
from kvchat.tui.controller import ChatController
from kvchat.tui.state import AppConfig, Phase
from kvchat.tui.widgets.composer import Prompt

quick_stylesheets.install()
LOADED = Loaded("bundled", "llama", 43_000_000, "cpu", "float32", 16384, 8, 4, 32, 16384, "full", {})

Condition = Callable[[], object]
Until = Callable[[Condition], Awaitable[None]]
Running = Callable[..., AbstractAsyncContextManager[tuple[KvchatApp, Pilot[None], Until]]]


@pytest.fixture(scope="session")
def engine_command():
    with quick_engine.started() as command:
        yield command


@pytest.fixture
def config(tmp_path, engine_command):
    return AppConfig(
        log_file=tmp_path / "state" / "kvchat.log",
        history_file=tmp_path / "state" / "history",
        engine_command=engine_command,
    )


@dataclass
class Chat:
    """A controller between a fake view and a fake client."""

    controller: ChatController
    view: FakeView
    client: FakeClient

    @classmethod
    def of(cls, config: AppConfig) -> Chat:
        """A chat with these settings."""
        view, client = FakeView(), FakeClient()
        return cls(ChatController(config, client, view), view, client)

    async def load(self, **changes: object) -> None:
        """Report a loaded model."""
        await self.controller.handle(replace(LOADED, **changes))

    async def ask(self, text: str) -> None:
        await self.controller.ask(text)

    async def engine_ended(self) -> None:
        """Wait for the end of an engine that is replaced or unloaded."""
        await asyncio.gather(*self.controller._background)

    @property
    def phase(self) -> Phase:
        return self.controller.state.phase

    @property
    def turns(self) -> list[str]:
        return [turn.content for turn in self.controller.state.conversation.turns]


@pytest.fixture
def chat_of():
    """A chat with other settings; the test closes it."""
    return Chat.of


@pytest.fixture
async def chat(config):
    chat = Chat.of(config)
    yield chat
    await chat.controller.archive.close()


@pytest.fixture
def running(config, monkeypatch):
    """``async with running(size=...) as (app, pilot, until)``; waits for the engine unless ``ready=False``.

    Toasts stay: on a busy machine they would disappear before the test has looked. A key waits for the keys before it,
    however long they take.
    """
    monkeypatch.setattr(app_module, "LONGEST_S", PATIENCE_S)
    monkeypatch.setattr(Notification, "time_left", PATIENCE_S)

    @asynccontextmanager
    async def run(config=config, size=(120, 40), ready=True):
        app = KvchatApp(config)
        async with app.run_test(size=size) as pilot:
            await wait_for(lambda: app.chat.query(Prompt) and prompt(app).has_focus)
            if ready:
                await wait_for(lambda: app.controller.state.phase is Phase.READY)
            yield app, pilot, wait_for

    return run
