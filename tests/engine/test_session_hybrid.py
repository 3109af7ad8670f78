"""Conversations with a hybrid model: what is reused, asked again, stopped or withdrawn, against a fresh session."""

from __future__ import annotations

import pytest
import torch
from support import tiny_multimodal
from support.loads import entering

from kvchat.engine import recovery
from kvchat.engine.session import Session
from kvchat.models.load import load_model
from kvchat.protocol.messages import Finished, Keeping, Load, Recovered, Resumed, Sampling, Started, Turn

GREEDY = Sampling(temperature=0, max_new_tokens=24)
HELLO = (Turn("user", "Hello! My name is Maria and my cat is called Biscuit."),)
QUESTION = Turn("user", "What is my cat called?")


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3_5")
    tiny_multimodal.save(tiny_multimodal.fresh("qwen3_5"), folder)
    return load_model(Load(str(folder), "cpu", "float32"), lambda stage: None)


def answered(session: Session, turns, sampling=GREEDY, between=None) -> tuple[list[int], Started, list]:
    events = list(session.answer(turns, sampling, between))
    assert isinstance(events[-1], Finished)
    return session.token_ids, events[0], events


def text_of(events) -> str:
    return events[-1].text


def fresh_tokens(session: Session, started: Started) -> list[int]:
    """The tokens that a new session draws after the same ids; a text read anew may have others."""
    fresh, tokens = Session(session.model), []
    logits = fresh.prefill(session._loop.stored.ids[: started.prompt_tokens])
    for _ in session.token_ids:
        tokens.append(int(logits.argmax()))
        logits = fresh.step(tokens[-1])
    return tokens


@pytest.mark.parametrize("mode", ["full", "streaming", "freeze", "sync", "speculative"])
def test_a_second_turn_and_a_regenerated_one(hybrid, mode):
    params = {"freeze": {"recovery": False}, "sync": {"mem": 0.9}}.get(mode, {})
    session = Session(hybrid, entering(mode, params))
    _, _, events = answered(session, HELLO)
    turns = (*HELLO, Turn("assistant", text_of(events)), QUESTION)
    second, started, _ = answered(session, turns)
    assert started.reused_tokens > 30
    assert second == fresh_tokens(session, started)
    again, started, _ = answered(session, turns)
    assert started.reused_tokens == started.prompt_tokens - 1
    assert again == second


def test_an_edited_question_after_a_stop(hybrid):
    session = Session(hybrid)
    _, _, events = answered(session, HELLO)
    turns = (*HELLO, Turn("assistant", text_of(events)))
    answered(session, (*turns, QUESTION), between=lambda done: session.cancel() if done == 5 else None)
    tokens, started, _ = answered(session, (*turns, Turn("user", "What is my name?")))
    assert started.reused_tokens > 30
    assert tokens == fresh_tokens(session, started)


def test_withdrawn_tokens_are_forgotten_by_the_state(hybrid, monkeypatch):
    """Recovery walks back in the middle of an answer; what is stored then is what one prefill gives."""
    session, plain = Session(hybrid, entering("freeze")), Session(hybrid)
    alarms = iter([*[None] * 12, *[recovery.Trigger("entropy", 9.0)] * 200])
    monkeypatch.setattr(recovery.Signals, "add", lambda self, *args: next(alarms))
    sampling = Sampling(temperature=0.8, max_new_tokens=150, seed=1)
    _, _, events = answered(session, HELLO, sampling)
    assert any(isinstance(event, Recovered) and event.level == "RR" for event in events)
    expected = plain.prefill(session._loop.stored.ids)
    session.switch("full")
    session.truncate(session.total - 1)
    logits = session.step(plain._runner.recurrent._ids[-1])
    assert (logits - expected).abs().max() < 1e-4 * expected.abs().max()


def test_a_rebuilt_conversation_is_a_fresh_one(hybrid):
    """The state was computed with less, too."""
    session, fresh = Session(hybrid, entering("streaming", {"budget": 64, "R": 1, "sigma": 0})), Session(hybrid)
    answered(session, HELLO, Sampling(temperature=0, max_new_tokens=60))
    session.switch("full")
    reduced = session.step(5)
    fresh.prefill(session._loop.stored.ids[: session.total - 1])
    expected = fresh.step(5)
    assert (reduced - expected).abs().max() > 1e-3 * expected.abs().max()
    session.truncate(session.total - 1)
    list(session.rebuild())
    assert session.snapshot().reduced_tokens == 0
    torch.testing.assert_close(session.step(5), expected, rtol=1e-4, atol=1e-4)


def test_the_panels_count_the_states_bytes(hybrid):
    session = Session(hybrid)
    answered(session, HELLO)
    state, snapshot = session._runner.recurrent, session.snapshot()
    assert snapshot.kv_device_bytes == session._kv.device_bytes + state.nbytes
    assert snapshot.kv_host_bytes == session._kv.state.host.nbytes + state.snapshot_bytes
    assert "KiB" in snapshot.extras["recurrent state"]


def test_a_talk_without_a_name_goes_on_from_its_state(hybrid):
    session = Session(hybrid, Load(keeping=Keeping(2**30)))
    first = list(session.answer(HELLO, GREEDY, None, None))
    turns = (*HELLO, Turn("assistant", text_of(first)), QUESTION)
    list(session.answer((Turn("user", "Give a title to a talk about cats. " * 9),), GREEDY, None, None))
    events = list(session.answer(turns, GREEDY, None, None))
    started = next(event for event in events if isinstance(event, Started))
    assert any(isinstance(event, Resumed) for event in events)
    assert session.token_ids == fresh_tokens(session, started)
    session.close()
