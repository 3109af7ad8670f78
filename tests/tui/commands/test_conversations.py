"""Commands for conversations, driven through the application with the fake engine."""

import threading
from dataclasses import replace

import pytest
from support.app_driver import answers, ask, notes, press, submit, texts, toasts
from support.keeping import save_changes
from support.patience import PATIENCE_S

from kvchat.conversations.conversation import Conversation, Message
from kvchat.conversations.store import ConversationStore, StoreError
from kvchat.tui.widgets.messages import Question
from kvchat.tui.widgets.welcome import Welcome


@pytest.fixture
def config(config, tmp_path):
    return replace(config, database=tmp_path / "data" / "chats.db")


def questions(app):
    return texts(app.chat.query(Question))


async def test_a_damaged_conversation_is_reported(running, config):
    store = ConversationStore(config.database)
    damaged = Conversation(title="one")
    damaged.add(Message(parent=None, role="user", text="one"))
    save_changes(store, damaged)
    store._db.execute("UPDATE conversation SET params = '{'")
    store.close()
    async with running(replace(config, resume=True)) as (app, _pilot, until):
        await until(lambda: "malformed" in toasts(app))
        await ask(app, "hello")


async def test_a_conversation_survives_a_restart(running, config):
    async with running(config) as (app, _pilot, until):
        await ask(app, "hello there")
        turns = app.controller.state.conversation.turns
    async with running(config) as (app, _pilot, until):
        await until(lambda: app.chat.query(Welcome))
        await until(lambda: "continues “hello there”" in str(app.chat.query_one(Welcome).content))
        press(app, "ctrl+r")
        await until(lambda: questions(app) == ["hello there"] and answers(app))
        assert app.controller.state.conversation.turns == turns
        assert answers(app)[0].receipt.startswith("58 tok")
        await until(lambda: [answer.collapsed for answer in answers(app)] == [False])
    async with running(replace(config, resume=True)) as (app, _pilot, until):
        await until(lambda: questions(app) == ["hello there"])
        await ask(app, "and more")
        assert len(app.controller.state.conversation.turns) == 4


@pytest.mark.parametrize("moment", ["during the answer", "after the answer ended", "after the question was sent"])
async def test_quitting_waits_for_a_busy_disk(running, config, moment):
    free = threading.Event()
    async with running(config) as (app, _pilot, until):
        controller = app.controller
        if "question" not in moment:
            submit(app, "slow")
            await until(lambda: answers(app) and answers(app)[-1].text)
        controller.archive._thread.submit(free.wait, PATIENCE_S)
        if "question" in moment:
            submit(app, "hello")
            await until(lambda: controller.state.conversation.turns)
        elif "ended" in moment:
            press(app, "ctrl+c")
            await until(lambda: controller.state.conversation.leaf.ending == "stopped")
        else:
            seen = controller.state.conversation.last_text()
            await until(lambda: controller.state.conversation.last_text() != seen)
        await until(lambda: controller.archive._thread._work_queue.qsize())  # a save waits for the thread
        app.exit()
        threading.Timer(0.3, free.set).start()
    store = ConversationStore(config.database)
    read = store.load(controller.state.conversation.id)
    assert [message.text for message in read.path] == [turn.content for turn in controller.state.conversation.turns]
    assert len(read.path) == 1 + ("question" not in moment)
    store.close()


async def test_quitting_with_unsaved_text_needs_two_presses(running, config, monkeypatch):
    def raise_disk_full(*_arguments):
        raise StoreError("The disk is full.")

    async with running(config) as (app, _pilot, until):
        monkeypatch.setattr(ConversationStore, "save", raise_disk_full)
        await ask(app, "hello")
        await until(lambda: "disk is full" in toasts(app))
        press(app, "ctrl+q")
        await until(lambda: "/export" in toasts(app))
        assert not app._exit
        press(app, "ctrl+q")
        await until(lambda: app._exit)


async def test_title_fork_delete_and_restore_commands_work(running, config):
    async with running(config) as (app, _pilot, until):
        submit(app, "/delete")
        await until(lambda: "nothing to delete" in toasts(app))
        await ask(app, "hello")
        submit(app, "/title A greeting")
        await until(lambda: "Title: A greeting" in notes(app))
        first = app.controller.state.conversation
        submit(app, "/fork")
        await until(lambda: app.controller.state.conversation is not first)
        assert app.controller.state.conversation.turns == first.turns
        await until(lambda: questions(app) == ["hello"])
        submit(app, "/delete")
        await until(lambda: app.chat.query(Welcome))
        await until(lambda: "“A greeting” was deleted" in toasts(app))
        submit(app, "/restore")
        await until(lambda: questions(app) == ["hello"])
        submit(app, "/restore")
        await until(lambda: "Nothing was deleted" in toasts(app))


async def test_export_and_import_commands_work(running, config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    async with running(config) as (app, _pilot, until):
        submit(app, f"/export {tmp_path}/empty.md")
        await until(lambda: "nothing to export" in toasts(app))
        await ask(app, "hello")
        submit(app, "/export")
        await until((tmp_path / "hello.md").exists)
        await until(lambda: str(tmp_path / "hello.md") in toasts(app))
        for name, given in (("a.md", "{}"), ("b c.json", '"{}"')):
            submit(app, f"/export {given.format(tmp_path / name)}")
            await until((tmp_path / name).exists)
        submit(app, f"/export {tmp_path}/a.md")
        await until(lambda: "exists" in toasts(app))
        submit(app, f"/export {tmp_path}/a.pdf")
        await until(lambda: ".pdf" in toasts(app))
        submit(app, f"/export {tmp_path}/a\0.md")
        await until(lambda: "a NUL in its name" in toasts(app))
        first = app.controller.state.conversation
        submit(app, f"/import '{tmp_path}/b c.json'")
        await until(lambda: app.controller.state.conversation.id != first.id)
        assert app.controller.state.conversation.turns == first.turns
        submit(app, f"/import {tmp_path}/a.md")
        await until(lambda: "not a kvchat conversation" in toasts(app))
