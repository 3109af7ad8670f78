"""Input of the engine: any bytes are refused with a reason or end it with one line; it never hangs."""

import io
import subprocess
import sys
import time
import types
from collections.abc import Callable
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.environment import environ
from support.fake_session import FakeLoader, FakeSession
from support.frames import bodies, framed, fuzzed
from support.patience import PATIENCE_S
from support.streams import read_event
from support.worker_child import Child

from kvchat.engine import session, worker
from kvchat.engine.worker import Loader, Progress
from kvchat.errors import ModelError
from kvchat.models.description import resolve_device, resolve_dtype
from kvchat.protocol import wire
from kvchat.protocol.figures import MemoryPlan, Snapshot
from kvchat.protocol.messages import (
    Chat,
    Command,
    Event,
    Failed,
    Finished,
    Load,
    Peek,
    Plan,
    Prefilled,
    Sampling,
    Stop,
    Switch,
    Turn,
)

COMMANDS = get_args(Command)
EVENTS = get_args(Event)


class FuzzedLoader(Loader):
    """Real sessions; plans for the nonsense names of models are refused without looking for them."""

    def fits_beside(self, load: Load, progress: Progress) -> bool:
        return True

    def plan(self, asked: Plan, in_use: Snapshot | None, progress: Progress) -> MemoryPlan:
        raise ModelError("There is no such model.")


class Engine(Child):
    """A worker in a thread; ``talk`` sends frames and returns the events until they are done."""

    asked = 0

    def __init__(self, loader: Loader, clock: Callable[[], float]) -> None:
        super().__init__(loader, clock)
        self.events = io.BufferedReader(self.events)  # a pipe gives a large event in parts

    def talk(self, *frames: bytes) -> list[Event]:
        self.asked += 1
        ping = f"ping {self.asked}"
        load = () if self.server._session else (wire.encode(Load()),)
        self.commands.write(b"".join((*load, *frames, framed(ping.encode()))))
        self.commands.flush()
        events: list[Event] = []
        while not (isinstance(event := read_event(self.events), Failed) and ping in event.detail):
            assert event is not None
            events.append(event)
        return events


@pytest.fixture(scope="module")
def engine(model):
    """With real sessions; only reading the model's files is replaced."""

    def load_model(load, _progress):
        resolve_device(load.device)
        resolve_dtype(load.dtype, model.model.config, model.device)
        if load.model != "bundled":
            raise ModelError("There is no such model.")
        return model

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "load_model", load_model)
        engine = Engine(FuzzedLoader(), time.monotonic)
        yield engine
        engine.close()


@fuzzed
@given(body=bodies(COMMANDS))
def test_any_frame_is_executed_or_refused_with_a_reason(engine, count, body):
    count["frames"] += 1
    events = engine.talk(framed(body), wire.encode(Stop()))
    unexplained = [e for e in events if isinstance(e, Failed) and e.title == "The engine failed."]
    assert not unexplained
    refused = worker._command(body)
    if isinstance(refused, worker.Refused):
        assert refused.reason in [event.detail for event in events if isinstance(event, Failed)]


@fuzzed
@given(stream=st.binary(max_size=64) | st.lists(bodies(COMMANDS), max_size=3).map(lambda found: framed(*found)[:-1]))
def test_any_bytes_end_the_engine_with_at_most_one_line(count, stream):
    count["streams of bytes"] += 1
    server, log = worker.Server(io.BytesIO(), FakeLoader(FakeSession())), io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stderr", log)
        server.read(io.BytesIO(stream))
        server.run()
    assert server._inbox.closed
    assert log.getvalue().count("\n") <= 1


def test_stop_right_after_a_question_prevents_its_prefill(engine):
    ask = wire.encode(Chat((Turn("user", "one two three " * 400),)))
    first = [type(event) for event in engine.talk(ask, wire.encode(Stop()))]
    assert Prefilled not in first
    assert Finished in first
    second = engine.talk(wire.encode(Stop()), wire.encode(Chat((Turn("user", "Hi"),), Sampling(max_new_tokens=2))))
    assert [event.reason for event in second if isinstance(event, Finished)] == ["length"]


@pytest.mark.parametrize("event", [name.__name__ for name in EVENTS])
def test_events_are_rejected_as_commands(event):
    with pytest.raises(ValueError, match="protocol"):
        wire.decode_command(b'{"type": "%s"}' % event.encode())


def test_unexpected_failure_between_tokens_does_not_end_the_answer(capsys):
    """A failing switch is refused with a message; another failure is reported after the answer."""
    output = io.BytesIO()

    def send_at_two(fake, n):
        if n == 2:
            for command in (Switch("streaming"), Peek(1, 2)):
                server._inbox.put(command)

    fake = FakeSession(on_token=send_at_two)
    server = worker.Server(output, FakeLoader(fake))
    server._do(Load(mode="full"))
    fake.switch = fake.text = types.MethodType(lambda *_args, **_kwargs: 1 / 0, fake)  # type: ignore[method-assign]
    server._do(Chat((Turn("user", "hello"),)))
    output.seek(0)
    kinds = [type(event).__name__ for event in iter(lambda: read_event(output), None)]
    assert [kind for kind in kinds if kind in ("SwitchRefused", "Finished", "Failed")] == [
        "SwitchRefused",
        "Finished",
        "Failed",
    ]
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_grace_period_is_longer_once_a_model_was_loaded():
    server = worker.Server(io.BytesIO(), FakeLoader(FakeSession()))
    before = server.grace_s
    server._do(Load(mode="full"))
    assert before < server.grace_s
    server._close_session()
    assert before < server.grace_s


def test_oversized_header_ends_the_process_at_once():
    command = [sys.executable, "-m", "kvchat.engine"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, env=environ()) as process:
        assert process.stdin
        assert process.stderr
        process.stdin.write(b"\xff\xff\xff\xff")
        process.stdin.flush()
        assert process.wait(PATIENCE_S) == 0
        assert process.stderr.read() == b"kvchat: " + str(_refusal(b"\xff" * 4)).encode() + b"\n"


def _refusal(header: bytes) -> ValueError:
    with pytest.raises(ValueError, match="does not speak") as caught:
        wire.parse_length(header)
    return caught.value
