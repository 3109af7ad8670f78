"""Bodies of any kind: each gets an answer or a reason, and the server keeps running.

``KVCHAT_TEST_BODIES=2000`` sends that many to the fake engine, and a tenth of them to the bundled model.
"""

import json
import os
import random
from collections.abc import Callable
from typing import Any

import pytest
from support.served import Served

BODIES = int(os.environ.get("KVCHAT_TEST_BODIES", "150"))
PATHS = ("/v1/chat/completions", "/v1/completions", "/tokenize", "/v1/chat/completions/input_tokens")
ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, -(2**70), 10**30, 0.5, -0.0, 1e308, "", " ", "a", "\x00", "\ufdd1",
    "é" * 300, "\U0001f600", "<|im_end|>", [], [[]], [None], ["a"], {}, {"a": 1}, [{}], [1, "a"], "NaN", "nan",
)  # fmt: skip
FIELDS = (
    "model", "messages", "prompt", "content", "stream", "stream_options", "max_tokens", "max_completion_tokens",
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "stop", "kvchat", "n", "logprobs",
    "presence_penalty", "logit_bias", "tools", "response_format", "chat_template_kwargs", "reasoning_effort", "user",
    "best_of", "echo", "suffix", "metadata", "nothing", "", "__class__", "top_logprobs", "tool_choice",
)  # fmt: skip


TOOL_RESULT = {"role": "tool", "tool_call_id": "1", "content": "a"}


def valid(path: str, draw: random.Random) -> dict[str, Any]:
    turns: list[dict[str, Any]] = [{"role": draw.choice(("user", "system", "assistant")), "content": "a"}]
    if draw.random() < 0.3:
        function = {"name": "f", "arguments": "{}"}
        called = {"id": "1", "type": "function", "function": function}
        turns = [draw.choice(({"role": "assistant", "content": None, "tool_calls": [called]}, TOOL_RESULT))]
    body: dict[str, Any] = {"max_tokens": 2, "temperature": 0} if path.startswith("/v1") else {}
    if path == "/v1/completions":
        return body | {"prompt": "Once"}
    if path == "/v1/chat/completions" and draw.random() < 0.3:
        body |= {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]}
    return body | {"messages": [{"role": "user", "content": "Hello!"}, *turns][: draw.randint(1, 2)]}


def broken(body: Any, draw: random.Random) -> Any:
    """A body with an odd value somewhere."""
    if isinstance(body, dict) and body and draw.random() < 0.7:
        name = draw.choice([*body, draw.choice(FIELDS)])
        return {**body, name: broken(body.get(name), draw) if draw.random() < 0.5 else draw.choice(ODD)}
    if isinstance(body, list) and body and draw.random() < 0.7:
        return [broken(one, draw) for one in body]
    return draw.choice(ODD)


def cut(raw: bytes, draw: random.Random) -> bytes:
    return raw[: draw.randrange(len(raw) + 1)]


def flipped(raw: bytes, draw: random.Random) -> bytes:
    at = draw.randrange(len(raw))
    return raw[:at] + bytes([draw.randrange(256)]) + raw[at + 1 :]


def nested(_: bytes, draw: random.Random) -> bytes:
    depth = draw.choice((10, 1000, 100_000))
    return b'{"messages": ' + b"[" * depth + b"]" * draw.choice((0, depth)) + b"}"


DAMAGES: tuple[Callable[[bytes, random.Random], bytes], ...] = (cut, flipped, nested, lambda raw, _: raw)


def body_of(number: int) -> tuple[str, bytes]:
    draw = random.Random(number)
    path = draw.choice(PATHS)
    body = broken(valid(path, draw), draw)
    raw = json.dumps(body, ensure_ascii=draw.random() < 0.5).encode("utf-8", "surrogatepass")
    return path, raw if draw.random() < 0.6 else draw.choice(DAMAGES)(raw, draw)


@pytest.mark.parametrize(("server", "bodies"), [("fake", BODIES), ("bundled", BODIES // 10)])
def test_every_body_gets_an_answer_or_a_reason(server, bodies, request, count):
    served: Served = request.getfixturevalue(server)
    for number in range(bodies):
        path, raw = body_of(number)
        reply = served.ask(path, raw)
        assert reply.status in (200, 400, 404, 413), (number, path, raw[:300], reply.text)
        count[str(reply.status)] += 1
        if reply.status != 200:
            assert reply.error["message"], (number, raw[:300])
            assert reply.headers["content-type"] == "application/json"
    assert min(count["200"], count["400"]) >= bodies // 25
    assert served.chat("hello", max_tokens=2).status == 200
    assert served.figure("engine_restarts") == 0
    assert "Traceback" not in "".join(served.said)
