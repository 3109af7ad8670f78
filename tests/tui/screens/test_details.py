"""The details screen and column: details are requested only while shown, and the focused part is explained."""

from dataclasses import replace

from support.app_driver import ask, drawn, press
from support.fake_view import FakeClient, FakeView
from textual.widgets import Static

from kvchat.protocol.messages import Details, Loaded, Watch
from kvchat.protocol.recording import Recorder, read
from kvchat.tui.controller import ChatController
from kvchat.tui.screens.details import DetailsScreen
from kvchat.tui.widgets.charts import GpuHistoryPlot, HeadMap, RecallHistogram
from kvchat.tui.widgets.panels import EventLog


def record_watches(app, monkeypatch):
    """Return a function that lists the ``Watch`` commands sent since, by their ``details``."""
    sent, send = [], app.client.send
    monkeypatch.setattr(app.client, "send", lambda command: (sent.append(command), send(command)))
    return lambda: [command.details for command in sent if isinstance(command, Watch)]


async def test_the_details_screen_explains_what_is_under_the_cursor(running, monkeypatch):
    monkeypatch.setenv("FAKE_GPU", "1")
    async with running(size=(80, 24)) as (app, _pilot, until):
        watches = record_watches(app, monkeypatch)
        await ask(app, "hello", mode="speculative")
        press(app, "shift+f7")
        await until(lambda: isinstance(app.screen, DetailsScreen) and app.screen.query("#explanation"))
        explanation = app.screen.query_one("#explanation", Static)
        await until(lambda: "Layer 0, KV head 0 read 59 of 59 (100 %)" in str(explanation.content))
        press(app, "right", "down")
        await until(lambda: "Layer 1, KV head 1 read 29 of 59 (49 %)" in str(explanation.content))
        assert "160" in app.screen.query_one(RecallHistogram).render().plain
        assert "6.0 GiB / 140 GiB" in app.screen.query_one(GpuHistoryPlot).render().plain
        press(app, "tab", "tab")
        await until(lambda: "hidden behind the model's work" in str(explanation.content))
        press(app, "escape")
        await until(lambda: watches() == [True, False])


async def test_events_are_listed_if_no_column_shows_them(running):
    async with running(size=(80, 24)) as (app, pilot, until):
        await ask(app, "hello")
        press(app, "shift+f7")
        await until(lambda: isinstance(app.screen, DetailsScreen) and app.screen.query(EventLog))
        log = app.screen.query_one(EventLog)
        await until(lambda: str(log.content).partition("\n")[0].endswith("answered: 58 tok"))
        press(app, "shift+tab")
        await until(lambda: log.has_focus and "answered: 58 tok" in drawn(app))
        explanation = app.screen.query_one("#explanation", Static)
        await until(lambda: "newest first" in str(explanation.content))
        app.chat.log_event("a later one")
        await until(lambda: "a later one" in str(log.content))
        await app.screen.query_one("VerticalScroll").remove_children()  # as before its parts are composed
        app.chat.log_event("an event")
        assert app.screen.query("#explanation")
        press(app, "escape")
        await until(lambda: app.screen is app.chat)
        await pilot.resize_terminal(200, 60)
        app.chat.add_class("figures-all")
        await until(lambda: app.chat.query_one("DetailColumn").display)
        press(app, "shift+f7")
        await until(lambda: isinstance(app.screen, DetailsScreen) and app.screen.query("#explanation"))
        assert not app.screen.query(EventLog)


async def test_the_column_requests_details_only_while_shown(running, monkeypatch):
    async with running(size=(120, 40)) as (app, pilot, until):
        watches = record_watches(app, monkeypatch)
        await ask(app, "hello")
        assert watches() == []
        await pilot.resize_terminal(200, 60)
        app.chat.add_class("figures-all")
        column = app.chat.query_one("DetailColumn")
        await until(lambda: "59 of 59 tokens a head" in column.query_one(HeadMap).render().plain)
        assert column.query_one(GpuHistoryPlot).render().plain.startswith("no GPU")
        assert column.query_one(RecallHistogram).render().plain.startswith("nothing was fetched")
        await until(lambda: watches() == [True])
        press(app, "f7")
        await until(lambda: watches() == [True, False])


# ---- Details are requested only while they are shown, also from a restarted engine


LOADED = Loaded("bundled", "llama", 43_000_000, "cpu", "float32", 16384, 8, 4, 32, 16384, "full", {})


async def test_details_are_requested_while_anything_shows_them(chat):
    watch, sent = chat.controller.details, chat.client.sent
    watch.end("column")
    await chat.load()
    assert Watch(False) not in sent
    assert Watch(True) not in sent
    watch.begin("column")
    watch.begin("screen")
    watch.end("screen")
    assert [command for command in sent if isinstance(command, Watch)] == [Watch(True), Watch(True)]
    await chat.load()  # possibly in a new process
    assert sent[-1] == Watch(True)
    watch.end("column")
    assert sent[-1] == Watch(False)


async def test_a_recording_requests_details_that_nothing_shows(config, tmp_path):
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


async def test_recorded_chats_contain_details(running, config, tmp_path):
    recorder = Recorder(tmp_path / "one.jsonl", "1")
    async with running(replace(config, recorder=recorder), size=(80, 24)) as (app, _pilot, _until):
        await ask(app, "hello")
    recorded = [entry.event for entry in read(tmp_path / "one.jsonl") if isinstance(entry.event, Details)]
    assert recorded[-1].read[0] == (59,) * 4


async def test_details_of_another_conversation_are_not_shown(chat):
    await chat.load()
    shown = Details(7, ((7,),), ((7,),))
    await chat.controller.handle(shown)
    assert chat.view.details == [Details(0)]
    chat.controller.state.is_stored = True
    await chat.controller.handle(shown)
    assert chat.controller.state.details == shown == chat.view.details[-1]
