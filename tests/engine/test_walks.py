"""How many files a reader passes on the way of one token to its recalled pages, and of one switch to its copies."""

from __future__ import annotations

import sys
from pathlib import Path

import kvchat
from kvchat.engine.session import Session
from kvchat.protocol.messages import Sampling, Turn

PACKAGE = Path(kvchat.__file__).parent
MAX_TOKEN, MAX_SWITCH = 15, 10
LONG = (Turn("user", "One day a girl went to the park with her dog. " * 20),)


def files_of_the_callers() -> tuple[str, ...]:
    """The files of kvchat on the call stack, outermost first."""
    frame, found = sys._getframe(1), []
    while frame := frame.f_back:
        found.append(Path(frame.f_code.co_filename))
    inside = [file.relative_to(PACKAGE).as_posix() for file in reversed(found) if file.is_relative_to(PACKAGE)]
    return tuple(dict.fromkeys(inside))


def recorded(monkeypatch, owner, name):
    """The walks to each call of ``owner.name`` from now on."""
    walks, original = set(), getattr(owner, name)

    def call(*args, **kwargs):
        walks.add(files_of_the_callers())
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, call)
    return walks


def test_a_token_passes_few_files_down_to_the_recalled_pages(small_model, monkeypatch):
    session = Session(small_model, "speculative", {"budget": 64, "sink": 0, "window": 32})
    answer = session.answer(LONG, Sampling(temperature=0, max_new_tokens=6))
    walks = recorded(monkeypatch, session._kv.state.transfer, "load_pages")
    list(answer)
    assert any(walk[-1] == "kv/modes/speculative.py" and "engine/generate/runner.py" in walk for walk in walks)
    for walk in walks:
        # Session.answer hands the events of the others on; behind load_pages lies the copy itself.
        assert len({"engine/session.py", *walk, "kv/transfer.py", "kv/ops"}) <= MAX_TOKEN, walk


def test_a_switch_passes_few_files_down_to_the_copies(small_model, monkeypatch):
    session = Session(small_model)
    list(session.answer(LONG, Sampling(temperature=0, max_new_tokens=2)))
    walks = recorded(monkeypatch, session._kv.state.transfer, "load_table")
    session.switch("streaming", budget=64)
    assert walks
    for walk in walks:
        assert len({*walk, "kv/transfer.py", "kv/ops"}) <= MAX_SWITCH, walk
