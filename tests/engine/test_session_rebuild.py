"""What a switch costs before it happens, and how what was computed with less context becomes exact again."""

from __future__ import annotations

import pytest
import torch
from support.loads import entering

from kvchat.config.modes import mode_names
from kvchat.engine.session import Session
from kvchat.protocol.messages import Load, Prefilled, Rebuilt, Sampling, Turn

STORY = (Turn("user", "The sea was calm and the whale went on. " * 30 + "Tell me a short story."),)
LONG = Sampling(temperature=0, max_new_tokens=160)
EAGER = {"budget": 64, "R": 1, "sigma": 0, "delta": 0}
NEXT = 300


@pytest.fixture
def reduced(model) -> Session:
    """A session whose later tokens were decoded with a budget of 64, back in full."""
    session = Session(model, entering("streaming", EAGER))
    list(session.answer(STORY, LONG))
    session.switch("full")
    assert session.snapshot().reduced_tokens > 0
    return session


def logits_after(session: Session, token: int = NEXT) -> torch.Tensor:
    logits = session.step(token)
    session.truncate(session.total - 1)
    return logits


def test_a_rebuilt_session_is_a_fresh_full_one(model, reduced):
    fresh = Session(model)
    fresh.prefill(list(reduced._loop.stored.ids))
    exact = logits_after(fresh)
    assert (logits_after(reduced) - exact).abs().max() > 1e-2
    total = reduced.total
    *progress, last = reduced.rebuild()
    assert all(isinstance(event, Prefilled) for event in progress)
    assert isinstance(last, Rebuilt)
    assert (reduced.total, reduced.snapshot().reduced_tokens, last.reduced_tokens) == (total, 0, 0)
    assert 0 < last.tokens < total, "tokens before the first reduced one are not computed again"
    assert (logits_after(reduced) - exact).abs().max() < 1e-3


def test_a_rebuilt_conversation_is_still_reused(reduced):
    text = reduced.text(0, reduced.total)
    stored = reduced.total
    list(reduced.rebuild())
    assert reduced.text(0, reduced.total) == text
    answer = text.rsplit("<|assistant|>", 1)[1]
    events = list(reduced.answer((*STORY, Turn("assistant", answer), Turn("user", "Thank you.")), LONG))
    assert events[0].reused_tokens >= stored


def test_a_stopped_rebuild_keeps_what_was_read(reduced):
    reduced._runner.chunk = 4
    events = reduced.rebuild()
    next(events)
    reduced.cancel()
    last = list(events)[-1]
    assert isinstance(last, Rebuilt)
    assert last.tokens == 4
    logits_after(reduced)


def test_nothing_to_rebuild_is_no_work(model):
    session = Session(model)
    session.prefill([1, 2, 3])
    assert [event.tokens for event in session.rebuild()] == [0]
    assert session.total == 3


@pytest.mark.parametrize("mode", [mode for mode in mode_names() if mode != "full"])
@pytest.mark.parametrize("there", [True, False], ids=["entering", "leaving"])
def test_a_switch_costs_what_it_was_said_to_cost(model, mode, there):
    session = Session(model, entering("full" if there else mode, mode_params={m: {"budget": 192} for m in BUDGETED}))
    session.prefill([10 + i % 500 for i in range(1000)])
    to = mode if there else "full"
    price = next(price for price in session.prices() if price.mode == to)
    assert not price.refusal
    switched = session.switch(to)
    assert 0.5 * price.moved_bytes <= switched.moved_bytes <= price.moved_bytes
    assert session.snapshot().kv_device_bytes <= price.device_bytes * 1.01


def test_a_price_in_seconds_is_that_of_the_measured_link(model):
    """What --save-profile kept was read by nobody (audit, 12)."""
    session = Session(model, Load(link_bytes_per_s=2e6))
    session.prefill([10 + i % 500 for i in range(600)])
    prices = [price for price in session.prices() if price.moved_bytes]
    assert prices
    assert all(price.seconds == price.moved_bytes / 2e6 for price in prices)


BUDGETED = ("streaming", "speculative", "sync")


def test_a_mode_that_would_be_refused_says_so_in_its_price(model):
    session = Session(model, Load(given={"speculative": {"window": 24}}))
    prices = {price.mode: price for price in session.prices()}
    assert not prices["streaming"].refusal
    assert "window" in prices["speculative"].refusal
    assert prices["speculative"].moved_bytes == 0
