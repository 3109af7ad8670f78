"""The server with the fake engine: access, the queue, clients that disconnect, engine crashes, shutdown."""

import random
import signal
import threading
import time
from http.client import HTTPResponse

import pytest
from openai import APIError, InternalServerError, OpenAI
from support.patience import wait_until
from support.served import Reply, Served, messages, serving

CHAT = "/v1/chat/completions"


def chat_body(prompt: str, **fields: object) -> dict[str, object]:
    return {"messages": messages(prompt), **fields}


def streamed_text(stream: str) -> str:
    """The text of all pieces: how it is split depends on how busy the machine is."""
    return "".join(piece["choices"][0]["delta"].get("content", "") for piece in Reply(200, {}, stream).pieces)


def read_first_word(stream: HTTPResponse) -> None:
    """Read up to the first word of ``hold`` or ``slow``; a queued stream begins without one."""
    while b"the " not in (line := stream.readline()):
        assert line, "the stream has ended"


def is_idle(served: Served) -> bool:
    return served.figure("requests_processing") == served.figure("requests_deferred") == 0


# ---- access


def test_the_key_is_required_except_for_health_and_never_printed(tmp_path):
    with serving(tmp_path, fake=True, KVCHAT_API_KEY="sesame-opens") as served:
        assert served.ask("/health").status == 200
        for path in ("/v1/models", "/metrics", "/v1/models/kvchat-pocket", "/nowhere"):
            assert served.ask(path).status == 401
        wrong = served.ask(CHAT, chat_body("hello"), Authorization="Bearer sesame")
        assert (wrong.status, wrong.error["code"]) == (401, "invalid_api_key")
        assert wrong.headers["www-authenticate"] == "Bearer"
        with served.client("sesame-opens") as client:
            assert client.models.list().data[0].id == "kvchat-pocket"
        assert served.ask("/v1/models", Authorization="Bearer sesame-opens", Host="some.where").status == 200
        assert served.ask("/v1/models", Authorization="bearer sesame-opens").status == 200
        assert served.ask("/v1/models", Authorization="Basic sesame-opens").status == 401
    assert "sesame" not in "".join(served.said)
    assert "sesame" not in (tmp_path / "kvchat.log").read_text()


def test_requests_for_another_host_are_refused(fake):
    refused = fake.ask("/v1/models", Host=f"rebound.example:{fake.port}")
    assert (refused.status, refused.error["code"]) == (403, "unknown_host")
    assert fake.ask("/v1/models", Host=f"localhost:{fake.port}").status == 200
    form = fake.ask(CHAT, chat_body("hello"), Content_Type="text/plain")
    assert form.status == 415
    assert "application/json" in form.error["message"]


def test_only_allowed_origins_get_cors_headers(tmp_path, fake):
    origin = {"Origin": "https://chat.example"}
    assert "access-control-allow-origin" not in fake.ask("/v1/models", **origin).headers
    with serving(tmp_path, "--cors", "https://chat.example", fake=True) as served:
        assert served.ask("/v1/models", **origin).headers["access-control-allow-origin"] == origin["Origin"]
        assert "access-control-allow-origin" not in served.ask("/v1/models", Origin="https://other.example").headers
        request = {"Access_Control_Request_Method": "POST", "Access_Control_Request_Headers": "content-type"}
        assert served.ask(CHAT, method="OPTIONS", **origin, **request).status == 200


def test_a_body_that_is_too_long_is_refused(fake):
    refused = fake.ask(CHAT, b" " * (2**24 + 1))
    assert (refused.status, refused.error["type"]) == (413, "invalid_request_error")
    assert fake.chat("hello").status == 200


# ---- the queue


def test_requests_queue_in_order_up_to_the_limit(fake):
    connections = [fake.sent(CHAT, chat_body("hold", stream=True))]
    held = connections[0].getresponse()
    read_first_word(held)
    for number, prompt in enumerate(("hold", "hello"), 1):
        connections.append(fake.sent(CHAT, chat_body(prompt, stream=True)))
        wait_until(lambda number=number: fake.figure("requests_deferred") == number)
    refused = fake.chat("hello c")
    assert (refused.status, refused.error["type"]) == (503, "unavailable_error")
    assert int(refused.headers["retry-after"]) > 0
    with fake.client() as client, pytest.raises(InternalServerError):
        client.chat.completions.create(model="kvchat-pocket", messages=messages("hello d"))
    held.close()
    connections[0].close()
    first, second = (connection.getresponse() for connection in connections[1:])
    read_first_word(first)
    assert fake.figure("requests_deferred") == 1, "the other is still queued"
    first.close()
    connections[1].close()
    assert streamed_text(second.read().decode()).startswith("Section 3")
    connections[2].close()


def test_streams_interrupt_unstreamed_answers_but_token_counts_wait(fake):
    with fake.sent(CHAT, chat_body("slow", max_tokens=3000)).sock as slow:
        wait_until(lambda: fake.figure("requests_processing") == 1)
        counted = fake.sent("/tokenize", {"content": "hello"})
        wait_until(lambda: fake.figure("requests_deferred") == 1)
        assert fake.chat("hello", stream=True).status == 200
        slow.setblocking(False)
        with pytest.raises(BlockingIOError):  # it is restarted
            slow.recv(1)
        counted.close()
    wait_until(lambda: is_idle(fake))


def test_queued_streams_are_kept_alive(tmp_path):
    with serving(tmp_path, fake=True) as served:
        held = served.sent(CHAT, chat_body("hold", stream=True))
        first = held.getresponse()
        read_first_word(first)
        waiting = []
        for number, prompt in enumerate(("hello", "hold", "hello"), 1):
            waiting.append(served.sent(CHAT, chat_body(prompt, stream=True)))
            wait_until(lambda number=number: served.figure("requests_deferred") == number)
        replies = [connection.getresponse() for connection in waiting]
        assert [reply.readline() for reply in replies] == [b": ping\n"] * 3
        first.close()
        held.close()  # the next stream runs, and the one after it holds the engine
        assert streamed_text(replies[0].read().decode()).startswith("Section 3")
        served.process.send_signal(signal.SIGINT)
        refused = replies[2].read().decode()
        assert '"unavailable_error"' in refused
        assert "The server is shutting down." in refused
        assert "[DONE]" not in refused
        for connection in waiting:
            connection.close()


@pytest.mark.parametrize("stream", [False, True])
def test_disconnected_clients_free_their_slot(fake, stream):
    first = fake.sent(CHAT, chat_body("slow", stream=stream))
    wait_until(lambda: fake.figure("requests_processing") == 1)
    second = fake.sent(CHAT, chat_body("slow", stream=stream))
    wait_until(lambda: fake.figure("requests_deferred") == 1)
    second.close()
    wait_until(lambda: fake.figure("requests_deferred") == 0)
    assert fake.figure("requests_processing") == 1
    if stream:
        response = first.getresponse()
        read_first_word(response)
        response.close()
    first.close()
    wait_until(lambda: is_idle(fake))
    assert fake.chat("hello").json["choices"][0]["message"]["content"].startswith("Section 3")


def test_the_queue_empties_whenever_clients_disconnect(fake):
    draw = random.Random(1)
    for _ in range(60):
        connection = fake.sent(CHAT, chat_body(draw.choice(("slow", "hold", "hello")), stream=draw.random() < 0.6))
        time.sleep(draw.choice((0, 0, 0.001, 0.005, 0.02)))
        connection.close()
    wait_until(lambda: is_idle(fake))
    assert fake.chat("hello").status == 200
    assert fake.figure("engine_restarts") == 0


# ---- errors


def test_errors_are_streamed_only_after_the_answer_began(fake):
    for stream in (False, True):
        refused = fake.ask(CHAT, chat_body(" ", stream=stream, temperature=1000))
        assert refused.status == 400
        assert refused.headers["content-type"] == "application/json"
        assert refused.error["param"] == "temperature"
    failed = fake.ask(CHAT, chat_body("fail"))
    assert (failed.status, failed.error["message"][:10]) == (400, "The prompt")
    memory = fake.ask(CHAT, chat_body("oom"))
    assert (memory.status, memory.error["type"]) == (503, "unavailable_error")
    begun = fake.ask(CHAT, chat_body("oom", stream=True))
    assert begun.headers["content-type"].startswith("text/event-stream")
    assert begun.pieces[-1]["error"]["message"].startswith("Memory ran out")
    with fake.client() as client, pytest.raises(APIError, match="Memory ran out"):
        list(client.chat.completions.create(model="kvchat-pocket", messages=messages("oom"), stream=True))


def test_text_retracted_by_recovery_is_not_sent_twice(fake):
    """The real engine holds it back; the fake one does not, so only the final text counts here."""
    assert fake.chat("waver").json["choices"][0]["message"]["content"] == "It begins well | and ends well."


def test_unknown_paths_and_methods_are_refused(fake):
    for path in ("/", "/v1", "/v1/nothing", "/v1/models/other"):
        missing = fake.ask(path)
        assert missing.status == 404
        assert missing.error["message"]
    assert fake.ask("/v1/models", {}).status == 405
    assert fake.ask(CHAT).status == 405


def test_open_webui_learns_which_models_can_call_tools(fake, bundled):
    for served, calls in ((fake, True), (bundled, False)):
        (model,) = served.ask("/v1/models").json["data"]
        assert model["info"]["meta"]["capabilities"] == {"builtin_tools": calls, "vision": False, "usage": True}


@pytest.mark.parametrize("base", ["", "/v1"])
def test_base_urls_work_with_and_without_v1(fake, base):
    with OpenAI(base_url=f"http://127.0.0.1:{fake.port}{base}", api_key="none") as client:
        assert client.models.retrieve("kvchat-pocket").id == client.models.list().data[0].id
        (choice,) = client.chat.completions.create(model="kvchat-pocket", messages=messages("hello")).choices
        assert choice.message.content.startswith("Section 3")
        assert client.completions.create(model="kvchat-pocket", prompt="hello").choices


def test_another_model_is_refused_with_the_right_name(fake):
    missing = fake.chat("hello", model="gpt-5")
    assert (missing.status, missing.error["code"], missing.error["param"]) == (404, "model_not_found", "model")
    assert "kvchat-pocket" in missing.error["message"]
    assert fake.chat("hello", model="kvchat-pocket").status == fake.chat("hello", model="bundled").status == 200


# ---- tool calls

WEATHER = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


def test_tool_calls_are_separated_in_whole_and_streamed_answers(fake):
    with fake.client() as client:
        request = {"model": "kvchat-pocket", "messages": messages("call"), "tools": WEATHER}
        choice = client.chat.completions.create(**request).choices[0]
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I look.")
        (call,) = choice.message.tool_calls
        assert (call.function.name, call.function.arguments) == ("weather", '{"city": "Paris"}')
        pieces = [piece.choices[0] for piece in client.chat.completions.create(**request, stream=True)]
        assert "".join(piece.delta.content or "" for piece in pieces) == "I look."
        (part,) = [one for piece in pieces for one in piece.delta.tool_calls or ()]
        assert (part.index, part.function.name, part.function.arguments) == (0, "weather", call.function.arguments)
        assert part.id != call.id
        assert pieces[-1].finish_reason == "tool_calls"
        with client.chat.completions.stream(**request) as stream:
            read = stream.get_final_completion().choices[0].message  # it has fields that only this client knows
        answer = {"role": "tool", "tool_call_id": read.tool_calls[0].id, "content": "Sunny."}
        next_answer = client.chat.completions.create(**request | {"messages": [*request["messages"], read, answer]})
        assert next_answer.choices[0].message.content.startswith("Section 3")
        without = client.chat.completions.create(model="kvchat-pocket", messages=messages("call")).choices[0]
        assert (without.finish_reason, "<tool_call>" in without.message.content) == ("stop", True)


# ---- engine crashes


def test_a_crashed_engine_is_restarted(tmp_path):
    with serving(tmp_path, fake=True) as served:
        whole = served.chat("crash")
        assert (whole.status, whole.error["type"]) == (503, "unavailable_error")
        assert "code 3" in whole.error["message"]
        wait_until(lambda: served.ask("/health").status == 200)
        assert served.chat("crash", stream=True).pieces[-1]["error"]["type"] == "unavailable_error"
        wait_until(lambda: served.ask("/health").status == 200)
        assert served.chat("hello").status == 200
        assert served.figure("engine_restarts") == 2
    assert "".join(served.said).count("Ready: ") == 3


def test_requests_while_loading_get_retry_after(tmp_path):
    with serving(tmp_path, fake=True, is_awaited=False, FAKE_LOAD="wait") as served:
        assert served.ask("/health").status == 503
        early = served.chat("hello")
        assert (early.status, "retry-after" in early.headers) == (503, True)
        assert served.ask("/metrics").status == 200


@pytest.mark.parametrize("load", ["crash", "refuse"])
def test_the_server_exits_if_the_model_cannot_be_loaded(tmp_path, load):
    with serving(tmp_path, fake=True, FAKE_LOAD=load) as served:
        assert served.process.wait(60) == 1
    assert "Traceback" not in "".join(served.said)


# ---- shutdown


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_server_during_an_answer(tmp_path, signum):
    with serving(tmp_path, fake=True) as served:
        connection = served.sent(CHAT, chat_body("hold", stream=True))
        held = connection.getresponse()
        read_first_word(held)
        whole = []
        waiting = threading.Thread(target=lambda: whole.append(served.chat("hello").status))
        waiting.start()
        wait_until(lambda: served.figure("requests_deferred") == 1)
        began = time.monotonic()
        served.process.send_signal(signum)
        assert b'"error"' in held.read()
        held.close()
        connection.close()
        waiting.join()
        assert whole == [503]
        assert served.process.wait(60) == 0
        assert time.monotonic() - began < 30
    assert "".join(served.said).count("\n") == 3  # address, model, and memory for conversations


def test_an_address_in_use_is_reported(fake, tmp_path):
    with serving(tmp_path, "--port", str(fake.port), fake=True) as second:
        assert second.process.wait(60) == 2
    assert "--port 0" in "".join(second.said)
