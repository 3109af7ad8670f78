"""Conversations are saved while they grow, and never lost when the disk fails."""

import asyncio
import os
import random
import signal
import sqlite3
import threading
import time
from pathlib import Path
from statistics import median

import pytest
from support import start_app
from support.environment import environ
from support.fake_view import FakeView
from support.full_disk import full_disk
from support.lost_text import MAX_LOSS_S, WORDS, Loss, loss
from support.pty_run import PtyRun

from kvchat.conversations import store
from kvchat.conversations.conversation import Conversation
from kvchat.conversations.store import ConversationStore, StoreError
from kvchat.tui import archive as archives
from kvchat.tui.archive import Archive


@pytest.fixture
def view():
    return FakeView()


@pytest.fixture
async def archive(tmp_path, view):
    archive = Archive(tmp_path / "chats.db", view)
    yield archive
    await archive.close()


def asked(text):
    conversation = Conversation()
    conversation.ask(text)
    return conversation


async def test_saved_conversations_are_found_and_opened(archive):
    await archive.open()
    conversation = asked("one")
    await archive.save(conversation)
    assert (await archive.latest()).title == "one"
    assert [summary.id for summary in await archive.search("one")] == [conversation.id]
    assert (await archive.load(conversation.id)).turns == conversation.turns
    await archive.delete(conversation.id)
    assert await archive.latest() is None
    await archive.restore(conversation.id)
    assert (await archive.latest()).id == conversation.id


async def test_saves_before_opening_are_written_afterwards(archive):
    conversation = asked("one")
    await archive.save(conversation)
    with pytest.raises(StoreError, match="not open yet"):
        await archive.latest()
    await archive.open()
    await archive.save(Conversation())
    assert (await archive.latest()).title == "one"


async def test_a_failed_save_is_reported_once_and_retried(archive, view, tmp_path):
    await archive.open()
    archive._store._db.execute("PRAGMA busy_timeout = 10")
    other = sqlite3.connect(tmp_path / "chats.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    left, current = asked("left"), asked("current")
    await archive.save(left)
    await archive.save(current)
    assert len(view.toasts) == 1
    assert "memory" in view.toasts[0]
    other.execute("ROLLBACK")
    other.close()
    await archive.save(current)
    assert {summary.title for summary in await archive.search("")} == {"left", "current"}


async def test_concurrent_saves_are_all_written(archive, view):
    await archive.open()
    first, second = asked("first"), asked("second")
    await asyncio.gather(*(archive.save(one) for one in (first, second, first)))
    assert {summary.title for summary in await archive.search("")} == {"first", "second"}
    assert not view.toasts


async def test_an_unusable_database_falls_back_to_memory(tmp_path, view):
    path = tmp_path / "chats.db"
    path.write_text("no database " * 1000)
    archive = Archive(path, view)
    await archive.open()
    assert "only in memory" in view.toasts[0]
    await archive.save(asked("one"))
    assert (await archive.latest()).title == "one"
    await archive.close()
    assert path.read_text() == "no database " * 1000


@pytest.fixture
def lock(tmp_path):
    """Another program that locks the database."""
    ConversationStore(tmp_path / "chats.db").close()
    other = sqlite3.connect(tmp_path / "chats.db", isolation_level=None, check_same_thread=False)
    other.execute("BEGIN EXCLUSIVE")
    yield other
    other.close()


async def test_a_database_locked_at_start_is_used_once_free(archive, view, lock, monkeypatch, tmp_path):
    monkeypatch.setattr(store, "BUSY_S", 0.01)
    await archive.open()
    assert "in memory until then" in view.toasts[0]
    first, second = asked("first"), asked("second")
    for conversation in (first, second):
        await archive.save(conversation)
    with pytest.raises(StoreError, match="locked"):
        await archive.search("")
    first.answer("said", "eos")
    await archive.save(first)
    assert len(view.toasts) == 1
    lock.execute("ROLLBACK")
    await archive.save(second)
    assert "used again" in view.toasts[1]
    second.answer("also said", "eos")
    await archive.save(second)
    on_disk = ConversationStore(tmp_path / "chats.db")
    assert [one.title for one in on_disk.search("")] == ["second", "first"]
    assert [on_disk.load(one.id).last_text() for one in (first, second)] == ["said", "also said"]
    on_disk.close()


async def test_closing_waits_for_a_locked_database(tmp_path, view, lock, monkeypatch):
    monkeypatch.setattr(store, "BUSY_S", 0.01)
    archive = Archive(tmp_path / "chats.db", view)
    await archive.open()
    await archive.save(asked("one"))
    monkeypatch.undo()
    threading.Timer(0.1, lambda: lock.execute("ROLLBACK")).start()
    await archive.close()
    on_disk = ConversationStore(tmp_path / "chats.db")
    assert on_disk.latest().title == "one"
    on_disk.close()


async def test_a_full_disk_is_retried_once_there_is_room(archive, view, tmp_path):
    ConversationStore(tmp_path / "chats.db").close()
    with full_disk():
        await archive.open()
        await archive.save(asked("one"))
    assert "in memory until then" in view.toasts[0]
    await archive.save(asked("two"))
    on_disk = ConversationStore(tmp_path / "chats.db")
    assert {one.title for one in on_disk.recent()} == {"one", "two"}
    on_disk.close()


async def test_unsaved_conversations_open_from_memory(archive):
    await archive.open()
    conversation = asked("one")
    await archive.save(conversation)
    assert (await archive.load(conversation.id)) is not conversation
    conversation.answer("x" * 2**20, "eos")
    with full_disk():
        await archive.save(conversation)
        assert (await archive.load(conversation.id)).last_text() == conversation.last_text()
    await archive.save(conversation)


@pytest.fixture
def busy(archive):
    """Keeps the archive's thread busy until the event is set."""
    free = threading.Event()
    yield lambda: archive._thread.submit(free.wait, 60) and free
    free.set()


@pytest.mark.parametrize("begun", [False, True], ids=["waiting", "being written"])
async def test_closing_writes_what_a_canceled_save_did_not(archive, busy, tmp_path, monkeypatch, begun):
    await archive.open()
    conversation, left = asked("one"), asked("left")
    await archive.save(conversation)
    conversation.answer("1", "eos")
    if begun:
        free, entered, save = threading.Event(), threading.Event(), archive._store.save

        def save_slowly(changes):
            entered.set()
            free.wait(60)
            save(changes)

        monkeypatch.setattr(archive._store, "save", save_slowly)
    else:
        free = busy()
    saving = [asyncio.create_task(archive.save(one)) for one in (conversation, left)]
    await asyncio.to_thread(entered.wait, 60) if begun else await asyncio.sleep(0.01)
    for task in saving:
        task.cancel()
    await asyncio.gather(*saving, return_exceptions=True)
    closing = asyncio.create_task(archive.close())
    await asyncio.sleep(0.01)
    free.set()
    await closing
    on_disk = ConversationStore(tmp_path / "chats.db")
    assert on_disk.load(conversation.id).last_text() == "1"
    assert on_disk.load(left.id).last_text() == "left"
    on_disk.close()


async def test_closing_writes_saves_made_during_opening(archive, busy, tmp_path):
    free = busy()
    opening = asyncio.create_task(archive.open())
    await archive.save(asked("one"))
    opening.cancel()
    free.set()
    await archive.close()
    on_disk = ConversationStore(tmp_path / "chats.db")
    assert on_disk.latest().title == "one"
    on_disk.close()


async def test_nothing_is_saved_after_closing(tmp_path, view):
    archive = Archive(tmp_path / "chats.db", view)
    await archive.open()
    await archive.close()
    await archive.save(asked("late"))
    store = ConversationStore(tmp_path / "chats.db")
    assert store.latest() is None
    store.close()


async def test_a_database_still_opening_is_closed(tmp_path, view, monkeypatch):
    begun, go, closed = threading.Event(), threading.Event(), []

    class Slow(ConversationStore):
        def __init__(self, path, busy_s):
            begun.set()
            go.wait()
            super().__init__(path, busy_s)

        def close(self):
            closed.append(self)
            super().close()

    monkeypatch.setattr(archives, "ConversationStore", Slow)
    archive = Archive(tmp_path / "chats.db", view)
    opening = asyncio.create_task(archive.open())
    await asyncio.to_thread(begun.wait)
    opening.cancel()
    go.set()
    await archive.close()
    assert len(closed) == 1


async def test_changes_during_a_save_are_saved(archive, monkeypatch):
    await archive.open()
    conversation, written, save = asked("one"), threading.Event(), ConversationStore.save

    def save_slowly(store, changes):
        written.wait()
        save(store, changes)

    monkeypatch.setattr(ConversationStore, "save", save_slowly)
    first = asyncio.ensure_future(archive.save(conversation))
    await asyncio.sleep(0)  # it has taken the changes and waits for the disk
    conversation.answer("the ", "stopped")
    second = asyncio.ensure_future(archive.save(conversation))
    await asyncio.sleep(0)
    written.set()
    await asyncio.gather(first, second)
    assert (await archive.load(conversation.id)).leaf.ending == "stopped"


# ---- kill -9 of the application or its engine during an answer: the question and the text so far are on disk


KILLS = int(os.environ.get("KVCHAT_KILLS", "1"))


def engine_of(pid: int) -> int:
    """The application's child process."""
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


def kill(folder: Path, victim: str, number: int) -> Loss:
    """Kill it during an answer, up to three seconds after the first words, and return what was lost."""
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
            program.read(wait_s)  # an unread terminal would block the application
        killed = time.time()
        os.kill(program.process.pid if victim == "application" else engine_of(program.process.pid), signal.SIGKILL)
        if victim == "engine":
            program.until("cut off")
            program.type(b"\x11")
        program.finish()
    finally:
        program.close()
    store = ConversationStore(folder / "chats.db")
    saved = store.latest()
    question, *answers = store.load(saved.id).path
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
    summary = f"median {median(seconds):.2f} s ({median(characters):.0f} characters), worst {seconds[-1]:.2f} s"
    print(f"{victim} killed {KILLS} times: {summary} ({characters[-1]})")  # noqa: T201  # what a long run lost
    if KILLS > 1:
        assert seconds[-1] <= MAX_LOSS_S
