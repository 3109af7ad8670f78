"""A model downloaded from within the application, by the process it really starts, from a hub on this machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.app_driver import drawn, finished, press, toasts, typed
from support.fake_hub import FakeHub

import kvchat

BUNDLED = Path(kvchat.__file__).parent / "models" / "bundled"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    with FakeHub("org/model", BUNDLED).serve() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        yield hub


@pytest.mark.skipif("KVCHAT_TEST_DOWNLOADS" not in os.environ, reason="KVCHAT_TEST_DOWNLOADS is not set")
@pytest.mark.slow("a download is slowed down to be seen")
async def test_it_tells_how_far_it_is_is_stopped_and_gone_on_with(running, hub):
    hub.pause = 0.02
    async with running(size=(80, 24)) as (app, _pilot, until):
        press(app, "ctrl+o", *"org/model", "enter")
        await until(lambda: app.screen is app.chat and "↓" in drawn(app))
        await until(lambda: " of 33.0 MiB · " in drawn(app) and "iB/s · " in drawn(app) and " s left" in drawn(app))
        typed(app, "hello")
        await until(lambda: finished(app))
        press(app, "escape")
        await until(lambda: "The download was stopped; /model org/model resumes it." in toasts(app))
        hub.pause = 0.0
        typed(app, "/model org/model")
        await until(lambda: app.controller.models.in_use.model == "org/model")
        assert "↓" not in drawn(app)
    first, second = hub.ranges
    assert (first, second > 2**20) == (0, True), "what had come was not downloaded again"


@pytest.mark.slow("each model is sought by an engine of its own")
async def test_a_typing_error_a_gate_and_no_network_are_told(running, hub, monkeypatch):
    hub.name, hub.gated = "org/gated", True
    told = {"org/gatde": "The hub has no model org/gatde.", "org/gated": "org/gated is gated."}
    async with running() as (app, _pilot, until):
        for name, title in told.items():
            typed(app, f"/model {name}")
            await until(lambda title=title: title in drawn(app))
        monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # discard: nothing listens
        typed(app, "/model org/gated")
        await until(lambda: "The hub cannot be reached" in drawn(app))
