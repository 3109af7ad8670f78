#!/usr/bin/env python3
"""Make the README's pictures: .ci/picture.py [FOLDER], by default .github.

``chat.svg`` is the screen at the end, ``switch.svg`` the answer in which the mode is switched, frame by frame. The real
application talks to the real engine; a frame is Textual's own export of the screen.
"""

from __future__ import annotations

import asyncio
import re
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

from scene import answered, stored, until
from textual.pilot import Pilot

from kvchat.protocol.messages import Load, Sampling
from kvchat.tui.app import KvchatApp
from kvchat.tui.state import AppConfig, Phase

SIZE = (120, 40)
TOLD = "My name is Maria and my cat is called Biscuit."
STORIES = ("a whale", "a lighthouse", "two brothers", "a lost map", "an old clock", "a long winter", "a garden")
ASKED = "What is my cat called?"


FRAMES, STEP = 10, 8  # pictures of the answer, and tokens between two of them
SECONDS = 0.7  # that one is seen


async def take(folder: Path) -> None:
    """Play the scene and write the pictures."""
    with tempfile.TemporaryDirectory() as own:
        load = Load(mode_params={"speculative": {"budget": 256}, "streaming": {"budget": 256}})
        sampling = Sampling(temperature=0.7, seed=7, max_new_tokens=160)
        app = KvchatApp(AppConfig(log_file=Path(own) / "engine.log", load=load, sampling=sampling))
        async with app.run_test(size=SIZE) as pilot:
            frames = [frame async for frame in _play(app, pilot)]
    (folder / "chat.svg").write_text(frames[-1], encoding="utf-8")
    (folder / "switch.svg").write_text(_animated(frames), encoding="utf-8")


async def _play(app: KvchatApp, pilot: Pilot[None]) -> AsyncIterator[str]:
    """Tell a fact, ask for it after seven stories, and switch the mode in the middle of another one: its frames."""
    await until(pilot, lambda: app.controller.state.phase is Phase.READY)
    for text in (TOLD, *(f"Tell me a story about {what}." for what in STORIES)):
        await answered(app, pilot, text)
    app.controller.switch("speculative")
    await answered(app, pilot, ASKED)
    app.controller.switch("streaming")
    begun = stored(app)
    await app.controller.ask("Tell me a story about the sea.")
    for index in range(FRAMES):
        await until(pilot, lambda wanted=begun + STEP * (index + 1): stored(app) >= wanted or _is_over(app, begun))
        yield app.export_screenshot(title="kvchat")
        if index == FRAMES // 2:
            app.controller.switch("speculative")


def _is_over(app: KvchatApp, begun: int) -> bool:
    return stored(app) > begun and not app.controller.state.phase.busy


def _animated(frames: list[str]) -> str:
    """One picture that shows the frames in turn, the last one three times as long."""
    box = re.search(r'viewBox="([^"]+)"', frames[0])
    assert box
    turns, last = len(frames) + 2, len(frames) - 1
    style = f".frame {{ opacity: 0; animation: once {SECONDS * turns:.1f}s step-end infinite }}"
    for name, share in (("once", 1 / turns), ("last", 3 / turns)):
        style += f"@keyframes {name} {{ 0% {{ opacity: 1 }} {100 * share:.2f}%, 100% {{ opacity: 0 }} }}"
    for index in range(len(frames)):
        style += f"#frame-{index} {{ animation-delay: {SECONDS * index:.1f}s }}"
    style += f"#frame-{last} {{ animation-name: last }}"
    parts = "".join(f'<g class="frame" id="frame-{index}">{frame}</g>' for index, frame in enumerate(frames))
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box[1]}"><style>{style}</style>{parts}</svg>\n'


if __name__ == "__main__":
    default = Path(__file__).parents[1] / ".github"
    asyncio.run(take(Path(sys.argv[1]) if len(sys.argv) > 1 else default))
