"""llama.cpp's own server with SmolLM2: chat, stop, errors, a full context, metrics."""

import threading
import time

import pytest
from support.fake_server import events_of, interrupted, text_of

from kvchat.errors import DoesNotFitError, EngineError
from kvchat.protocol.messages import Prefilled, Sampling, Started, Turn
from kvchat.remote import servers

pytestmark = [pytest.mark.real_model("smollm2"), pytest.mark.slow("a model of 135M on one thread")]
FACT = Turn("user", "My cat is called Biscuit.")
GREEDY = Sampling(temperature=0, max_new_tokens=12)


def test_the_server_and_its_model_are_recognized(llama, connect):
    info = connect(llama.url).info
    assert (info.server, info.context, info.weights) == (servers.LLAMA, 512, "Q4_1")
    assert info.parameters == 134_515_008
    assert "-ctk" in info.offers


def test_a_conversation_is_answered_and_its_prefix_reused(llama, connect):
    session = connect(llama.url)
    events = events_of(session, (FACT,), GREEDY)
    started = events[0]
    assert isinstance(started, Started)
    assert any(isinstance(event, Prefilled) for event in events)
    finished = events[-1]
    assert finished.text == text_of(events)
    assert finished.stats.generated_tokens <= 12
    assert finished.stats.decode_tokens_per_s > 0
    turns = (FACT, Turn("assistant", finished.text), Turn("user", "What is my cat called?"))
    again = events_of(session, turns, GREEDY)[-1].stats
    assert again.reused_tokens >= finished.stats.prompt_tokens - 1
    assert again.prompt_tokens > finished.stats.total_tokens
    snapshot = session.snapshot()
    assert (snapshot.total, snapshot.context) == (again.total_tokens, 512)
    assert snapshot.server.reused_tokens == again.reused_tokens


def test_a_stop_frees_the_server(llama, connect):
    session = connect(llama.url)
    long = Sampling(temperature=0, max_new_tokens=400)
    *_, finished = session.answer((FACT,), long, lambda tokens: session.cancel() if tokens >= 3 else None)
    assert finished.reason == "stopped"
    assert 3 <= finished.stats.generated_tokens < 100
    deadline = time.monotonic() + 20
    while session.snapshot().server.running != 0:  # until it notices the disconnect
        session.details()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert text_of(events_of(session, (FACT,), GREEDY))


def test_a_conversation_longer_than_the_context_is_refused(llama, connect):
    session = connect(llama.url)
    with pytest.raises(DoesNotFitError, match=r"512") as refused:
        events_of(session, (Turn("user", "word " * 600),), GREEDY)
    assert "tokens asked" in refused.value.detail
    assert text_of(events_of(session, (FACT,), GREEDY))


def test_metrics_of_the_server_are_read_on_request(llama, connect):
    session = connect(llama.url)
    events_of(session, (FACT,), GREEDY)
    assert session.snapshot().server.running is None  # not requested yet
    session.details()
    figures = session.snapshot().server
    assert (figures.capacity, figures.running, figures.waiting) == (512, 0, 0)
    assert 0 < figures.used_share < 1
    assert figures.prefix_tokens >= 0
    assert not figures.missing


def test_a_killed_server_is_found_again_after_its_restart(connect):
    pytest.importorskip("xllamacpp")
    from support.llama_server import LlamaServer

    with LlamaServer(context=512) as server:
        session = connect(server.url)
        text, error = interrupted(session.answer((FACT,), Sampling(max_new_tokens=400)), server.kill)
        assert text
        assert isinstance(error, EngineError)
        with pytest.raises(EngineError, match="No server answers"):
            events_of(session, (FACT,), GREEDY)
    with LlamaServer(context=512, port=server.port):
        assert text_of(events_of(session, (FACT,), GREEDY))


def test_two_concurrent_sessions_get_their_own_answers(llama, connect):
    sessions = [connect(llama.url) for _ in range(2)]
    texts: dict[int, str] = {}

    def ask(place):
        texts[place] = text_of(events_of(sessions[place], (FACT,), GREEDY))

    threads = [threading.Thread(target=ask, args=(place,)) for place in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts[0] == texts[1] != ""
