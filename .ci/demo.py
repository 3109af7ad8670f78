#!/usr/bin/env python3
"""Make the README's moving picture and what `kvchat replay` plays: .ci/demo.py [PICTURE.svg RECORDING.jsonl.gz].

The real application talks to the real engine with SmolLM2 (`.ci/models.py` fetches it), which writes what it reports.
A frame of the picture is Textual's own export of the screen.
"""

from __future__ import annotations

import asyncio
import gzip
import re
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from textual.pilot import Pilot

import kvchat
from kvchat.paths import bundled_recording
from kvchat.protocol.messages import Load, Sampling
from kvchat.protocol.recording import Recorder, read
from kvchat.tui.app import KvchatApp
from kvchat.tui.state import AppConfig, Phase

PICTURE = Path(__file__).parents[1] / ".github" / "chat.svg"
TOLD = "My name is Maria, my cat is called Biscuit and the code of the cellar door is 7419. Please remember that."
QUESTIONS = (
    "Write a short story about a lighthouse keeper.",
    "What are three good reasons to learn the piano?",
    "Explain how bread is baked, step by step.",
    "Write a letter to a friend about a trip to the mountains.",
)
ASKED = "What is the code of the cellar door?"
STEP = 12  # tokens between two frames of an answer
SECONDS = 0.9  # that a frame is seen


async def main(picture: Path, recording: Path) -> None:
    """Play the scene and write both."""
    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder) / "demo.jsonl"
        budgets = {mode: {"budget": 256} for mode in ("speculative", "streaming")}
        config = AppConfig(
            log_file=Path(folder) / "engine.log",
            load=Load("smollm2", mode="speculative", mode_params=budgets),
            sampling=Sampling(temperature=0, repetition_penalty=1.05, max_new_tokens=300),
            recorder=Recorder(raw, kvchat.__version__),
        )
        app = KvchatApp(config)
        async with app.run_test(size=(120, 40)) as pilot:
            frames = [frame async for frame in _play(app, pilot)]
        recording.write_bytes(gzip.compress(raw.read_bytes(), mtime=0))
    picture.write_text(_animated(frames), encoding="utf-8")
    entries = read(recording)
    sys.stderr.write(f"{len(entries):,} events, {entries[-1].seconds:.0f} s, {recording.stat().st_size:,} bytes\n")


async def _play(app: KvchatApp, pilot: Pilot[None]) -> AsyncIterator[str]:
    """The frames: a fact forgotten in streaming mode and recalled after a switch back; one in mid-answer."""
    chat = app.controller

    async def until(condition: Callable[[], bool]) -> None:
        while not condition():
            await pilot.pause(0.02)

    async def answered() -> None:
        await until(lambda: chat.state.phase.busy)
        await until(lambda: not chat.state.phase.busy)

    def stored() -> int:
        return chat.state.snapshot.total if chat.state.snapshot else 0

    await until(lambda: chat.state.phase is Phase.READY)
    for text in (TOLD, *QUESTIONS):
        await chat.ask(text)
        await answered()
    chat.set_sampling("max_new_tokens", str(STEP * 5))
    chat.switch("streaming")
    await chat.ask(ASKED)
    await answered()
    yield app.export_screenshot(title="kvchat")
    chat.switch("speculative")
    await chat.branches.regenerate()
    await answered()
    yield app.export_screenshot(title="kvchat")
    begun = stored()
    await chat.ask("Write a short story about the sea.")
    await until(lambda: chat.state.phase.busy)
    for index in range(1, 6):
        await until(lambda wanted=begun + STEP * index: stored() >= wanted or not chat.state.phase.busy)
        yield app.export_screenshot(title="kvchat")
        if index == 2:
            chat.switch("full")
    await until(lambda: not chat.state.phase.busy)


def _animated(frames: list[str]) -> str:
    """One picture that shows the frames in turn, the last one three times as long, and alone where nothing moves."""
    box = re.search(r'viewBox="([^"]+)"', frames[0])
    assert box
    turns, last = len(frames) + 2, len(frames) - 1
    style = f".frame {{ opacity: 0 }} #frame-{last} {{ opacity: 1 }}"
    for index in range(len(frames)):
        begin, end = (100 * turn / turns for turn in (index, index + 1 if index < last else turns))
        shown = f"0% {{ opacity: {int(not index)} }} {begin:.2f}% {{ opacity: 1 }} {end:.2f}%, 100% {{ opacity: 0 }}"
        style += f"@keyframes show-{index} {{ {shown} }}"
        style += f"#frame-{index} {{ animation: show-{index} {SECONDS * turns:.1f}s step-end infinite }}"
    parts = "".join(f'<g class="frame" id="frame-{index}">{frame}</g>' for index, frame in enumerate(frames))
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box[1]}"><style>{style}</style>{parts}</svg>\n'


if __name__ == "__main__":
    asyncio.run(main(*map(Path, sys.argv[1:])) if sys.argv[1:] else main(PICTURE, bundled_recording()))
