"""Badges of the engine: unpinned memory, steps without a graph, 8-bit pages; rebuilds, and the price of a switch."""

from functools import partial

import pytest
import torch
from support.integrity import stored_kv
from support.loads import load_in
from support.memory import Pins
from support.message import lacks

from kvchat.config.modes import mode_names
from kvchat.engine.session import Session
from kvchat.kv import state as state_module
from kvchat.kv.memory.eight_bit_pool import EightBitPool
from kvchat.kv.memory.host_pool import HostPool
from kvchat.kv.ops.choose import triton_refusal
from kvchat.kv.ops.torch_ops import TorchOps
from kvchat.protocol.messages import Load, Prefilled, Rebuilt, Sampling, Turn


def test_conversation_continues_when_memory_cannot_be_pinned(model, monkeypatch):
    unaffected, pins = Session(model), Pins()
    monkeypatch.setattr(state_module, "HostPool", partial(HostPool, registrar=pins))
    session = Session(model)
    assert session.snapshot().badges == ()
    pins.fails_at, pins.fails_for_good = pins.calls + 3, True  # in the third layer, when the pool grows
    ids = [(7 * i) % 4000 + 10 for i in range(700)]
    for each in (unaffected, session):
        each.prefill(ids[:600])
        each.switch("speculative", budget=192, sink=32, window=64)
    assert pins.held, "pinned memory stays pinned"
    assert not pins.given_back
    assert session.snapshot().badges == ("pageable host memory: no more memory may be pinned",)
    for token in ids[600:]:
        assert torch.equal(session.step(token), unaffected.step(token))
    assert unaffected.snapshot().badges == ()


def test_missing_graphs_and_kernels_have_a_badge(model):
    session = Session(model)
    assert session.snapshot().badges == ()
    session._runner.graphs.refusal = "RuntimeError: not permitted"
    assert session.snapshot().badges == ("no CUDA graph: RuntimeError: not permitted",)
    session._runner.graphs.refusal = ""
    state = session._kv.state
    refusal = triton_refusal(state.geometry, torch.device("cuda"))
    state.ops = TorchOps(state.geometry, state.host, state.device, refusal)
    assert session.snapshot().badges == ("no Triton kernels: the kernels are for bfloat16 and float16, not float32",)


def test_mode_that_saves_no_memory_has_a_badge(model):
    session = Session(model, load_in("sync", {"offload": False}))
    session.prefill([(7 * i) % 4000 + 10 for i in range(600)])
    (badge,) = session.snapshot().badges
    assert not lacks(badge, "sync", "100%", "full")
    session.switch("sync", offload=True)
    assert session.snapshot().badges == ()


def test_new_pages_are_quantized_until_a_rebuild(model):
    session, fresh = Session(model), Session(model)
    ids = list(range(300, 500))
    session.prefill(ids[:100])
    assert "exactly" in session.keep_pages("model")
    assert "3 of 3" in session.keep_pages("int8")
    for token in ids[100:140]:
        session.step(token)
    session.prefill(ids[140:170])
    assert session._kv.state.host.quantized == [False] * 3 + [True, True, False]
    session.truncate(150)  # inside an 8-bit page
    session.prefill(ids[150:])
    note = session.keep_pages("model")
    assert "3 of 7" in note
    assert "/rebuild" in note
    list(session.rebuild())
    assert not any(session._kv.state.host.quantized)
    fresh.prefill(ids)
    assert session.total == 200
    for found, expected in zip(stored_kv(session._kv.state), stored_kv(fresh._kv.state), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("conversation", ["", "another"])
def test_new_conversation_after_8_bits_is_exact(model, conversation):
    session = Session(model, Load(host_dtype="int8"))
    list(session.answer([Turn("user", "A long tale. " * 20)], Sampling(max_new_tokens=5)))
    assert "2 of 3" in session.keep_pages("model")
    started = next(session.answer([Turn("user", "Another tale.")], Sampling(max_new_tokens=5), None, conversation))
    assert started.reused_tokens == 0  # though the template's own tokens are the same
    assert not isinstance(session._kv.state.host, EightBitPool)


def test_truncated_8_bit_page_is_reused_in_8_bits(model):
    session = Session(model, Load(host_dtype="int8"))
    list(session.answer([Turn("user", "A long tale. " * 20)], Sampling(max_new_tokens=5)))
    started = next(session.answer([Turn("user", "Another tale.")], Sampling(max_new_tokens=5)))
    assert started.reused_tokens > 0
    assert "1 of 1" in session.keep_pages("model")


# ---- Rebuilding tokens computed with reduced context, and the predicted cost of a switch


STORY = (Turn("user", "The sea was calm and the whale went on. " * 30 + "Tell me a short story."),)
LONG = Sampling(temperature=0, max_new_tokens=160)
EAGER = {"budget": 64, "R": 1, "sigma": 0, "delta": 0}
NEXT = 300


@pytest.fixture
def reduced(model):
    """A session in full mode whose later tokens were decoded with a budget of 64."""
    session = Session(model, load_in("streaming", EAGER))
    list(session.answer(STORY, LONG))
    session.switch("full")
    assert session.snapshot().reduced_tokens > 0
    return session


def logits_after(session: Session, token: int = NEXT) -> torch.Tensor:
    logits = session.step(token)
    session.truncate(session.total - 1)
    return logits


def test_rebuilt_session_matches_a_fresh_full_one(model, reduced):
    fresh = Session(model)
    fresh.prefill(list(reduced._loop.stored.ids))
    exact = logits_after(fresh)
    assert (logits_after(reduced) - exact).abs().max() > 1e-2
    total, text = reduced.total, reduced.text(0, reduced.total)
    *progress, last = reduced.rebuild()
    assert all(isinstance(event, Prefilled) for event in progress)
    assert isinstance(last, Rebuilt)
    assert (reduced.total, reduced.snapshot().reduced_tokens, last.reduced_tokens) == (total, 0, 0)
    assert 0 < last.tokens < total, "tokens before the first reduced one are not recomputed"
    assert (logits_after(reduced) - exact).abs().max() < 1e-3
    assert reduced.text(0, total) == text
    turns = (*STORY, Turn("assistant", text.rsplit("<|assistant|>", 1)[1]), Turn("user", "Thank you."))
    assert next(reduced.answer(turns, LONG)).reused_tokens >= total, "it is still reused"


def test_stopped_rebuild_keeps_its_progress(reduced):
    reduced._runner.chunk = 4
    events = reduced.rebuild()
    next(events)
    reduced.cancel()
    last = list(events)[-1]
    assert isinstance(last, Rebuilt)
    assert last.tokens == 4
    logits_after(reduced)


def test_rebuild_of_exact_tokens_does_nothing(model):
    session = Session(model)
    session.prefill([1, 2, 3])
    assert [event.tokens for event in session.rebuild()] == [0]
    assert session.total == 3


@pytest.mark.parametrize("mode", [mode for mode in mode_names() if mode != "full"])
def test_switch_costs_what_its_price_says(bundled, mode):
    session = Session(bundled, load_in("full", mode_params={m: {"budget": 192} for m in BUDGETED}))
    session.prefill([10 + i % 500 for i in range(1000)])
    for to in (mode, "full"):
        price = next(price for price in session.prices() if price.mode == to)
        assert not price.refusal
        switched = session.switch(to)
        assert 0.5 * price.moved_bytes <= switched.moved_bytes <= price.moved_bytes
        assert session.snapshot().kv_device_bytes <= price.device_bytes * 1.01


def test_price_in_seconds_uses_the_measured_link(model):
    """The rate that --save-profile writes was ignored (audit, 12)."""
    session = Session(model, Load(link_bytes_per_s=2e6))
    session.prefill([10 + i % 500 for i in range(600)])
    prices = [price for price in session.prices() if price.moved_bytes]
    assert prices
    assert all(price.seconds == price.moved_bytes / 2e6 for price in prices)


BUDGETED = ("streaming", "speculative", "sync")


def test_price_of_a_refused_mode_gives_the_reason(model):
    session = Session(model, Load(given={"speculative": {"window": 24}}))
    prices = {price.mode: price for price in session.prices()}
    assert not prices["streaming"].refusal
    assert "window" in prices["speculative"].refusal
    assert prices["speculative"].moved_bytes == 0
