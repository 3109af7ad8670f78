#!/usr/bin/env python3
"""Record the demonstration that ships with kvchat: .ci/demo.py [FILE.jsonl.gz], by default kvchat/replay/demo.jsonl.gz.

The real application talks to the real engine, which writes what it reports; `kvchat replay` plays it.
"""

from __future__ import annotations

import asyncio
import gzip
import sys
import tempfile
from pathlib import Path

from scene import answered, stored, until
from textual.pilot import Pilot

import kvchat
from kvchat.paths import bundled_recording
from kvchat.protocol.messages import Load, Sampling
from kvchat.protocol.recording import Recorder, read
from kvchat.tui.app import KvchatApp
from kvchat.tui.state import AppConfig, Phase

TOLD = "My name is Maria and my cat is called Biscuit."
STORIES = ("a whale", "a lighthouse", "a lost map", "an old clock")
ASKED = "What is my cat called?"


async def record(file: Path) -> None:
    """Play the scene and write what was recorded of it."""
    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder) / "demo.jsonl"
        load = Load(mode_params={mode: {"budget": 256} for mode in ("speculative", "streaming")})
        config = AppConfig(
            log_file=Path(folder) / "engine.log",
            load=load,
            sampling=Sampling(temperature=0.7, seed=7, max_new_tokens=120),
            recorder=Recorder(raw, kvchat.__version__),
        )
        app = KvchatApp(config)
        async with app.run_test(size=(120, 40)) as pilot:
            await _play(app, pilot)
        file.write_bytes(gzip.compress(raw.read_bytes(), mtime=0))
    entries = read(file)
    sys.stderr.write(f"{len(entries):,} events, {entries[-1].seconds:.0f} s, {file.stat().st_size:,} bytes\n")


async def _play(app: KvchatApp, pilot: Pilot[None]) -> None:
    await until(pilot, lambda: app.controller.state.phase is Phase.READY)
    for text in (TOLD, *(f"Tell me a story about {what}." for what in STORIES)):
        await answered(app, pilot, text)
    app.controller.switch("speculative")
    await until(pilot, lambda: app.controller.state.mode == "speculative")
    await answered(app, pilot, ASKED)
    before = stored(app)
    await app.controller.ask("Tell me a story about the sea.")
    await until(pilot, lambda: stored(app) >= before + 60)
    app.controller.switch("streaming")
    await until(pilot, lambda: not app.controller.state.phase.busy)
    await answered(app, pilot, ASKED)


if __name__ == "__main__":
    asyncio.run(record(Path(sys.argv[1]) if len(sys.argv) > 1 else bundled_recording()))
