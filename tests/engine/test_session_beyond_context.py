"""A conversation in streaming mode goes on beyond the model's context; every other mode refuses it from there on."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from support.loads import entering

from kvchat.engine.session import Session
from kvchat.errors import DoesNotFitError
from kvchat.protocol.messages import Finished, Sampling, Turn

CONTEXT = 300
GREEDY = Sampling(temperature=0, max_new_tokens=12)
QUESTIONS = ("Tell me a story about a cat and a dog who lived by the sea and were friends.",) * 8


def test_a_chat_goes_on_beyond_the_context_and_other_modes_refuse_it(model):
    short = dataclasses.replace(model, context=CONTEXT)
    session, turns = Session(short, entering("streaming", {"budget": 64})), []
    while session.total <= CONTEXT + 100:
        turns.append(Turn("user", QUESTIONS[0]))
        *_, finished = session.answer(turns, GREEDY)
        assert isinstance(finished, Finished)
        assert finished.reason in ("eos", "length")
        turns.append(Turn("assistant", finished.text))
    assert finished.stats.active_tokens <= 64 + 64 + 1
    assert session.snapshot().reduced_tokens >= session.total - CONTEXT
    with pytest.raises(DoesNotFitError, match="context"):
        session.switch("full")
    with pytest.raises(DoesNotFitError, match="context"):
        list(Session(short).answer([*turns, Turn("user", QUESTIONS[0])], GREEDY))
    session.truncate(100)
    assert session.switch("full").mode == "full"


def test_a_first_prompt_beyond_the_context_is_read_in_chunks(model):
    short = dataclasses.replace(model, context=CONTEXT)
    session = Session(short, entering("streaming", {"budget": 64}))
    prompt = Turn("user", " ".join(QUESTIONS * 4))
    *_, finished = session.answer([prompt], GREEDY)
    assert finished.stats.prompt_tokens > CONTEXT
    assert session.snapshot().reduced_tokens >= session.total - CONTEXT


def test_over_8_bit_pages_nearly_the_same_is_said_beyond_the_context(model):
    short = dataclasses.replace(model, context=CONTEXT)
    sessions = [Session(short, entering("streaming", {"budget": 64}, host_dtype=kept)) for kept in ("model", "int8")]
    ids = torch.randint(300, 2000, (640,), generator=torch.Generator().manual_seed(0)).tolist()
    exact, quantized = ([session.prefill(ids)] for session in sessions)
    for token in ids[:60]:  # also over the next half of the context
        for session, logits in zip(sessions, (exact, quantized), strict=True):
            logits.append(session.step(token))
    for one, other in zip(exact, quantized, strict=True):
        one, other = one.log_softmax(0), other.log_softmax(0)
        assert (one.exp() * (one - other)).sum() < 0.02
    assert all(sessions[1]._kv.state.host.quantized[:-1])
