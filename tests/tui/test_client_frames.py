"""Any bytes from an engine become events, or end the engine with a reason."""

import asyncio
import struct
import sys
from contextlib import suppress
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.frames import bodies, framed, fuzzed
from support.patience import PATIENCE_S

from kvchat.protocol import wire
from kvchat.protocol.client import Crashed, EngineClient, Report
from kvchat.protocol.messages import Command, Event, Loading, Replayed

EVENTS = get_args(Event)


class Process:
    """An asyncio process of an engine that has written ``output`` and ends."""

    def __init__(self, output: bytes) -> None:
        self.stdout = asyncio.StreamReader()
        self.stdout.feed_data(output)
        self.stdout.feed_eof()
        self.killed = False

    def kill(self) -> None:
        self.killed = True

    async def wait(self) -> int:
        return 0


async def reports_of(output: bytes) -> tuple[list[Report], bool]:
    """The client's events from an engine's output, and whether it killed the engine."""
    client, process = EngineClient(("engine",), Path("/nowhere/log")), Process(output)
    client._process = process  # type: ignore[assignment]
    client.log_problem = "none is kept"
    async with asyncio.timeout(PATIENCE_S):
        await client._read(process)  # type: ignore[arg-type]
        return await client.receive(), process.killed


@fuzzed
@given(body=bodies(EVENTS) | bodies(get_args(Command)))
def test_a_frame_is_an_event_or_ends_the_engine(count, body):
    count["frames"] += 1
    reports, killed = asyncio.run(reports_of(framed(body)))
    assert isinstance(reports[-1], Crashed)
    try:
        wire.decode_event(body)
    except ValueError as error:
        expected: tuple[str, ...] = (str(error),)
    else:
        expected = ()
    assert (killed, len(reports), reports[-1].log) == (bool(expected), 1 if expected else 2, expected)


@fuzzed
@given(stream=st.binary(max_size=64) | st.lists(bodies(EVENTS), max_size=3).map(lambda found: framed(*found)[:-1]))
def test_any_byte_stream_terminates(count, stream):
    count["streams of bytes"] += 1
    reports, _ = asyncio.run(reports_of(stream))
    assert isinstance(reports[-1], Crashed)


@pytest.mark.slow("hundreds of events are drawn")
async def test_absurd_events_do_not_crash(running, count):
    """Events of the right types with absurd values neither crash the application nor stop it from listening."""
    found = []

    @fuzzed
    @given(body=bodies([kind for kind in EVENTS if kind is not Replayed]))  # only a replay sends that
    def collect(body):
        with suppress(ValueError):
            found.append(wire.decode_event(body))

    collect()
    async with running() as (app, _, until):
        for event in found:
            app.client._put(event)
            count["events"] += 1
            await until(lambda: not app.client._inbox)
            await asyncio.sleep(0.01)  # to draw it
            assert app.is_running, event
        # Repeatedly: replies to what an event requested may come after it.
        await until(lambda: app.client._put(Loading("the end")) or app.controller.state.stage == "the end")


async def test_an_endlessly_writing_engine_is_ended(tmp_path):
    babble = f"import sys\nwhile True: sys.stdout.buffer.write({framed(b'[]')!r} * 10_000)"
    client = EngineClient((sys.executable, "-c", babble), tmp_path / "log")
    await client.start()
    async with asyncio.timeout(PATIENCE_S):
        (crashed,) = await client.receive()
    assert isinstance(crashed, Crashed)
    await client.close()


async def test_an_oversized_header_is_rejected_at_once():
    reports, killed = await reports_of(struct.pack(">I", wire.MAX_MESSAGE_BYTES + 1))
    assert killed
    assert "protocol" in reports[-1].log[0]
