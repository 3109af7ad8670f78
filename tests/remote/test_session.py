"""Answers of servers from the frames that they document: text, thoughts, counts, refusals, broken connections."""

import subprocess
import sys
import threading
import time
from contextlib import closing

import pytest
from support.fake_server import BREAK, HELLO, HI, WAIT, delta, events_of, interrupted, text_of, usage

from kvchat import thoughts
from kvchat.errors import DoesNotFitError, EngineError, ModelError, UsageError
from kvchat.protocol.messages import Finished, Noted, Prefilled, Sampling, Started, Turn, Variant
from kvchat.remote import session as remote
from kvchat.remote.session import MODE

CHUNK = {"object": "chat.completion.chunk", "id": "1", "created": 1, "model": "m"}
PROGRESS = {"total": 30, "cache": 10, "processed": 30, "time_ms": 5}


def test_a_session_needs_no_torch(serve, connect):
    code = "import sys, kvchat.remote.session, kvchat.remote.metrics; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    session = connect(serve().url)
    assert session.info.server == "vLLM"
    assert (session.info.model, session.info.context, session.info.mode) == ("Qwen/Qwen3-4B", 2048, MODE)


@pytest.mark.parametrize("kind", ["vLLM", "SGLang", "Ollama", "LM Studio", "transformers serve"])
def test_an_answer_has_text_and_token_counts(serve, connect, kind):
    started, *texts, finished = events_of(connect(serve(kind).url))
    assert isinstance(started, Started)
    assert text_of(texts) == "Hello."
    assert isinstance(finished, Finished)
    assert (finished.reason, finished.text) == ("eos", "Hello.")
    stats = finished.stats
    assert (stats.prompt_tokens, stats.generated_tokens, stats.total_tokens) == (11, 2, 13)
    assert stats.ttft_s is not None


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_reasoning_is_the_thought_even_without_an_answer(serve, connect, field):
    frames = [
        delta(role="assistant", content=None),
        *(delta(**{field: piece}) for piece in ("It is ", "a greeting.")),
        delta(content="Hello"),
        delta(content=".", reason="stop"),
    ]
    *_, finished = events_of(connect(serve(frames=frames).url))
    assert thoughts.split(finished.text) == ("It is a greeting.", "Hello.")
    *_, finished = events_of(connect(serve(frames=[delta(**{field: "Hm."}), delta(reason="stop")]).url))
    assert thoughts.split(finished.text, ending=finished.reason) == ("Hm.", "")


def test_unstreamed_answers_are_accepted(serve, connect):
    """Some servers never stream."""
    message = {"role": "assistant", "content": "Hello.", "reasoning_content": "Hm."}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    whole = {**usage(11, 2), "object": "chat.completion", "choices": [choice]}
    started, *texts, finished = events_of(connect(serve(frames=whole).url))
    assert isinstance(started, Started)
    assert thoughts.split(text_of(texts)) == ("Hm.", "Hello.")
    assert (finished.reason, finished.stats.prompt_tokens, finished.stats.generated_tokens) == ("eos", 11, 2)
    with pytest.raises(EngineError, match="invalid answer"):
        events_of(connect(serve(frames={"answer": "Hello."}).url))
    with pytest.raises(EngineError, match="Vision add-on"):
        events_of(connect(serve(frames={"error": {"message": "Vision add-on is not loaded"}}).url))


def test_a_stream_with_the_media_type_of_a_whole_answer_is_accepted(serve, connect):
    server = serve()
    server.media_type = "application/json"
    assert text_of(events_of(connect(server.url))) == "Hello."


def test_reused_tokens_are_counted(serve, connect):
    session = connect(serve(frames=[*HELLO[:-1], usage(11, 2, cached=8)]).url)
    *_, finished = events_of(session)
    assert finished.stats.reused_tokens == 8
    figures = session.snapshot().server
    assert (figures.prompt_tokens, figures.reused_tokens, figures.kind) == (11, 8, "vLLM")


def test_prompt_progress_and_timings_are_used(serve, connect):
    timings = {"cache_n": 10, "prompt_n": 20, "prompt_per_second": 400.0, "predicted_n": 7, "predicted_per_second": 9.5}
    frames = [
        CHUNK | {"choices": [], "prompt_progress": PROGRESS | {"processed": 15}},
        CHUNK | {"choices": [], "prompt_progress": PROGRESS},
        delta(content="two tokens") | {"timings": timings | {"draft_n": 4, "draft_n_accepted": 3}},
        delta(reason="stop"),
    ]
    started, *progress, _, finished = events_of(connect(serve(frames=frames).url))
    assert (started.prompt_tokens, started.reused_tokens) == (30, 10)
    assert progress == [Prefilled(5, 20), Prefilled(20, 20)]
    stats = finished.stats
    assert (stats.generated_tokens, stats.prefill_tokens_per_s, stats.decode_tokens_per_s) == (7, 400.0, 9.5)
    assert stats.extras == {"drafts accepted": "3 of 4"}


def test_figures_missing_in_an_older_server_are_left_out(serve, connect):
    frames = [
        CHUNK | {"choices": [], "prompt_progress": {"total": 30, "processed": 30}},
        delta(content="two ") | {"timings": {"prompt_n": 20, "predicted_per_second": 9.5}},
        delta(content="tokens", reason="stop") | {"timings": {"prompt_n": 20, "predicted_per_second": 9.5}},
    ]
    started, progress, *texts, finished = events_of(connect(serve(frames=frames).url))
    assert (started.prompt_tokens, started.reused_tokens, progress) == (30, 0, Prefilled(30, 30))
    assert text_of(texts) == "two tokens"
    stats = finished.stats
    assert (stats.prompt_tokens, stats.generated_tokens, stats.decode_tokens_per_s) == (30, 2, 9.5)


@pytest.mark.parametrize(
    ("reason", "tokens", "ending"),
    [("length", 5, "length"), ("length", 3, "context"), ("stop", 3, "eos"), ("eos_token", 3, "eos"), ("end", 3, "eos")],
)
def test_finish_reasons_are_translated(serve, connect, reason, tokens, ending):
    frames = [delta(content="a"), delta(reason=reason), usage(11, tokens)]
    *events, finished = events_of(connect(serve(frames=frames).url), sampling=Sampling(max_new_tokens=5))
    assert finished.reason == ending
    assert not [event for event in events if isinstance(event, Noted)]


@pytest.mark.parametrize("reason", ["abort", "content_filter", "tool_calls"])
def test_other_finish_reasons_are_noted(serve, connect, reason):
    *_, noted, finished = events_of(connect(serve(frames=[delta(content="a"), delta(reason=reason)]).url))
    assert reason in noted.text
    assert finished.text == "a"


# ---- requests


def test_the_whole_conversation_and_only_set_options_are_sent(serve, connect):
    server = serve()
    session = connect(server.url, template_args=("enable_thinking=false",))
    turns = (
        Turn("system", "Be kind."),
        Turn("user", "A"),
        Turn("assistant", "<think>\nhm\n</think>\n\nB"),
        Turn("user", "C"),
    )
    events_of(session, turns, Sampling(temperature=0.5, top_k=3, stop=("x",), max_new_tokens=9))
    (sent,) = server.asked
    assert [(one["role"], one["content"]) for one in sent["messages"]] == [
        ("system", "Be kind."), ("user", "A"), ("assistant", "B"), ("user", "C"),
    ]  # fmt: skip
    assert {name: sent[name] for name in ("model", "temperature", "top_k", "stop", "max_tokens")} == {
        "model": "Qwen/Qwen3-4B", "temperature": 0.5, "top_k": 3, "stop": ["x"], "max_tokens": 9,
    }  # fmt: skip
    assert sent["chat_template_kwargs"] == {"enable_thinking": False}
    assert sent["stream_options"]["include_usage"]
    assert not {"top_p", "min_p", "seed", "repetition_penalty"} & sent.keys()


def test_a_resumed_answer_is_sent_without_earlier_thoughts(serve, connect):
    server = serve()
    done = Turn("assistant", "hm\n</think>\n\nHello.", thought="</think>")
    begun = [Turn("assistant", "<think>\nhm") for _ in range(2)]
    events_of(connect(server.url), (*HI, done, Turn("user", "And </think>?"), begun[0], Turn("user", "And?"), begun[1]))
    (sent,) = server.asked
    assert sent["continue_final_message"]
    assert not sent["add_generation_prompt"]
    contents = [one["content"] for one in sent["messages"]]
    assert contents == ["Hi.", "Hello.", "And </think>?", "", "And?", "<think>\nhm"], "an unfinished thought is empty"


@pytest.mark.parametrize("begun", [Turn("assistant", "<think>\nIt is"), Turn("assistant", "It is", thought="</think>")])
def test_an_unfinished_thought_is_resumed_as_one(serve, connect, begun):
    frames = [delta(reasoning=" a"), delta(reasoning=" greeting."), delta(content="Hello.", reason="stop")]
    *_, finished = events_of(connect(serve(frames=frames).url), (*HI, begun))
    assert thoughts.split(begun.content + finished.text, begun.thought) == ("It is a greeting.", "Hello.")
    assert "<think>" not in finished.text


def test_thinking_after_a_resumed_answer_is_its_own_thought(serve, connect):
    frames = [delta(reasoning="Hm."), delta(content="lo.", reason="stop")]
    done = Turn("assistant", "<think>\nx\n</think>\n\nHel")
    *_, finished = events_of(connect(serve(frames=frames).url), (*HI, done))
    assert finished.text == "<think>\nHm.\n</think>\n\nlo."


def test_unsent_template_variables_are_noted(serve, connect):
    for kind, is_taken in (("vLLM", True), ("Ollama", False)):
        server = serve(kind)
        session = connect(server.url, template_args=("enable_thinking=false",))
        events_of(session)
        assert ("chat_template_kwargs" in server.asked[0]) is is_taken
        assert session.info.takes_variables is is_taken
        assert any("enable_thinking=false" in note for note in session.info.notes) is not is_taken


def test_options_for_local_models_only_are_refused(serve, connect):
    server = serve()
    session = connect(server.url)
    for asked_for in ({"variant": Variant("streaming")}, {"json_schema": "{}"}, {"must_call": ("f",)}):
        with pytest.raises(UsageError, match="decides"):
            session.answer(HI, Sampling(), **asked_for)
    list(session.answer(HI, Sampling(), template_args=("shout=true",)))
    assert server.asked[0]["chat_template_kwargs"] == {"shout": True}


def test_the_key_is_sent_to_the_server(serve, connect, monkeypatch):
    server = serve()
    server.key = "k"
    monkeypatch.setenv("KVCHAT_API_KEY", "k")
    assert text_of(events_of(connect(server.url))) == "Hello."


def test_openai_variables_are_not_sent_to_other_servers(serve, connect, monkeypatch):
    for name in ("OPENAI_API_KEY", "OPENAI_ORG_ID", "OPENAI_PROJECT_ID"):
        monkeypatch.setenv(name, "geheim")
    server = serve()
    assert text_of(events_of(connect(server.url))) == "Hello."
    assert "geheim" not in str(server.headers)


# ---- stop


def test_a_stop_closes_the_connection_and_keeps_the_text(serve, connect):
    server = serve(frames=[delta(content="Once"), WAIT])
    session = connect(server.url)
    *_, finished = session.answer(HI, Sampling(), lambda tokens: session.cancel() if tokens else None)
    assert (finished.reason, finished.text) == ("stopped", "Once")
    assert server.left.wait(5)


def test_another_thread_can_stop_an_answer_before_it_begins(serve, connect):
    server = serve(frames=[WAIT])
    session = connect(server.url)
    threading.Timer(0.2, session.cancel).start()
    began = time.monotonic()
    *_, finished = events_of(session)
    assert (finished.reason, finished.text) == ("stopped", "")
    assert time.monotonic() - began < 5
    assert server.left.wait(5)


def test_an_early_stop_does_not_affect_the_next_answer(serve, connect):
    session = connect(serve().url)
    events = session.answer(HI, Sampling())
    session.cancel()
    assert [event.reason for event in events if isinstance(event, Finished)] == ["stopped"]
    assert text_of(events_of(session)) == "Hello."


def test_abandoning_an_answer_closes_the_connection(serve, connect):
    server = serve(frames=[delta(content="Once"), WAIT])
    with closing(connect(server.url).answer(HI, Sampling())) as events:
        next(events)
    assert server.left.wait(5)


@pytest.mark.parametrize("frames", [(WAIT,), (delta(content="Once"), WAIT)])
def test_a_silent_server_times_out(serve, connect, monkeypatch, frames):
    monkeypatch.setattr(remote, "SILENCE_S", 0.5)
    server = serve(frames=frames)
    with pytest.raises(EngineError, match="nothing"):
        events_of(connect(server.url))
    assert server.left.wait(5)
    assert len(server.asked) == 1


# ---- refusals, with the server's message

LLAMA_LONG = {"code": 400, "message": "too large", "type": "exceed_context_size_error", "n_prompt_tokens": 9031,
              "n_ctx": 4096}  # fmt: skip
VLLM_LONG = {"message": "This model's maximum context length is 2048 tokens.", "type": "BadRequestError", "code": 400}


@pytest.mark.parametrize(
    ("status", "error", "kind", "words"),
    [
        (400, {"error": LLAMA_LONG}, DoesNotFitError, ["too large", "9,031", "4,096"]),
        (400, {"error": VLLM_LONG}, DoesNotFitError, ["2048 tokens"]),
        (400, {"error": {"message": "top_k must be positive"}}, EngineError, ["400", "top_k must be positive"]),
        (401, {"error": {"message": "Incorrect key"}}, UsageError, ["Incorrect key", "KVCHAT_API_KEY"]),
        (404, {"error": {"message": 'model "x" not found'}}, ModelError, ['model "x" not found']),
        (422, {"detail": "no such role"}, EngineError, ["no such role"]),
        (400, "<html>Bad Request</html>", EngineError, ["Bad Request"]),
        (503, {"error": {"message": "Loading model", "type": "unavailable_error"}}, EngineError, ["Loading model"]),
    ],
)
def test_a_refusal_shows_the_servers_message_and_numbers(serve, connect, monkeypatch, status, error, kind, words):
    server = serve()
    session = connect(server.url)
    monkeypatch.setattr(session._openai, "max_retries", 0)
    server.status, server.error = status, error
    with pytest.raises(kind) as refused:
        events_of(session)
    assert all(word in str(refused.value) for word in words), str(refused.value)
    server.status = 200
    assert text_of(events_of(session)) == "Hello."  # the session still works


def test_connecting_waits_for_a_server_that_loads_its_model(serve, connect):
    server = serve()
    ready, server.routes["/v1/models"] = server.routes["/v1/models"], (503, {"error": {"message": "Loading model"}})
    threading.Timer(0.3, lambda: server.routes.update({"/v1/models": ready})).start()
    assert connect(server.url).info.model == "Qwen/Qwen3-4B"


# ---- broken connections and frames


@pytest.mark.parametrize(
    "frames",
    [
        [delta(content="Once"), BREAK],
        [delta(content="Once")],  # the stream ends before the answer
        [delta(content="Once"), {"error": {"message": "out of memory", "code": 500}}],
    ],
)
def test_a_broken_off_answer_is_an_error_after_its_text(serve, connect, frames):
    events = connect(serve(frames=frames).url).answer(HI, Sampling())
    text, error = interrupted(events)
    assert text == "Once"
    assert isinstance(error, EngineError)
    assert "/continue" in error.hint


@pytest.mark.parametrize("frame", [{"object": "error", "message": "out of memory"}, {"detail": "out of memory"}])
@pytest.mark.parametrize("said", [[], [delta(content="Once")]])
def test_errors_in_any_form_show_the_servers_message(serve, connect, said, frame):
    with pytest.raises(EngineError, match="out of memory"):
        events_of(connect(serve(frames=[*said, frame]).url))


def test_an_error_after_the_end_of_an_answer_is_ignored(serve, connect):
    frames = [delta(content="Once"), delta(reason="stop"), {"error": {"message": "shutting down", "code": 503}}]
    *_, end = events_of(connect(serve(frames=frames).url))
    assert (end.reason, end.text) == ("eos", "Once")


@pytest.mark.parametrize(
    "frame",
    [
        "data: {half\n\n",
        "data: 7\n\n",
        "data: [[]]\n\n",
        'data: {"choices": 7}\n\n',
        'data: {"choices": [{"delta": 7}]}\n\n',
        'data: {"choices": [{"delta": {"content": 7}}]}\n\n',
        'data: {"choices": [], "timings": {"cache_n": "x"}}\n\n',
        'data: {"choices": [], "prompt_progress": 3}\n\n',
        "<html>\n\n",
        "\xff\n\n",
    ],
)
def test_malformed_frames_are_an_error(serve, connect, frame):
    server = serve(frames=[frame])
    session = connect(server.url)
    with pytest.raises(EngineError):
        events_of(session)
    server.frames = HELLO
    assert text_of(events_of(session)) == "Hello."


def test_a_server_that_is_gone_is_an_error(serve, connect):
    server = serve()
    session = connect(server.url)
    server.__exit__()
    with pytest.raises(EngineError, match="No server answers"):
        events_of(session)


# ---- left to the server


def test_operations_for_local_models_only_are_refused(serve, connect):
    session = connect(serve().url)
    for refused in (
        lambda: session.switch("full"),
        lambda: session.keep_pages("int8"),
        lambda: session.compare(HI, (), Sampling()),
        lambda: session.hide_needle(10, 1),
        session.rebuild,
    ):
        with pytest.raises(UsageError, match="--kv-cache-dtype"):
            refused()
    with pytest.raises(UsageError, match="template"):
        connect(serve().url, chat_template="/tmp/x.jinja")
