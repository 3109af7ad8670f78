"""kill -9 of the application or its engine in mid-answer: the question and the text so far are on disk.

``KVCHAT_KILLS=50`` kills so many times, at random moments, and takes the time: at most a second of text is lost. How
much was lost is printed.
"""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from statistics import median

import pytest
from support import start_app
from support.environment import environ
from support.lost_text import WORDS, Loss, loss
from support.pty_run import PtyRun

from kvchat.conversations.store import ConversationStore

KILLS = int(os.environ.get("KVCHAT_KILLS", "1"))


def engine_of(pid: int) -> int:
    """The child of the application."""
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


def kill(folder: Path, victim: str, number: int) -> Loss:
    """Kill in mid-answer, up to three seconds after its first words; what was lost."""
    folder.mkdir()
    ledger = folder / "ledger"
    environment = environ(TERM="xterm-256color", FAKE_LEDGER=str(ledger))
    program = PtyRun(start_app.command(folder), environment, width=100, height=30)
    try:
        program.until(start_app.READY)
        program.type(b"slow\r")
        program.until("window moves")
        until = time.monotonic() + random.Random(number).uniform(0.0, 3.0)
        while (wait_s := until - time.monotonic()) > 0:
            program.read(wait_s)  # a terminal that is not read would hold the application up
        killed = time.time()
        os.kill(program.process.pid if victim == "application" else engine_of(program.process.pid), signal.SIGKILL)
        if victim == "engine":
            program.until("cut off")
            program.type(b"\x11")
        program.finish()
    finally:
        program.close()
    store = ConversationStore(folder / "chats.db")
    kept = store.latest()
    question, *answers = store.load(kept.id).path
    store.close()
    text = answers[0].text if answers else ""
    assert question.text == "slow"
    assert text == (WORDS * 10_000)[: len(text)]
    assert [answer.ending for answer in answers] == ["cut off"] or victim == "application"
    return loss(ledger, killed, len(text))


@pytest.mark.terminal
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="no /proc")
@pytest.mark.parametrize("victim", ["application", "engine"])
def test_text_survives_kills(tmp_path, victim, count):
    losses = [kill(tmp_path / str(number), victim, number) for number in range(KILLS)]
    count["kills"] += len(losses)
    seconds, characters = sorted(one.seconds for one in losses), sorted(one.characters for one in losses)
    told = f"median {median(seconds):.2f} s ({median(characters):.0f} characters), worst {seconds[-1]:.2f} s"
    print(f"{victim} killed {KILLS} times: {told} ({characters[-1]})")  # noqa: T201  # what a long run lost
    if KILLS > 1:
        assert seconds[-1] < 1.0
