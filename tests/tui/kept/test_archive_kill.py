"""kill -9 of the application or its engine in mid-answer: the question and the text so far are on disk.

``KVCHAT_KILLS=50`` kills so many times, at random moments, and takes the time: at most a second of text is lost.
"""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest
from support import start_app
from support.environment import environ
from support.patience import wait_until
from support.pty_run import PtyRun

from kvchat.conversations.store import ConversationStore

KILLS = int(os.environ.get("KVCHAT_KILLS", "1"))
WORDS = "the window moves and older pages rest on the host "


def engine_of(pid: int) -> int:
    """The child of the application."""
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


def saved_text(database: Path) -> str:
    """The last text of the latest conversation on disk."""
    store = ConversationStore(database)
    latest = store.latest()
    text = store.load(latest.id).last_text() if latest else ""
    store.close()
    return text


@pytest.mark.terminal
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="no /proc")
@pytest.mark.parametrize("victim", ["application", "engine"])
@pytest.mark.parametrize("number", range(KILLS))
def test_text_survives_kill(tmp_path, victim, number):
    database = tmp_path / "chats.db"
    program = PtyRun(start_app.command(tmp_path), environ(TERM="xterm-256color"), width=100, height=30)
    try:
        program.until(start_app.READY)
        program.type(b"slow\r")
        program.until("window moves")
        wait_until(lambda: len(saved_text(database)) > len(WORDS))
        time.sleep(random.Random(number).uniform(0.0, 1.0))
        os.kill(program.process.pid if victim == "application" else engine_of(program.process.pid), signal.SIGKILL)
        killed = time.time()
        if victim == "engine":
            program.until("cut off")
            program.type(b"\x11")
        program.finish()
    finally:
        program.close()
    store = ConversationStore(database)
    kept = store.latest()
    question, answer = store.load(kept.id).path
    store.close()
    assert question.text == "slow"
    assert answer.text == (WORDS * 10_000)[: len(answer.text)]
    assert answer.ending == ("cut off" if victim == "engine" else "")
    if KILLS > 1 and victim == "application":
        assert killed - kept.updated < 1.0
