"""The application downloads a model with its real process from a local hub."""

import os
from pathlib import Path

import pytest
from support.app_driver import ask, drawn, press, submit, toasts
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
async def test_a_stopped_download_is_resumed(running, hub):
    hub.pause = 0.02
    async with running(size=(80, 24)) as (app, _pilot, until):
        press(app, "ctrl+o", *"org/model", "enter")
        await until(lambda: app.screen is app.chat and "↓" in drawn(app))
        await until(lambda: " of 33.0 MiB · " in drawn(app) and "iB/s · " in drawn(app) and " s left" in drawn(app))
        await ask(app, "hello")
        press(app, "escape")
        await until(lambda: "The download was stopped; /model org/model resumes it." in toasts(app))
        hub.pause = 0.0
        submit(app, "/model org/model")
        await until(lambda: app.controller.models.in_use.model == "org/model")
        assert "↓" not in drawn(app)
    first, second = hub.ranges
    assert (first, second > 2**20) == (0, True), "the first part was not downloaded again"


@pytest.mark.slow("a process asks the hub")
async def test_a_gated_model_is_reported(running, hub):
    """``tests/models/test_catalog.py`` tests other refusals."""
    hub.name, hub.gated = "org/gated", True
    async with running() as (app, _pilot, until):
        submit(app, "/model org/gated")
        await until(lambda: "org/gated is gated." in drawn(app))
