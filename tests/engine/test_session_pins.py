"""Pinned messages: read in every mode, whatever happens to the conversation; too many are refused."""

import copy
from dataclasses import replace

import pytest
import torch
from support.loads import load_in

from kvchat.engine.session import Session
from kvchat.errors import TooMuchPinnedError
from kvchat.protocol.messages import Keeping, Sampling, Turn

GREEDY = Sampling(temperature=0, max_new_tokens=6)
LINE = "The river runs by the old mill and nobody knows where the boats have gone. "
FILLER = LINE * 12
TURNS = (
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


def run_answer(session: Session, turns, conversation=""):
    return list(session.answer(turns, GREEDY, conversation=conversation))[-1]


def assert_read(session: Session, text: str = "Biscuit") -> None:
    pins = session._kv.state.pins
    assert text in "".join(session.text(at, at + 1) for at in pins)
    for layer in range(session.model.layers):
        assert bool(session.attended(layer)[:, torch.tensor(pins)].all()), layer


def test_pinned_messages_are_read_in_every_mode(bundled, tmp_path):
    keeping = Keeping(saved_bytes=2**30, folder=str(tmp_path))
    session = Session(bundled, load_in("streaming", MODES["streaming"], keeping=keeping))
    run_answer(session, TURNS, "one")
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
    run_answer(session, TURNS, "one")  # answered again
    assert session._kv.state.pins == pins
    session.close()
    again = Session(bundled, load_in("streaming", MODES["streaming"], keeping=keeping))
    list(again.resume("one", TURNS))
    assert again._kv.state.pins == pins
    again.step(5)
    assert_read(again)
    list(again.resume("one", tuple(replace(turn, pinned=False) for turn in TURNS)))
    assert again._kv.state.pins == ()
    again.step(5)
    assert not bool(again.attended(0)[:, torch.tensor(pins[4:])].any())
    again.close()


def test_pinned_system_prompt_is_read_after_resuming(bundled, tmp_path):
    keeping = Keeping(parked_bytes=2**30, saved_bytes=2**30, folder=str(tmp_path))
    turns = (Turn("system", "You are a sailor. " * 12), *(replace(turn, pinned=False) for turn in TURNS))
    params = {"budget": 64, "pin_system": True}
    session = Session(bundled, load_in("streaming", params, keeping=keeping))
    run_answer(session, turns, "one")
    pinned = session._kv.mode.pinned
    assert pinned > 60
    run_answer(session, (Turn("system", "Be brief."), Turn("user", "Hello")), "two")
    assert session._kv.mode.pinned < pinned
    again = Session(bundled, load_in("streaming", params, keeping=keeping))
    for each in (session, again):
        list(each.resume("one", turns))
        assert each._kv.mode.pinned == pinned
        assert "P" in each.snapshot().ribbon
        each.step(5)
        assert bool(each.attended(0)[:, :pinned].all())
        each.close()


def test_short_pinned_system_prompt_is_marked_in_the_ribbon(model):
    session = Session(model, load_in("streaming", {"budget": 64, "pin_system": True}))
    run_answer(session, (Turn("system", "Be brief."), Turn("user", "Hello")))
    snapshot = session.snapshot()
    assert 0 < session._kv.mode.pinned < snapshot.cell_tokens // 2
    assert snapshot.ribbon.startswith("P")
    assert "P" not in snapshot.ribbon[1:]


@pytest.mark.parametrize(
    ("system", "pinned", "numbers"),
    [(28, 0, "the system prompt 4.."), (13, 13, "the system prompt 2.. and the pinned messages 2..")],
)
def test_system_prompt_and_pinned_messages_share_one_limit(model, system, pinned, numbers):
    session = Session(replace(model, context=500), load_in("streaming", {"budget": 64, "pin_system": True}))
    turns = (Turn("system", LINE * system), Turn("user", f"Hello. {LINE * pinned}", pinned=bool(pinned)))
    with pytest.raises(TooMuchPinnedError, match=rf"{numbers}. Of the 500 .* 250"):
        run_answer(session, turns)
    assert session.total == 0
    session.switch(pin_system=False)
    run_answer(session, turns)
    total = session.total
    with pytest.raises(TooMuchPinnedError, match=numbers):
        session.switch(pin_system=True)
    assert session.total == total
    assert not session._kv.mode.pinned
    run_answer(session, (Turn("user", f"Hello. {LINE * 13}", pinned=True),))


@pytest.mark.parametrize(
    ("budget", "pinned", "effective"), [(256, 13, range(200, 240)), (64, 13, [64]), (480, 0, [500 - 65])]
)
def test_streaming_never_reads_more_than_the_context(model, budget, pinned, effective):
    session = Session(replace(model, context=500), load_in("streaming", {"budget": budget}))
    first = Turn("user", f"Hello. {LINE * pinned}", pinned=bool(pinned))
    run_answer(session, (first, Turn("assistant", "Yes."), Turn("user", LINE * (23 - pinned))))
    assert session.snapshot().params["budget"] in effective
    most = 0
    for token in range(3, 153):
        session.step(token)
        most = max(most, int(session.attended(0)[0].sum()))
    assert session.total > 500
    assert most <= 500
    assert most > 400 or budget == 64


def test_prompt_beyond_the_context_reads_pinned_messages(model):
    small, read = replace(model, context=500), []
    story = tuple(turn for i in range(20) for turn in (Turn("user", f"{LINE * 2}{i}"), Turn("assistant", f"ok {i}")))
    for is_pinned in (True, False):
        session = Session(small, load_in("streaming", {"budget": 96}))
        first = (Turn("user", f"My cat is called Biscuit. {LINE}", pinned=is_pinned), Turn("assistant", "I see."))
        run_answer(session, (*first, *story, Turn("user", "What is my cat called?")))
        keys, _ = session._kv.state.host.dense(model.layers - 1, session.total)
        read.append(keys[:, 500:800].clone())
        session.close()
    assert float((read[0] - read[1]).abs().amax()) > 0.01


def test_pinned_system_prompt_is_found_in_the_last_question(model):
    tokenizer = copy.deepcopy(model.tokenizer)
    tokenizer.chat_template = (
        "{% for m in messages[1:] %}{{ '<|' + m.role + '|>' }}{% if loop.last %}{{ messages[0].content }}{% endif %}"
        "{{ m.content + '<|end|>' }}{% endfor %}<|assistant|>"
    )
    session = Session(replace(model, tokenizer=tokenizer), load_in("streaming", {"budget": 64, "pin_system": True}))
    plain = tuple(replace(turn, pinned=False) for turn in TURNS)
    turns = (Turn("system", "You are a sailor. " * 12), *plain[:-1], Turn("user", FILLER))
    run_answer(session, turns)
    assert_read(session, "You are a sailor. You are a sailor.")
    assert min(session._kv.state.pins) > 64
    assert session.snapshot().params["pin_system"]
    session.switch("streaming", pin_system=False)
    run_answer(session, turns)
    assert session._kv.state.pins == ()
