#!/usr/bin/env python3
"""Make the README's picture: .ci/picture.py [FILE.svg], by default .github/chat.svg.

The real application talks to the real engine; the picture is Textual's own export of the screen.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path

from scene import answered, stored, until
from textual.pilot import Pilot

from kvchat.protocol.messages import Load, Sampling
from kvchat.tui.app import KvchatApp
from kvchat.tui.config import AppConfig
from kvchat.tui.state import Phase

SIZE = (120, 40)
TOLD = "My name is Maria and my cat is called Biscuit."
STORIES = ("a whale", "a lighthouse", "two brothers", "a lost map", "an old clock", "a long winter", "a garden")
ASKED = "What is my cat called?"


async def take(file: Path) -> None:
    """Play the scene and write the picture."""
    with tempfile.TemporaryDirectory() as folder:
        load = Load(mode_params={"speculative": {"budget": 256}, "streaming": {"budget": 256}})
        sampling = Sampling(temperature=0.7, seed=7, max_new_tokens=160)
        app = KvchatApp(AppConfig(log_file=Path(folder) / "engine.log", load=load, sampling=sampling))
        async with app.run_test(size=SIZE) as pilot:
            await _play(app, pilot)
            file.write_text(app.export_screenshot(title="kvchat"), encoding="utf-8")


async def _play(app: KvchatApp, pilot: Pilot[None]) -> None:
    await until(pilot, lambda: app.controller.state.phase is Phase.READY)
    for text in (TOLD, *(f"Tell me a story about {what}." for what in STORIES)):
        await answered(app, pilot, text)
    app.controller.switch("speculative")
    await answered(app, pilot, ASKED)
    before = stored(app)
    await app.controller.ask("Tell me a story about the sea.")
    await until(pilot, lambda: stored(app) >= before + 60)
    app.controller.switch("streaming")
    await until(pilot, lambda: stored(app) >= before + 130 or not app.controller.state.phase.busy)


if __name__ == "__main__":
    default = Path(__file__).parents[1] / ".github" / "chat.svg"
    asyncio.run(take(Path(sys.argv[1]) if len(sys.argv) > 1 else default))
