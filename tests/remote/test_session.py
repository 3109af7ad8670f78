"""Answers of servers by the frames that they document: text, thoughts, counts, refusals, connections that die."""

import subprocess
import sys
import threading
import time
from contextlib import closing

import pytest
from support.fake_server import BREAK, HELLO, HI, WAIT, asked, broken_off, delta, said, usage

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
def test_an_answer_is_text_with_counts(serve, connect, kind):
    started, *texts, finished = asked(connect(serve(kind).url))
    assert isinstance(started, Started)
    assert said(texts) == "Hello."
    assert isinstance(finished, Finished)
    assert (finished.reason, finished.text) == ("eos", "Hello.")
    stats = finished.stats
    assert (stats.prompt_tokens, stats.generated_tokens, stats.total_tokens) == (11, 2, 13)
    assert stats.ttft_s is not None


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_reasoning_is_the_thought_before_the_answer_also_without_one(serve, connect, field):
    frames = [
        delta(role="assistant", content=None),
        *(delta(**{field: piece}) for piece in ("It is ", "a greeting.")),
        delta(content="Hello"),
        delta(content=".", reason="stop"),
    ]
    *_, finished = asked(connect(serve(frames=frames).url))
    assert thoughts.split(finished.text) == ("It is a greeting.", "Hello.")
    *_, finished = asked(connect(serve(frames=[delta(**{field: "Hm."}), delta(reason="stop")]).url))
    assert thoughts.split(finished.text, ending=finished.reason) == ("Hm.", "")


def test_what_was_not_read_again_is_counted(serve, connect):
    session = connect(serve(frames=[*HELLO[:-1], usage(11, 2, cached=8)]).url)
    *_, finished = asked(session)
    assert finished.stats.reused_tokens == 8
    figures = session.snapshot().server
    assert (figures.prompt_tokens, figures.reused_tokens, figures.kind) == (11, 8, "vLLM")


def test_progress_of_the_prompt_and_timings_are_taken(serve, connect):
    timings = {"cache_n": 10, "prompt_n": 20, "prompt_per_second": 400.0, "predicted_n": 7, "predicted_per_second": 9.5}
    frames = [
        CHUNK | {"choices": [], "prompt_progress": PROGRESS | {"processed": 15}},
        CHUNK | {"choices": [], "prompt_progress": PROGRESS},
        delta(content="two tokens") | {"timings": timings | {"draft_n": 4, "draft_n_accepted": 3}},
        delta(reason="stop"),
    ]
    started, *progress, _, finished = asked(connect(serve(frames=frames).url))
    assert (started.prompt_tokens, started.reused_tokens) == (30, 10)
    assert progress == [Prefilled(5, 20), Prefilled(20, 20)]
    stats = finished.stats
    assert (stats.generated_tokens, stats.prefill_tokens_per_s, stats.decode_tokens_per_s) == (7, 400.0, 9.5)
    assert stats.extras == {"drafts accepted": "3 of 4"}


def test_figures_that_an_older_server_does_not_tell_are_left_out(serve, connect):
    frames = [
        CHUNK | {"choices": [], "prompt_progress": {"total": 30, "processed": 30}},
        delta(content="two ") | {"timings": {"prompt_n": 20, "predicted_per_second": 9.5}},
        delta(content="tokens", reason="stop") | {"timings": {"prompt_n": 20, "predicted_per_second": 9.5}},
    ]
    started, progress, *texts, finished = asked(connect(serve(frames=frames).url))
    assert (started.prompt_tokens, started.reused_tokens, progress) == (30, 0, Prefilled(30, 30))
    assert said(texts) == "two tokens"
    stats = finished.stats
    assert (stats.prompt_tokens, stats.generated_tokens, stats.decode_tokens_per_s) == (30, 2, 9.5)


@pytest.mark.parametrize(
    ("reason", "tokens", "ending"),
    [("length", 5, "length"), ("length", 3, "context"), ("stop", 3, "eos"), ("eos_token", 3, "eos"), ("end", 3, "eos")],
)
def test_the_end_has_its_reason(serve, connect, reason, tokens, ending):
    frames = [delta(content="a"), delta(reason=reason), usage(11, tokens)]
    *events, finished = asked(connect(serve(frames=frames).url), sampling=Sampling(max_new_tokens=5))
    assert finished.reason == ending
    assert not [event for event in events if isinstance(event, Noted)]


@pytest.mark.parametrize("reason", ["abort", "content_filter", "tool_calls"])
def test_an_end_of_another_kind_is_told(serve, connect, reason):
    *_, noted, finished = asked(connect(serve(frames=[delta(content="a"), delta(reason=reason)]).url))
    assert reason in noted.text
    assert finished.text == "a"


# ---- what is sent


def test_the_whole_conversation_is_sent_and_only_what_was_set(serve, connect):
    server = serve()
    session = connect(server.url, template_args=("enable_thinking=false",))
    turns = (
        Turn("system", "Be kind."),
        Turn("user", "A"),
        Turn("assistant", "<think>\nhm\n</think>\n\nB"),
        Turn("user", "C"),
    )
    asked(session, turns, Sampling(temperature=0.5, top_k=3, stop=("x",), max_new_tokens=9))
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


def test_an_answer_is_gone_on_with_and_thoughts_before_it_are_not_sent(serve, connect):
    server = serve()
    done = Turn("assistant", "hm\n</think>\n\nHello.", thought="</think>")
    begun = [Turn("assistant", "<think>\nhm") for _ in range(2)]
    asked(connect(server.url), (*HI, done, Turn("user", "And </think>?"), begun[0], Turn("user", "And?"), begun[1]))
    (sent,) = server.asked
    assert sent["continue_final_message"]
    assert not sent["add_generation_prompt"]
    said = [one["content"] for one in sent["messages"]]
    assert said == ["Hi.", "Hello.", "And </think>?", "", "And?", "<think>\nhm"], "one in its thought is empty"


@pytest.mark.parametrize("begun", [Turn("assistant", "<think>\nIt is"), Turn("assistant", "It is", thought="</think>")])
def test_a_thought_that_was_broken_off_is_gone_on_with_as_one(serve, connect, begun):
    frames = [delta(reasoning=" a"), delta(reasoning=" greeting."), delta(content="Hello.", reason="stop")]
    *_, finished = asked(connect(serve(frames=frames).url), (*HI, begun))
    assert thoughts.split(begun.content + finished.text, begun.thought) == ("It is a greeting.", "Hello.")
    assert "<think>" not in finished.text


def test_an_answer_that_thinks_after_one_that_is_gone_on_with_has_a_thought_of_its_own(serve, connect):
    frames = [delta(reasoning="Hm."), delta(content="lo.", reason="stop")]
    done = Turn("assistant", "<think>\nx\n</think>\n\nHel")
    *_, finished = asked(connect(serve(frames=frames).url), (*HI, done))
    assert finished.text == "<think>\nHm.\n</think>\n\nlo."


def test_variables_of_a_template_that_are_not_sent_are_told(serve, connect):
    for kind, is_taken in (("vLLM", True), ("Ollama", False)):
        server = serve(kind)
        session = connect(server.url, template_args=("enable_thinking=false",))
        asked(session)
        assert ("chat_template_kwargs" in server.asked[0]) is is_taken
        assert session.info.takes_variables is is_taken
        assert any("enable_thinking=false" in note for note in session.info.notes) is not is_taken


def test_what_a_model_here_alone_can_be_asked_for_is_refused(serve, connect):
    server = serve()
    session = connect(server.url)
    for asked_for in ({"variant": Variant("streaming")}, {"json_schema": "{}"}):
        with pytest.raises(UsageError, match="decides"):
            session.answer(HI, Sampling(), **asked_for)
    list(session.answer(HI, Sampling(), template_args=("shout=true",)))
    assert server.asked[0]["chat_template_kwargs"] == {"shout": True}


def test_each_key_goes_to_its_server(serve, connect, monkeypatch):
    server = serve()
    server.key = "k"
    monkeypatch.setenv("KVCHAT_API_KEY", "k")
    assert said(asked(connect(server.url))) == "Hello."


def test_what_variables_say_of_openai_goes_to_no_other_server(serve, connect, monkeypatch):
    for name in ("OPENAI_API_KEY", "OPENAI_ORG_ID", "OPENAI_PROJECT_ID"):
        monkeypatch.setenv(name, "geheim")
    server = serve()
    assert said(asked(connect(server.url))) == "Hello."
    assert "geheim" not in str(server.headers)


# ---- stop


def test_a_stop_closes_the_connection_and_keeps_the_text(serve, connect):
    server = serve(frames=[delta(content="Once"), WAIT])
    session = connect(server.url)
    *_, finished = session.answer(HI, Sampling(), lambda tokens: session.cancel() if tokens else None)
    assert (finished.reason, finished.text) == ("stopped", "Once")
    assert server.left.wait(5)


def test_a_stop_from_another_thread_ends_an_answer_that_has_not_begun(serve, connect):
    server = serve(frames=[WAIT])
    session = connect(server.url)
    threading.Timer(0.2, session.cancel).start()
    began = time.monotonic()
    *_, finished = asked(session)
    assert (finished.reason, finished.text) == ("stopped", "")
    assert time.monotonic() - began < 5
    assert server.left.wait(5)


def test_a_stop_before_the_answer_is_for_it_and_not_for_the_next(serve, connect):
    session = connect(serve().url)
    events = session.answer(HI, Sampling())
    session.cancel()
    assert [event.reason for event in events if isinstance(event, Finished)] == ["stopped"]
    assert said(asked(session)) == "Hello."


def test_an_answer_that_is_left_alone_closes_the_connection(serve, connect):
    server = serve(frames=[delta(content="Once"), WAIT])
    with closing(connect(server.url).answer(HI, Sampling())) as events:
        next(events)
    assert server.left.wait(5)


@pytest.mark.parametrize("frames", [(WAIT,), (delta(content="Once"), WAIT)])
def test_a_server_that_falls_silent_is_not_waited_for_without_end(serve, connect, monkeypatch, frames):
    monkeypatch.setattr(remote, "SILENCE_S", 0.5)
    server = serve(frames=frames)
    with pytest.raises(EngineError, match="nothing"):
        asked(connect(server.url))
    assert server.left.wait(5)
    assert len(server.asked) == 1


# ---- refusals, in the server's words

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
def test_a_refusal_has_the_servers_words_and_numbers(serve, connect, monkeypatch, status, error, kind, words):
    server = serve()
    session = connect(server.url)
    monkeypatch.setattr(session._openai, "max_retries", 0)
    server.status, server.error = status, error
    with pytest.raises(kind) as refused:
        asked(session)
    assert all(word in str(refused.value) for word in words), str(refused.value)
    server.status = 200
    assert said(asked(session)) == "Hello."  # the session goes on


def test_a_server_that_loads_its_model_is_waited_for(serve, connect):
    server = serve()
    ready, server.routes["/v1/models"] = server.routes["/v1/models"], (503, {"error": {"message": "Loading model"}})
    threading.Timer(0.3, lambda: server.routes.update({"/v1/models": ready})).start()
    assert connect(server.url).info.model == "Qwen/Qwen3-4B"


# ---- connections and frames that are broken


@pytest.mark.parametrize(
    "frames",
    [
        [delta(content="Once"), BREAK],
        [delta(content="Once")],  # it ends, and the answer does not
        [delta(content="Once"), {"error": {"message": "out of memory", "code": 500}}],
    ],
)
def test_an_answer_that_breaks_off_is_told_after_its_text(serve, connect, frames):
    events = connect(serve(frames=frames).url).answer(HI, Sampling())
    text, error = broken_off(events)
    assert text == "Once"
    assert isinstance(error, EngineError)
    assert "/continue" in error.hint


def test_an_answer_that_has_ended_is_whole_whatever_comes_after(serve, connect):
    frames = [delta(content="Once"), delta(reason="stop"), {"error": {"message": "shutting down", "code": 503}}]
    *_, end = asked(connect(serve(frames=frames).url))
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
def test_frames_of_another_form_are_an_error_and_no_crash(serve, connect, frame):
    server = serve(frames=[frame])
    session = connect(server.url)
    with pytest.raises(EngineError):
        asked(session)
    server.frames = HELLO
    assert said(asked(session)) == "Hello."


def test_a_server_that_is_gone_is_told_and_found_again(serve, connect):
    server = serve()
    session = connect(server.url)
    server.__exit__()
    with pytest.raises(EngineError, match="No server answers"):
        asked(session)


# ---- what the server decides


def test_what_needs_a_model_here_is_refused_with_what_the_server_offers(serve, connect):
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
