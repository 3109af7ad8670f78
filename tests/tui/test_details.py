"""Details are asked for only while somebody shows them, also of an engine that was started anew."""

from __future__ import annotations

from dataclasses import replace

from support.app_driver import finished, typed
from support.fake_view import FakeClient, FakeView

from kvchat.protocol.messages import Details, Loaded, Watch
from kvchat.protocol.recording import Recorder, read
from kvchat.tui.controller import ChatController

LOADED = Loaded("bundled", "llama", 43_000_000, "cpu", "float32", 16384, 8, 4, 32, 16384, "full", {})


async def test_details_are_asked_for_while_somebody_shows_them(chat):
    watch, sent = chat.controller.details, chat.client.sent
    watch.end("column")
    await chat.load()
    assert Watch(False) not in sent
    assert Watch(True) not in sent
    watch.begin("column")
    watch.begin("screen")
    watch.end("screen")
    assert [command for command in sent if isinstance(command, Watch)] == [Watch(True), Watch(True)]
    await chat.load()  # perhaps in a new process
    assert sent[-1] == Watch(True)
    watch.end("column")
    assert sent[-1] == Watch(False)


async def test_a_recording_has_details_that_no_screen_shows(config, tmp_path):
    recorder = Recorder(tmp_path / "one.jsonl", "1")
    view, client = FakeView(), FakeClient()
    chat = ChatController(replace(config, recorder=recorder), client, view)
    await chat.handle(LOADED)
    assert client.sent[-1] == Watch(True)
    chat.details.begin("screen")
    chat.details.end("screen")
    assert Watch(False) not in client.sent
    await chat.archive.close()
    recorder.close()


async def test_details_are_in_the_file_of_a_recorded_chat(running, config, tmp_path):
    recorder = Recorder(tmp_path / "one.jsonl", "1")
    async with running(replace(config, recorder=recorder), size=(80, 24)) as (app, _pilot, until):
        typed(app, "hello")
        await until(lambda: finished(app))
    recorded = [entry.event for entry in read(tmp_path / "one.jsonl") if isinstance(entry.event, Details)]
    assert recorded[-1].read[0] == (59,) * 4


async def test_what_is_stored_of_another_conversation_is_not_shown(chat):
    await chat.load()
    shown = Details(7, ((7,),), ((7,),))
    await chat.controller.handle(shown)
    assert chat.view.details == [Details(0)]
    chat.controller.state.is_stored = True
    await chat.controller.handle(shown)
    assert chat.controller.state.details == shown == chat.view.details[-1]
