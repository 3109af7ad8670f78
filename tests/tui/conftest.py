"""The application over a fake engine, and waiting for conditions instead of times."""

from __future__ import annotations

import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest
from textual.pilot import Pilot

from kvchat.config import modes
from kvchat.tui.app import KvchatApp
from kvchat.tui.config import AppConfig
from kvchat.tui.state import Phase

FAKE_ENGINE = (sys.executable, str(Path(__file__).parents[1] / "support" / "fake_engine.py"))
PATIENCE_S = 60.0  # for machines that run much else; a condition that comes is not waited for

Condition = Callable[[], object]
Until = Callable[[Condition], Awaitable[None]]
Running = Callable[..., AbstractAsyncContextManager[tuple[KvchatApp, Pilot[None], Until]]]


@pytest.fixture(autouse=True)
def three_modes(monkeypatch: pytest.MonkeyPatch) -> None:
    """F6 visits full, streaming and speculative here, however many modes are built."""
    three = {name: modes.registered()[name] for name in ("full", "streaming", "speculative")}
    monkeypatch.setattr(modes, "registered", lambda: three)


@pytest.fixture
def config(tmp_path: Path) -> AppConfig:
    return AppConfig(
        log_file=tmp_path / "state" / "kvchat.log",
        history_file=tmp_path / "state" / "history",
        engine_command=FAKE_ENGINE,
    )


@pytest.fixture
def running(config: AppConfig) -> Running:
    """``async with running(size=...) as (app, pilot, until)``; waits for the engine unless ``ready=False``."""

    @asynccontextmanager
    async def run(
        config: AppConfig = config, size: tuple[int, int] = (120, 40), ready: bool = True
    ) -> AsyncIterator[tuple[KvchatApp, Pilot[None], Until]]:
        app = KvchatApp(config)
        async with app.run_test(size=size) as pilot:

            async def until(condition: Condition) -> None:
                await wait_for(pilot, condition)

            if ready:
                await until(lambda: app.chat.state.phase is Phase.READY)
            yield app, pilot, until

    return run


async def wait_for(pilot: Pilot[None], condition: Condition) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        await pilot.pause(0.01)
