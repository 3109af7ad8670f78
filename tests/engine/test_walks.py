"""How many files a reader follows: for a token, for a switch down to its copies, for a setting down to its mode."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass
from functools import cache
from pathlib import Path
from types import FrameType

import pytest
from pydantic import BaseModel
from support.loads import load_in

import kvchat
from kvchat.cli import chat, options, profile
from kvchat.engine import session as sessions
from kvchat.engine.session import Session
from kvchat.engine.worker import Loader
from kvchat.models.quantize import rows
from kvchat.protocol import wire
from kvchat.protocol.messages import Sampling, Text, Turn

PACKAGE = Path(kvchat.__file__).parent
MAX_TOKEN, MAX_SWITCH, MAX_SETTING = 25, 10, 13
MODES = {
    "full": {},
    "freeze": {},
    "streaming": {"budget": 128},
    "sync": {"budget": 128},
    "speculative": {"budget": 128},
}
SETTING = "0.8125"  # a tau that nothing else uses
PARK = "One day a girl went to the park with her dog. "
LONG = (Turn("user", PARK * 20),)
STORY = (*LONG, Turn("assistant", "Nice."), Turn("user", "Tell me a story about a dragon."))


@cache
def file_of(code_filename: str) -> str:
    """The path of a kvchat file in the package; "" for any other file."""
    file = Path(code_filename)
    return file.relative_to(PACKAGE).as_posix() if file.is_relative_to(PACKAGE) else ""


def files_on_stack(frame: FrameType | None) -> tuple[str, ...]:
    """The files of kvchat on a call stack, outermost first."""
    found = []
    while frame:
        found.append(file_of(frame.f_code.co_filename))
        frame = frame.f_back
    return tuple(dict.fromkeys(filter(None, reversed(found))))


@contextmanager
def files_entered(counts: Callable[[FrameType], bool] = lambda frame: True) -> Iterator[set[str]]:
    """The files of kvchat in which a function that ``counts`` is called or resumed inside the block."""
    found = set()

    def trace(frame, event, _argument):
        if event == "call" and (file := file_of(frame.f_code.co_filename)) and counts(frame):
            found.add(file)

    sys.setprofile(trace)
    try:
        yield found
    finally:
        sys.setprofile(None)


def record_walks(monkeypatch, owner, name):
    """The files on the way to each call of ``owner.name`` from now on."""
    walks, original = set(), getattr(owner, name)

    def call(*args, **kwargs):
        walks.add(files_on_stack(sys._getframe(1)))
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, call)
    return walks


@pytest.mark.parametrize("mode", MODES)
def test_token_enters_few_files(model, mode, monkeypatch):
    """An ordinary token enters the files that all of twelve enter; full pages and timed samples enter more."""
    monkeypatch.setattr(rows, "SAMPLE_S", float("inf"))  # tracing makes every token slow enough for one
    answer = Session(model, load_in(mode, MODES[mode])).answer(STORY, Sampling(temperature=1, seed=5))
    next(event for event in answer if isinstance(event, Text))
    tokens = []
    for _ in range(12):
        with files_entered() as files:
            assert isinstance(next(answer), Text)
        tokens.append(files)
    ordinary = set.intersection(*tokens)
    assert {f"kv/modes/{mode}.py", "kv/manager.py", "models/attention_hook.py"} <= ordinary
    assert len(ordinary) <= MAX_TOKEN, sorted(ordinary)
    assert len(set.union(*tokens) - ordinary) <= 4, sorted(set.union(*tokens) - ordinary)


def test_switch_passes_few_files_down_to_its_copies(model, monkeypatch):
    session = Session(model)
    list(session.answer(LONG, Sampling(temperature=0, max_new_tokens=2)))
    walks = record_walks(monkeypatch, session._kv.state.transfer, "load_table")
    session.switch("streaming", budget=64)
    assert walks
    for walk in walks:
        assert len({*walk, "kv/transfer.py", "kv/ops"}) <= MAX_SWITCH, walk


def holds(thing: object) -> bool:
    """True if the setting is in a value, or in the fields of plain data."""
    if isinstance(thing, str | bytes):
        return SETTING in str(thing)
    if isinstance(thing, Mapping):
        return any(map(holds, thing.values()))
    if isinstance(thing, Sequence):
        return any(map(holds, thing))
    if isinstance(thing, BaseModel) or (is_dataclass(thing) and not isinstance(thing, type)):
        return any(map(holds, vars(thing).values()))
    return thing == float(SETTING) if isinstance(thing, float) else False


def test_setting_passes_few_files_down_to_its_mode(model, monkeypatch):
    monkeypatch.setattr(sessions, "load_model", lambda *args, **kwargs: model)
    with files_entered(lambda frame: any(map(holds, frame.f_locals.values()))) as files:
        settings = profile.load_settings(options.flags({"mode": "speculative", "param": [f"tau={SETTING}"]})).settings
        load = wire.decode_command(wire.encode(chat.load_of(settings))[4:])
        session = Loader().open_session(load, lambda stage: None)
    assert session.info.mode == "speculative"
    assert {"config/sources.py", "engine/session.py", "kv/modes/base.py"} <= files
    assert len(files) <= MAX_SETTING, sorted(files)
