"""The replaying engine: events in their order and time, a pace that changes, refusals, and an end with its parent."""

from __future__ import annotations

import io
import os
import threading
import time

from support.streams import read_event

from kvchat.protocol import wire
from kvchat.protocol.figures import Planned, Stats
from kvchat.protocol.messages import (
    Asked,
    Chat,
    Compare,
    Details,
    Failed,
    Finished,
    Load,
    Pace,
    Plan,
    Replayed,
    Switch,
    Switched,
    SwitchRefused,
    Text,
    Turn,
    Variant,
    Watch,
)
from kvchat.protocol.recording import Entry
from kvchat.replay.engine import Player

CHAT = Chat((Turn("user", "hello"),))


def played(entries, commands=()) -> list:
    """What a player sends that got ``commands`` before it began."""
    events = io.BytesIO()
    player = Player(entries, events)
    player.read(io.BytesIO(b"".join(map(wire.encode, commands))))
    player._closed = False
    thread = threading.Thread(target=player.play)
    thread.start()
    while b"Replayed" not in events.getvalue():
        time.sleep(0.001)
    player.read(io.BytesIO())
    thread.join(60)
    assert not thread.is_alive()
    events.seek(0)
    bodies = iter(lambda: wire.read(events), None)
    return [wire.decode_event(body) for body in bodies]


def test_events_come_in_order_and_long_gaps_are_cut():
    entries = [Entry(0.0, Asked("hello")), Entry(0.01, Text("hi", 1)), Entry(5000.0, Finished("eos", "hi", Stats()))]
    began = time.monotonic()
    sent = played(entries, [Pace(64.0)])
    assert sent == [*(entry.event for entry in entries), Replayed(5000.0)]
    assert time.monotonic() - began < 60


def test_what_needs_a_model_is_refused():
    entries = [Entry(0.0, Switched("full", "sync", {}, 5, 0, 0.0))]
    refused = [Switch("full"), CHAT, Compare(CHAT.turns, (Variant("full"),)), Plan(Load())]
    sent = played(entries, refused)
    assert [type(event) for event in sent] == [SwitchRefused, Failed, Failed, Planned, Switched, Replayed]


def test_who_asks_for_details_gets_some_though_none_were_recorded():
    sent = played([Entry(0.0, Asked("hello"))], [Watch(True)])
    assert sent == [Details(0), Asked("hello"), Replayed(0.0)]


def test_a_paused_recording_waits():
    read_end, write_end = os.pipe()
    out, events = os.pipe()
    with (
        open(read_end, "rb") as commands,
        open(write_end, "wb") as stdin,
        open(out, "rb") as stdout,
        open(events, "wb") as sent,
    ):
        player = Player([Entry(0.0, Asked("hello")), Entry(0.5, Text("hi", 1))], sent)
        stdin.write(wire.encode(Pace(0.0)) + wire.encode(Switch("full")))
        stdin.flush()
        threading.Thread(target=player.read, args=(commands,), daemon=True).start()
        assert isinstance(read_event(stdout), SwitchRefused)
        thread = threading.Thread(target=player.play)
        thread.start()
        assert isinstance(read_event(stdout), Asked)
        stdin.write(wire.encode(CHAT) + wire.encode(CHAT))
        stdin.flush()
        assert isinstance(read_event(stdout), Failed), "the first question is the recording's own"
        stdin.write(wire.encode(Pace(64.0)))
        stdin.flush()
        assert isinstance(read_event(stdout), Text)
        assert isinstance(read_event(stdout), Replayed)
        stdin.close()
        thread.join(60)
        assert not thread.is_alive()
