"""The server over the fake engine: who is let in, the queue, clients that leave, an engine that dies, the end."""

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


def asking(prompt: str, **fields: object) -> dict[str, object]:
    return {"messages": messages(prompt), **fields}


def said_in(stream: str) -> str:
    """What the pieces say together: how the text is cut into them depends on how busy the machine is."""
    return "".join(piece["choices"][0]["delta"].get("content", "") for piece in Reply(200, {}, stream).pieces)


def read_first_word(stream: HTTPResponse) -> None:
    """Read up to the first word of ``hold`` or ``slow``; a stream that has to wait for its turn begins without one."""
    while b"the " not in (line := stream.readline()):
        assert line, "the stream has ended"


def is_idle(served: Served) -> bool:
    return served.figure("requests_processing") == served.figure("requests_deferred") == 0


# ---- who is let in


def test_a_key_is_asked_for_everywhere_but_for_health_and_is_told_nobody(tmp_path):
    with serving(tmp_path, fake=True, KVCHAT_API_KEY="sesame-opens") as served:
        assert served.ask("/health").status == 200
        for path in ("/v1/models", "/metrics", "/v1/models/kvchat-pocket", "/nowhere"):
            assert served.ask(path).status == 401
        wrong = served.ask(CHAT, asking("hello"), Authorization="Bearer sesame")
        assert (wrong.status, wrong.error["code"]) == (401, "invalid_api_key")
        assert wrong.headers["www-authenticate"] == "Bearer"
        with served.client("sesame-opens") as client:
            assert client.models.list().data[0].id == "kvchat-pocket"
        assert served.ask("/v1/models", Authorization="Bearer sesame-opens", Host="some.where").status == 200
        assert served.ask("/v1/models", Authorization="bearer sesame-opens").status == 200
        assert served.ask("/v1/models", Authorization="Basic sesame-opens").status == 401
    assert "sesame" not in "".join(served.said)
    assert "sesame" not in (tmp_path / "kvchat.log").read_text()


def test_a_page_of_another_host_gets_nothing(fake):
    refused = fake.ask("/v1/models", Host=f"rebound.example:{fake.port}")
    assert (refused.status, refused.error["code"]) == (403, "unknown_host")
    assert fake.ask("/v1/models", Host=f"localhost:{fake.port}").status == 200
    form = fake.ask(CHAT, asking("hello"), Content_Type="text/plain")
    assert form.status == 415
    assert "application/json" in form.error["message"]


def test_pages_may_ask_only_where_their_origin_is_named(tmp_path, fake):
    origin = {"Origin": "https://chat.example"}
    assert "access-control-allow-origin" not in fake.ask("/v1/models", **origin).headers
    with serving(tmp_path, "--cors", "https://chat.example", fake=True) as served:
        assert served.ask("/v1/models", **origin).headers["access-control-allow-origin"] == origin["Origin"]
        assert "access-control-allow-origin" not in served.ask("/v1/models", Origin="https://other.example").headers
        asked = {"Access_Control_Request_Method": "POST", "Access_Control_Request_Headers": "content-type"}
        assert served.ask(CHAT, method="OPTIONS", **origin, **asked).status == 200


def test_a_body_that_is_too_long_is_not_read(fake):
    refused = fake.ask(CHAT, b" " * (2**24 + 1))
    assert (refused.status, refused.error["type"]) == (413, "invalid_request_error")
    assert fake.chat("hello").status == 200


# ---- the queue


def test_requests_wait_in_order_and_beyond_the_limit_are_refused(fake):
    connections = [fake.sent(CHAT, asking("hold", stream=True))]
    held = connections[0].getresponse()
    read_first_word(held)
    for number, prompt in enumerate(("hold", "hello"), 1):
        connections.append(fake.sent(CHAT, asking(prompt, stream=True)))
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
    assert fake.figure("requests_deferred") == 1, "the other waits behind it"
    first.close()
    connections[1].close()
    assert said_in(second.read().decode()).startswith("Section 3")
    connections[2].close()


def test_an_answer_that_is_not_streamed_is_interrupted_for_a_stream_but_not_to_count_tokens(fake):
    with fake.sent(CHAT, asking("slow", max_tokens=3000)).sock as slow:
        wait_until(lambda: fake.figure("requests_processing") == 1)
        counted = fake.sent("/tokenize", {"content": "hello"})
        wait_until(lambda: fake.figure("requests_deferred") == 1)
        assert fake.chat("hello", stream=True).status == 200
        slow.setblocking(False)
        with pytest.raises(BlockingIOError):  # it is begun again
            slow.recv(1)
        counted.close()
    wait_until(lambda: is_idle(fake))


def test_a_stream_that_waits_for_its_turn_is_kept_alive(tmp_path):
    with serving(tmp_path, fake=True) as served:
        held = served.sent(CHAT, asking("hold", stream=True))
        first = held.getresponse()
        read_first_word(first)
        waiting = []
        for number, prompt in enumerate(("hello", "hold", "hello"), 1):
            waiting.append(served.sent(CHAT, asking(prompt, stream=True)))
            wait_until(lambda number=number: served.figure("requests_deferred") == number)
        replies = [connection.getresponse() for connection in waiting]
        assert [reply.readline() for reply in replies] == [b": ping\n"] * 3
        first.close()
        held.close()  # the next gets its turn, and the one after holds it
        assert said_in(replies[0].read().decode()).startswith("Section 3")
        served.process.send_signal(signal.SIGINT)
        refused = replies[2].read().decode()
        assert '"unavailable_error"' in refused
        assert "The server is shutting down." in refused
        assert "[DONE]" not in refused
        for connection in waiting:
            connection.close()


@pytest.mark.parametrize("stream", [False, True])
def test_who_leaves_gives_up_the_answer_or_the_place(fake, stream):
    first = fake.sent(CHAT, asking("slow", stream=stream))
    wait_until(lambda: fake.figure("requests_processing") == 1)
    second = fake.sent(CHAT, asking("slow", stream=stream))
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


def test_whenever_clients_leave_the_queue_gets_empty(fake):
    draw = random.Random(1)
    for _ in range(60):
        connection = fake.sent(CHAT, asking(draw.choice(("slow", "hold", "hello")), stream=draw.random() < 0.6))
        time.sleep(draw.choice((0, 0, 0.001, 0.005, 0.02)))
        connection.close()
    wait_until(lambda: is_idle(fake))
    assert fake.chat("hello").status == 200
    assert fake.figure("engine_restarts") == 0


# ---- errors


def test_an_error_is_no_stream_unless_the_answer_began(fake):
    for stream in (False, True):
        refused = fake.ask(CHAT, asking(" ", stream=stream, temperature=1000))
        assert refused.status == 400
        assert refused.headers["content-type"] == "application/json"
        assert refused.error["param"] == "temperature"
    failed = fake.ask(CHAT, asking("fail"))
    assert (failed.status, failed.error["message"][:10]) == (400, "The prompt")
    memory = fake.ask(CHAT, asking("oom"))
    assert (memory.status, memory.error["type"]) == (503, "unavailable_error")
    begun = fake.ask(CHAT, asking("oom", stream=True))
    assert begun.headers["content-type"].startswith("text/event-stream")
    assert begun.pieces[-1]["error"]["message"].startswith("Memory ran out")
    with fake.client() as client, pytest.raises(APIError, match="Memory ran out"):
        list(client.chat.completions.create(model="kvchat-pocket", messages=messages("oom"), stream=True))


def test_what_recovery_takes_back_is_not_sent_twice(fake):
    """The engine holds it back; the fake one does not, so that here the end is what counts."""
    assert fake.chat("waver").json["choices"][0]["message"]["content"] == "It begins well | and ends well."


def test_there_is_nothing_elsewhere(fake):
    for path in ("/", "/v1", "/v1/nothing", "/v1/models/other"):
        missing = fake.ask(path)
        assert missing.status == 404
        assert missing.error["message"]
    assert fake.ask("/v1/models", {}).status == 405
    assert fake.ask(CHAT).status == 405


def test_open_webui_adds_its_tools_only_to_a_model_that_can_call_them(fake, bundled):
    for served, calls in ((fake, True), (bundled, False)):
        (model,) = served.ask("/v1/models").json["data"]
        assert model["info"]["meta"]["capabilities"] == {"builtin_tools": calls, "vision": False, "usage": True}


@pytest.mark.parametrize("base", ["", "/v1"])
def test_an_address_without_its_end_serves_too(fake, base):
    with OpenAI(base_url=f"http://127.0.0.1:{fake.port}{base}", api_key="none") as client:
        assert client.models.retrieve("kvchat-pocket").id == client.models.list().data[0].id
        (choice,) = client.chat.completions.create(model="kvchat-pocket", messages=messages("hello")).choices
        assert choice.message.content.startswith("Section 3")
        assert client.completions.create(model="kvchat-pocket", prompt="hello").choices


def test_another_model_is_named(fake):
    missing = fake.chat("hello", model="gpt-5")
    assert (missing.status, missing.error["code"], missing.error["param"]) == (404, "model_not_found", "model")
    assert "kvchat-pocket" in missing.error["message"]
    assert fake.chat("hello", model="kvchat-pocket").status == fake.chat("hello", model="bundled").status == 200


# ---- calls of tools

WEATHER = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


def test_a_call_is_told_apart_whole_and_in_pieces(fake):
    with fake.client() as client:
        asked = {"model": "kvchat-pocket", "messages": messages("call"), "tools": WEATHER}
        choice = client.chat.completions.create(**asked).choices[0]
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I look.")
        (call,) = choice.message.tool_calls
        assert (call.function.name, call.function.arguments) == ("weather", '{"city": "Paris"}')
        pieces = [piece.choices[0] for piece in client.chat.completions.create(**asked, stream=True)]
        assert "".join(piece.delta.content or "" for piece in pieces) == "I look."
        (told,) = [one for piece in pieces for one in piece.delta.tool_calls or ()]
        assert (told.index, told.function.name, told.function.arguments) == (0, "weather", call.function.arguments)
        assert told.id != call.id
        assert pieces[-1].finish_reason == "tool_calls"
        with client.chat.completions.stream(**asked) as stream:
            read = stream.get_final_completion().choices[0].message  # which has fields that only this client knows
        answer = {"role": "tool", "tool_call_id": read.tool_calls[0].id, "content": "Sunny."}
        told_more = client.chat.completions.create(**asked | {"messages": [*asked["messages"], read, answer]})
        assert told_more.choices[0].message.content.startswith("Section 3")
        without = client.chat.completions.create(model="kvchat-pocket", messages=messages("call")).choices[0]
        assert (without.finish_reason, "<tool_call>" in without.message.content) == ("stop", True)


# ---- an engine that dies


def test_an_engine_that_dies_is_started_again(tmp_path):
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


def test_while_the_model_is_loaded_clients_are_told_to_come_again(tmp_path):
    with serving(tmp_path, fake=True, is_awaited=False, FAKE_LOAD="wait") as served:
        assert served.ask("/health").status == 503
        early = served.chat("hello")
        assert (early.status, "retry-after" in early.headers) == (503, True)
        assert served.ask("/metrics").status == 200


@pytest.mark.parametrize("load", ["crash", "refuse"])
def test_a_model_that_cannot_be_loaded_ends_the_server(tmp_path, load):
    with serving(tmp_path, fake=True, FAKE_LOAD=load) as served:
        assert served.process.wait(60) == 1
    assert "Traceback" not in "".join(served.said)


# ---- the end


@pytest.mark.parametrize("way", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_with_the_answer_in_progress(tmp_path, way):
    with serving(tmp_path, fake=True) as served:
        connection = served.sent(CHAT, asking("hold", stream=True))
        held = connection.getresponse()
        read_first_word(held)
        whole = []
        waiting = threading.Thread(target=lambda: whole.append(served.chat("hello").status))
        waiting.start()
        wait_until(lambda: served.figure("requests_deferred") == 1)
        began = time.monotonic()
        served.process.send_signal(way)
        assert b'"error"' in held.read()
        held.close()
        connection.close()
        waiting.join()
        assert whole == [503]
        assert served.process.wait(60) == 0
        assert time.monotonic() - began < 30
    assert "".join(served.said).count("\n") == 3  # the address, what runs, and the room for talks


def test_an_address_in_use_is_said(fake, tmp_path):
    with serving(tmp_path, "--port", str(fake.port), fake=True) as second:
        assert second.process.wait(60) == 2
    assert "--port 0" in "".join(second.said)
