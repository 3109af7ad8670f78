"""The screens as text at three sizes; ``--update-snapshots`` accepts them as they are now.

No engine runs: its events are handled one after the other, so that nothing depends on timing.
"""

import asyncio
import difflib
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.app_driver import is_open, press, prompt, wait_for
from support.fake_engine import ANSWER, ribbon
from support.fake_view import FakeClient
from support.patience import PATIENCE_S
from support.weights import linears
from textual.app import App
from textual.geometry import Region
from textual.screen import ModalScreen

from kvchat.conversations.store import MARK, Summary
from kvchat.models.catalog import FoundModel, Room
from kvchat.protocol.figures import Agreement, Gpu, Price, Run, Snapshot, Stats
from kvchat.protocol.messages import (
    Compared,
    Details,
    Failed,
    Finished,
    Load,
    Loaded,
    NeedleHidden,
    RecallBin,
    Replayed,
    Started,
    Switched,
    Text,
    Turn,
    Variant,
)
from kvchat.tui import app as application
from kvchat.tui.app import KvchatApp
from kvchat.tui.screens import choosing
from kvchat.tui.screens.choosing import ConversationsScreen
from kvchat.tui.state import GpuHistory, Moment
from kvchat.tui.widgets import panels
from kvchat.tui.widgets.bars import ModeBar

SETTLED_S = 5.0  # a screen unchanged for this long is accepted


def screen_text(app: App[None]) -> str:
    """The rows of the screen, or only of a dialog in front, because how the rest shines through does not matter."""
    region = app.size.region
    if isinstance(app.screen, ModalScreen):
        region = app.screen.children[0].region if app.screen.children else Region()
    strips = app.screen._compositor.render_strips()[region.y : region.bottom]
    return "".join(f"{strip.crop(region.x, region.right).text.rstrip()}\n" for strip in strips)


async def difference(app: App[None], expected: Path, update: bool, patience_s: float = PATIENCE_S) -> str:
    """Wait until the screen equals the file; return the difference if it does not in time.

    With ``update`` the settled screen is written to the file.
    """
    wanted = expected.read_text("utf-8") if expected.exists() and not update else None
    shown, deadline = screen_text(app), time.monotonic() + (SETTLED_S if update else patience_s)
    while shown != wanted and time.monotonic() < deadline:
        await asyncio.sleep(0.02)
        before, shown = shown, screen_text(app)
        if update and shown != before:
            deadline = time.monotonic() + SETTLED_S
    if update:
        expected.parent.mkdir(exist_ok=True)
        expected.write_text(shown, "utf-8")
    elif shown != wanted:
        lines = difflib.unified_diff((wanted or "").split("\n"), shown.split("\n"), expected.name, "shown", lineterm="")
        return "\n".join(lines)
    return ""


SNAPSHOTS = Path(__file__).parent / "snapshots"
GiB, MiB = 2**30, 2**20
PARAMS = {"budget": 512, "sink": 16, "window": 64, "tau": 0.8}
LOADED = Loaded(
    "Qwen3-4B", "qwen3", 4_000_000_000, "cuda:0", "bfloat16", 40960, 36, 8, 32, 147456, "speculative", PARAMS
)
TOTAL = 14203
SNAPSHOT = Snapshot(
    "speculative", PARAMS, 512.0, TOTAL, 40960, 96 * MiB, 2 * GiB, 7 * GiB, 3 * GiB, 8 * GiB, 9 * GiB,
    Gpu("NVIDIA GeForce RTX 4070", 9 * GiB, 12 * GiB, 8 * GiB, 45, 61, 123.4), 58.2, 0.41, 784 * 1024, 310 * MiB, 0.94,
    191, 0.8, 1.8, 0.1, 0.3, 9.4e9, ribbon=ribbon(TOTAL, "speculative"), attended="9" + "0123" * 110 + "999",
    extras={"pages a step": 1.5, "heads corrected": "21%"}, prices=(Price("full", 2 * GiB, 2 * GiB, 0.21),),
)  # fmt: skip
READ = tuple((TOTAL,) * 8 if not layer else tuple(256 + 64 * head for head in range(8)) for layer in range(36))
DETAILS = Details(
    TOTAL, READ, READ, tuple(RecallBin(n, 0.6 * n, 0.1 * n) for n in (0, 0, 0, 93, 160, 3, 0, 0, 0, 0)), 11 * GiB, GiB
)
STATS = Stats(
    14140, 14000, 63, TOTAL, 512.0, 0.04, 0.41, 900.0, 58.2, 96 * MiB, 2 * GiB, 310 * MiB, 0.94, 191,
    0.21, 0.8, 1.8, 0.1, 0.3, 9.4e9,
)  # fmt: skip


class StillEngine(FakeClient):
    """A client without an engine."""

    def __init__(self, *given: object) -> None:
        super().__init__()
        self.recorder = None

    async def receive(self) -> list[object]:
        await asyncio.Event().wait()
        return []

    async def close(self) -> None:
        pass


@pytest.fixture
def still(config, monkeypatch, request):
    """Settings of an application without an engine or a real machine, and whether to accept the screens."""
    monkeypatch.setattr(application, "EngineClient", StillEngine)
    monkeypatch.setattr(panels, "time", SimpleNamespace(strftime=lambda form: "12:00:00"))
    monkeypatch.setattr(choosing.catalog, "find", lambda folders: FOUND)
    monkeypatch.setattr(choosing.catalog, "is_here", lambda name: True)
    monkeypatch.setattr(choosing, "room", lambda device, released: Room("cuda", 8 * GiB))
    return config, request.config.getoption("--update-snapshots")


FOUND = [FoundModel("bundled", "bundled", linears(2**24)), FoundModel("org/large", "hub", linears(2**34))]


SIZES = ((80, 24), (120, 40), (200, 60))


@pytest.mark.parametrize("size", SIZES, ids="{0[0]}x{0[1]}".format)
async def test_screens_match_their_snapshots(still, size):
    config, update = still
    app, differences = KvchatApp(replace(config, load=Load("Qwen/Qwen3-4B"))), []

    async def check(name):
        file = SNAPSHOTS / f"{name}-{size[0]}x{size[1]}.txt"
        patience_s = SETTLED_S if any(differences) else PATIENCE_S  # it already fails
        differences.append(await difference(app, file, update, patience_s))

    async with app.run_test(size=size) as pilot:
        chat = app.controller
        chat.archive.search = found_conversations
        chat.state.gpu_history = history()
        await chat.handle(LOADED)
        await check("first")
        await answered(app)
        await check("answer")
        await switched(app)
        await check("switch")
        for key, name in OVERLAYS.items():
            press(app, key)
            await check(name)
            press(app, "escape")
            await pilot.pause()
        await compared(app)
        await check("compare")
        press(app, "escape")
        await failed(app)
        await check("error")
        await out_of_memory(app)
        await check("ways-out")
        await needle(app)
        await check("needle")
        press(app, "escape")
        press(app, "f9")
        await wait_for(lambda: is_open(app, ConversationsScreen))
        press(app, *"cat")
        await check("search")
        press(app, "escape")
        await replayed(app)
        await check("replay")
    assert not any(differences), "\n\n".join(filter(None, differences))


OVERLAYS = {"f1": "help", "f2": "settings", "ctrl+o": "models", "f9": "conversations", "shift+f7": "details"}


async def found_conversations(text: str) -> list[Summary]:
    now = time.time()
    return [
        Summary(id="1", title="Payment terms", updated=now - 7300, messages=4),
        Summary(id="2", title="A cat", updated=now - 3 * 86400 - 60, messages=2,
                excerpt=f"my {MARK[0]}cat{MARK[1]} is called Biscuit"),
    ]  # fmt: skip


def history() -> GpuHistory:
    """A minute of readings, recent enough that the snapshots add none."""
    readings = GpuHistory(clock=lambda: 0.0)
    readings.note(Gpu("RTX 4070", 1), None)
    readings.moments.clear()
    readings.moments.extend(
        Moment((3 + at // 10) * GiB, 12 * GiB, at * 3 % 100, 60.0 + at, at % 11 * GiB) for at in range(60)
    )
    return readings


async def answered(app: KvchatApp) -> None:
    chat = app.controller
    await chat.ask("What are the payment terms?")
    await chat.handle(Started(14140, 14000))
    await chat.handle(Text(ANSWER, 63))
    await chat.handle(SNAPSHOT)
    await chat.handle(DETAILS)
    await chat.handle(Finished("eos", ANSWER, STATS))
    await chat.handle(replace(SNAPSHOT, total=TOTAL))


async def switched(app: KvchatApp) -> None:
    chat = app.controller
    await chat.ask("And in streaming?")
    await chat.handle(Started(TOTAL, TOTAL - 20))
    await chat.handle(Text("The window moves.", 4))
    await chat.handle(Switched("speculative", "streaming", {"budget": 512}, TOTAL + 4, 3 * MiB, 0.01, 120))
    await chat.handle(
        replace(SNAPSHOT, mode="streaming", params={"budget": 512}, total=TOTAL + 4, ribbon=ribbon(TOTAL, "streaming"),
                reduced_tokens=120, extras={})
    )  # fmt: skip
    stats = replace(STATS, generated_tokens=4, total_tokens=TOTAL + 4, switches=({"at": 4},))
    await chat.handle(Finished("stopped", "The window moves.", stats))


async def compared(app: KvchatApp) -> None:
    variants = [Variant("full"), Variant("streaming", {"budget": 256})]
    app.controller.comparisons.begin(variants)
    answer = ("All ", "is ", "due ", "within ", "30 days.")
    other = ("All ", "is ", "due ", "at ", "once.")
    agreement = Agreement(3, 4, 0.75, 0.05, 0.9)
    runs = (
        Run("full", {}, answer, "eos", replace(STATS, read_share=1.0, recall_hit_rate=None, recalled_bytes=0)),
        Run("streaming", {"budget": 256}, other, "eos", replace(STATS, decode_tokens_per_s=71.0), agreement),
    )
    app.controller.comparisons.running.sampling = replace(app.controller.comparisons.running.sampling, seed=7)
    await app.controller.handle(Compared(runs, 14160))


async def failed(app: KvchatApp) -> None:
    await app.controller.ask("Read all of this.")
    await app.controller.handle(
        Failed("The prompt is too long.", "It has 50,000 tokens.", "Shorten it.", "DoesNotFitError")
    )
    prompt(app).load_text("")


async def out_of_memory(app: KvchatApp) -> None:
    """Memory runs out during an answer."""
    chat = app.controller
    await chat.ask("Go on.")
    await chat.handle(Started(TOTAL, TOTAL - 20))
    await chat.handle(Text("The window moves,", 4))
    detail = "9.1 GiB of 8.0 GiB are needed."
    await chat.handle(Failed("Memory ran out while decoding.", detail, "The text is kept.", "OutOfMemoryError"))


async def needle(app: KvchatApp) -> None:
    comparisons = app.controller.comparisons
    comparisons.search_needle(2000)
    await app.controller.handle(NeedleHidden((Turn("user", "What is the passkey?"),), "74829", 24))
    share = {"full": 1.0, "freeze": 0.6, "streaming": 0.1, "sync": 0.4, "speculative": 0.2}
    runs = tuple(
        Run(
            mode,
            {},
            ("It ", "is ", "lost." if mode == "streaming" else "74829."),
            "eos",
            replace(STATS, read_share=read),
        )
        for mode, read in share.items()
    )
    await app.controller.handle(Compared(runs, 2012))


async def replayed(app: KvchatApp) -> None:
    """The end of a recording in ``kvchat replay``."""
    app.controller.replay.name = "demo.jsonl"
    app.chat.query_one(ModeBar).is_recording = True
    app.chat.refresh_bindings()
    await app.controller.handle(Replayed(62.0))
