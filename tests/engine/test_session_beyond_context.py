"""Conversations beyond the model's context: streaming mode continues them, every other mode refuses."""

import dataclasses

import pytest
import torch
from support.loads import load_in

from kvchat.bench import model_shapes
from kvchat.bench.frame import parsed
from kvchat.engine import runner as runner_module
from kvchat.engine.runner import ModelRunner, geometry_of, traits_of
from kvchat.engine.session import Session
from kvchat.errors import DoesNotFitError
from kvchat.kv.modes import build
from kvchat.protocol.messages import Finished, Sampling, Turn

CONTEXT = 300
GREEDY = Sampling(temperature=0, max_new_tokens=12)
QUESTIONS = ("Tell me a story about a cat and a dog who lived by the sea and were friends.",) * 8


def test_only_streaming_continues_beyond_the_context(model):
    short = dataclasses.replace(model, context=CONTEXT)
    session, turns = Session(short, load_in("streaming", {"budget": 64})), []
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


def test_first_prompt_may_exceed_the_context(model):
    short = dataclasses.replace(model, context=CONTEXT)
    session = Session(short, load_in("streaming", {"budget": 64}))
    prompt = Turn("user", " ".join(QUESTIONS * 4))
    *_, finished = session.answer([prompt], GREEDY)
    assert finished.stats.prompt_tokens > CONTEXT
    assert session.snapshot().reduced_tokens >= session.total - CONTEXT


def test_8_bit_pages_barely_change_logits_beyond_the_context(model):
    short = dataclasses.replace(model, context=CONTEXT)
    sessions = [Session(short, load_in("streaming", {"budget": 64}, host_dtype=kept)) for kept in ("model", "int8")]
    ids = torch.randint(300, 2000, (430,), generator=torch.Generator().manual_seed(0)).tolist()
    exact, quantized = ([session.prefill(ids)] for session in sessions)
    for token in ids[:30]:  # across the next half of the context, too
        for session, logits in zip(sessions, (exact, quantized), strict=True):
            logits.append(session.step(token))
    for one, other in zip(exact, quantized, strict=True):
        one, other = one.log_softmax(0), other.log_softmax(0)
        assert (one.exp() * (one - other)).sum() < 0.02
    assert all(sessions[1]._kv.state.host.quantized[:-1])


# ---- Streaming beyond the model's context: positions stay within it, and prompts read what Start+Recent reads


IDS = [(7 * token) % 251 for token in range(1, 500)]
STAGED = "streaming:budget=64,sink=4,R=16,sigma=8,delta=8"
PLAIN = "streaming:budget=64,sink=4,R=1,sigma=0,delta=0"


@pytest.fixture(scope="module")
def tiny():
    return model_shapes.build("tiny", "cpu")


def runner(model, variant, context=None):
    model = dataclasses.replace(model, context=context or model.context)
    return ModelRunner(model, build(parsed(variant), geometry_of(model), traits_of(model)))


def prefill(one, ids):
    """The logits after a prompt."""
    return [logits for _, logits in one.prefill(ids)][-1]


def pin(one, positions):
    with torch.inference_mode():
        one.kv.pin(positions)


@pytest.fixture
def positions(monkeypatch):
    """The positions of every forward."""
    seen, forward = [], runner_module.attention_hook.forward
    monkeypatch.setattr(
        runner_module.attention_hook,
        "forward",
        lambda model, ids, at, *args, **named: seen.extend(at.tolist()) or forward(model, ids, at, *args, **named),
    )
    return seen


def test_steps_beyond_the_context_match_at_valid_positions(tiny, positions):
    within, beyond = runner(tiny, STAGED), runner(tiny, STAGED, context=100)
    for one in (within, beyond):
        prefill(one, IDS[:20])
    for token in IDS[20:240]:
        exact = within.step(token)
        positions.clear()
        assert torch.allclose(beyond.step(token), exact, atol=1e-4)
        assert 0 <= max(positions) < 100


def test_pinned_tokens_give_the_same_logits_beyond_the_context(tiny):
    within, beyond = runner(tiny, STAGED), runner(tiny, STAGED, context=100)
    for one in (within, beyond):
        prefill(one, IDS[:60])
        pin(one, (5, 31, 32))
    for position, token in enumerate(IDS[60:330], 60):
        if position == 240:  # one beyond the context, of another base than the current one, and a recent one
            for one in (within, beyond):
                pin(one, (5, 170, 235))
        assert torch.allclose(beyond.step(token), within.step(token), atol=1e-4), position


def test_prompt_in_chunks_of_one_matches_steps(tiny, positions):
    stepped, prefilled = (runner(tiny, PLAIN, context=100) for _ in range(2))
    for one in (stepped, prefilled):
        prefill(one, IDS[:100])  # a prompt within the context is exact: compare what follows
    prefilled.chunk = 1
    for token in IDS[100:260]:
        by_steps = stepped.step(token)
    assert torch.allclose(prefill(prefilled, IDS[100:260]), by_steps, atol=1e-4)
    assert max(positions) < 100
    assert torch.allclose(prefilled.step(9), stepped.step(9), atol=1e-4)


@pytest.mark.parametrize("pins", [(), (7, 150, 290)])
def test_chunk_reads_sinks_pins_recent_tokens_and_itself(monkeypatch, pins):
    """With one layer, keys do not depend on what was read: full mode gives the same logits for the compacted text."""
    shape = model_shapes._shape(256, 64, 96, 1, (4, 2), 4096)
    monkeypatch.setitem(model_shapes.SHAPES, "one layer", ("LlamaConfig", shape))
    model = model_shapes.build("one layer", "cpu")
    streaming, full = runner(model, STAGED, context=200), runner(model, "full")
    chunks = []
    monkeypatch.setattr(
        streaming,
        "forward_chunk",
        lambda ids, logits, forward=streaming.forward_chunk: chunks.append(len(ids)) or forward(ids, logits),
    )
    prefill(streaming, IDS[:300])
    pin(streaming, pins)
    logits = prefill(streaming, IDS[300:450])
    assert chunks == [200, 64, 36, 64, 36, 50], "to the end of the context, then C at most and never across a base"
    # Before the last chunk C + sigma tokens were kept, the sinks included.
    kept = 450 - 50 - (64 + 8 - 4)
    compacted = [*IDS[:4], *(IDS[pin] for pin in pins), *IDS[kept:450]]
    assert torch.allclose(logits, prefill(full, compacted), atol=1e-4)


def test_truncating_into_the_context_restores_stored_keys(tiny):
    """Keys in the slots were rotated; once the text is short again they are as stored."""
    long, short = runner(tiny, PLAIN, context=100), runner(tiny, PLAIN, context=100)
    prefill(long, IDS[:90])
    for token in IDS[90:190]:
        long.step(token)
    for one in (long, short):
        one.truncate(80)
        prefill(one, IDS[80:90] if one is long else IDS[:90])
    assert torch.allclose(long.step(9), short.step(9), atol=1e-4)
