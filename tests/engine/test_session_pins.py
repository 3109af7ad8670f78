"""Pinned messages of a conversation: read in every mode, through what happens to it; too many are refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.loads import entering

from kvchat.engine.session import Session
from kvchat.errors import UsageError
from kvchat.protocol.messages import Keeping, Sampling, Turn

GREEDY = Sampling(temperature=0, max_new_tokens=6)
FILLER = "The river runs by the old mill and nobody knows where the boats have gone. " * 12
TOLD = (
    Turn("user", "Remember this: my cat is called Biscuit.", pinned=True),
    Turn("assistant", "I see."),
    Turn("user", FILLER),
    Turn("assistant", "I see."),
    Turn("user", "And another story, please."),
)
MODES = {
    "streaming": {"budget": 64},
    "speculative": {"budget": 64, "sink": 0, "window": 32},
    "freeze": {"budget": 80, "K": 32},
    "sync": {"budget": 72, "m": 3},
    "full": {},
}


def finished(session: Session, turns, conversation=""):
    return list(session.answer(turns, GREEDY, conversation=conversation))[-1]


def assert_read(session: Session, told: str = "Biscuit") -> None:
    pins = session._kv.state.pins
    assert told in "".join(session.text(at, at + 1) for at in pins)
    for layer in range(session.model.layers):
        assert bool(session.attended(layer)[:, torch.tensor(pins)].all()), layer


def test_a_pinned_message_is_read_in_every_mode_whatever_happens(model, tmp_path):
    keeping = Keeping(saved_bytes=2**30, folder=str(tmp_path))
    session = Session(model, entering("streaming", MODES["streaming"], keeping=keeping))
    finished(session, TOLD, "one")
    assert_read(session)
    assert "P" in session.snapshot().ribbon
    assert session.snapshot().extras["pinned"].startswith(f"{len(session._kv.state.pins)} tok")
    for mode, params in MODES.items():
        session.switch(mode, **params)
        for _ in range(3):
            session.step(session.token_ids[0])
        assert_read(session)
    session.switch("streaming", **MODES["streaming"])
    list(session.rebuild())
    session.truncate(session.total - 5)
    session.step(5)
    assert_read(session)
    pins = session._kv.state.pins
    finished(session, TOLD, "one")  # answered again
    assert session._kv.state.pins == pins
    session.close()
    again = Session(model, entering("streaming", MODES["streaming"], keeping=keeping))
    list(again.resume("one", TOLD))
    assert again._kv.state.pins == pins
    again.step(5)
    assert_read(again)
    list(again.resume("one", tuple(replace(turn, pinned=False) for turn in TOLD)))
    assert again._kv.state.pins == ()
    again.step(5)
    assert not bool(again.attended(0)[:, torch.tensor(pins[4:])].any())
    again.close()


def test_a_pinned_system_prompt_is_read_as_soon_as_its_conversation_is_taken_up(model, tmp_path):
    keeping = Keeping(parked_bytes=2**30, saved_bytes=2**30, folder=str(tmp_path))
    told = (Turn("system", "You are a sailor. " * 12), *(replace(turn, pinned=False) for turn in TOLD))
    params = {"budget": 64, "pin_system": True}
    session = Session(model, entering("streaming", params, keeping=keeping))
    finished(session, told, "one")
    pinned = session._kv.mode.pinned
    assert pinned > 60
    finished(session, (Turn("system", "Be brief."), Turn("user", "Hello")), "two")
    assert session._kv.mode.pinned < pinned
    list(session.resume("one", told))
    assert_system_is_read(session, pinned)
    session.close()
    again = Session(model, entering("streaming", params, keeping=keeping))
    list(again.resume("one", told))
    assert_system_is_read(again, pinned)
    again.close()


def assert_system_is_read(session: Session, pinned: int) -> None:
    assert session._kv.mode.pinned == pinned
    assert "P" in session.snapshot().ribbon
    session.step(5)
    assert bool(session.attended(0)[:, :pinned].all())


def test_more_than_half_of_the_context_cannot_be_pinned(model):
    session = Session(replace(model, context=500))
    turns = (Turn("user", FILLER, pinned=True), *TOLD[1:2], *TOLD[4:])
    with pytest.raises(UsageError, match=r"at most 250 may be pinned"):
        finished(session, (Turn("user", FILLER * 2, pinned=True), *turns[1:]))
    session.close()
