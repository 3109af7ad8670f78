"""The server with the bundled model, used by OpenAI's client and by plain HTTP."""

import json
import os
import re
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest
from openai import BadRequestError
from prometheus_client.parser import text_string_to_metric_families
from support.patience import wait_until
from support.served import messages, serving
from typer.testing import CliRunner

from kvchat.cli.main import app

pytestmark = pytest.mark.slow("the server's child loads the bundled model")
QUESTION = "What is the capital of France?"
SEA = "The sea was calm and the whale went on. " * 40
STORY = "Tell me a story about a whale that has lost its way."
TITLE = "### Task: give a title of three words to this talk. " + SEA
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "strict": True,
            "description": "The weather in a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
GREEDY = {"model": "bundled", "temperature": 0}


@pytest.fixture(scope="module")
def client(bundled):
    with bundled.client() as client:
        yield client


def is_stable(folder: Path) -> bool:
    """True if the folder has files and none grows for a second."""
    sizes = []
    for _ in range(2):
        sizes.append([file.stat().st_size for file in folder.iterdir()] if folder.is_dir() else [])
        time.sleep(1)
    return bool(sizes[0]) and sizes[0] == sizes[1]


def cached(answer) -> int:
    return answer.usage.prompt_tokens_details.cached_tokens


# ---- answers


def test_answers_match_kvchat_ask(client):
    command = ["ask", QUESTION, "--system", "Be brief.", "--temperature", "0", "--json"]
    result = json.loads(CliRunner().invoke(app, command, catch_exceptions=False).stdout)
    turns = [{"role": "developer", "content": "Be brief."}, *messages(QUESTION)]
    answer = client.chat.completions.create(messages=turns, **GREEDY)
    choice = answer.choices[0]
    assert (choice.message.content, choice.finish_reason) == (result["text"], "stop")
    assert answer.usage.completion_tokens == result["stats"]["generated_tokens"]
    assert answer.usage.prompt_tokens == result["stats"]["prompt_tokens"]
    in_parts = [{"role": "system", "content": [{"type": "text", "text": "Be brief."}]}, *messages(QUESTION)]
    assert client.chat.completions.create(messages=in_parts, **GREEDY).choices[0].message.content == result["text"]


def test_a_stream_matches_the_whole_answer(client):
    whole = client.chat.completions.create(messages=messages(STORY), max_tokens=60, **GREEDY)
    request = {"messages": messages(STORY), "max_completion_tokens": 60, "stream": True, **GREEDY}
    pieces = list(client.chat.completions.create(**request, stream_options={"include_usage": True}))
    assert pieces[0].choices[0].delta.role == "assistant"
    pieces_of_text = [piece.choices[0].delta.content or "" for piece in pieces if piece.choices]
    assert len([text for text in pieces_of_text if text]) > 3
    assert "".join(pieces_of_text) == whole.choices[0].message.content
    assert pieces[-2].choices[0].finish_reason == whole.choices[0].finish_reason == "length"
    assert pieces[-1].usage.completion_tokens == whole.usage.completion_tokens == 60
    assert pieces[-1].choices == []
    assert len({piece.id for piece in pieces}) == 1
    assert all(piece.usage is None for piece in client.chat.completions.create(**request))


def test_completions_continue_a_text_without_the_template(client):
    request = {"prompt": "Once upon a time, there was", "max_tokens": 24, **GREEDY}
    whole = client.completions.create(**request)
    text = whole.choices[0].text
    assert len(text.split()) > 8
    assert client.completions.create(prompt="Once upon a time", **GREEDY).usage.completion_tokens == 16
    assert "".join(piece.choices[0].text for piece in client.completions.create(**request, stream=True)) == text
    word = text.split()[5]
    stopped = client.completions.create(**request, stop=[word])
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.choices[0].text == text[: text.index(word)]


def test_sampling_parameters_take_effect(client):
    def drawn(**fields):
        request = {"model": "bundled", "messages": messages(STORY), "max_tokens": 24, "temperature": 1.0} | fields
        extra = {name: request.pop(name) for name in ("top_k", "repetition_penalty") if name in request}
        return client.chat.completions.create(**request, extra_body=extra).choices[0].message.content

    assert drawn(seed=3) == drawn(seed=3) != drawn(seed=4)
    greedy = drawn(temperature=0)
    assert drawn(top_k=1) == drawn(top_p=1e-6) == drawn(top_p=0) == greedy
    assert drawn(temperature=0, repetition_penalty=5.0) != greedy


def test_token_counts_match_the_prompt(bundled):
    body = {"messages": messages(QUESTION, "Paris.", STORY)}
    answer = bundled.ask("/v1/chat/completions", body | {"max_tokens": 1}).json
    counted = bundled.ask("/v1/chat/completions/input_tokens", body).json["input_tokens"]
    tokens = bundled.ask("/tokenize", body).json
    assert counted == answer["usage"]["prompt_tokens"] == tokens["count"] == len(tokens["tokens"])
    assert bundled.ask("/tokenize", {"content": "whale"}).json["count"] < 4
    assert bundled.ask("/tokenize", {}).status == bundled.ask("/tokenize", body | {"content": "a"}).status == 400


def test_an_answer_fits_the_requested_schema(client):
    schema = {"type": "object", "properties": {"city": {"enum": ["Rome", "Paris"]}}, "required": ["city"]}
    place = {"name": "place", "schema": {**schema, "additionalProperties": False}}
    held = {"type": "json_schema", "json_schema": place}
    request = {"messages": messages(QUESTION), "max_tokens": 100, **GREEDY}
    answer = client.chat.completions.create(**request, response_format=held)
    assert json.loads(answer.choices[0].message.content)["city"] in ("Rome", "Paris")
    assert answer.choices[0].finish_reason == "stop"
    pieces = client.chat.completions.create(**request, response_format=held, stream=True)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == answer.choices[0].message.content
    free = client.chat.completions.create(**request, response_format={"type": "json_object"})
    assert free.choices[0].message.content.startswith("{")


# ---- reused prefixes


def test_a_conversation_is_reused_after_other_requests(client):
    turns = [SEA + "Who was calm?"]
    answer = client.chat.completions.create(messages=messages(*turns), max_tokens=16, **GREEDY)
    for question in ("And the whale?", "And then?"):
        title = client.chat.completions.create(messages=messages(TITLE), max_tokens=4, **GREEDY)
        assert title.kvchat["mode"] == "full"
        turns += [answer.choices[0].message.content, question]
        stored = answer.usage.total_tokens
        answer = client.chat.completions.create(messages=messages(*turns), max_tokens=16, **GREEDY)
        assert cached(answer) in (stored, stored - 1)
        assert answer.kvchat["resumed"]["from"] == "memory"
        assert answer.timings["cache_n"] == cached(answer)
        assert answer.timings["prompt_n"] == answer.usage.prompt_tokens - cached(answer) < 30
    again = client.chat.completions.create(messages=messages(TITLE), max_tokens=4, **GREEDY)
    assert cached(again) == again.usage.prompt_tokens - 1


def test_saved_conversations_survive_an_engine_crash(tmp_path):
    turns = [SEA + "Who was calm?"]
    with serving(tmp_path, "--keep") as served:
        answer = served.chat(*turns, max_tokens=8).json
        turns += [answer["choices"][0]["message"]["content"], "And then?"]
        folder = tmp_path / "served"
        wait_until(lambda: is_stable(folder))
        children = subprocess.run(["pgrep", "-P", str(served.process.pid)], capture_output=True, text=True, check=True)
        os.kill(int(children.stdout.split()[0]), signal.SIGKILL)
        wait_until(lambda: served.figure("engine_restarts") == 1)
        wait_until(lambda: served.ask("/health").status == 200)
        second = served.chat(*turns, max_tokens=8).json
        assert second["kvchat"]["resumed"]["from"] == "disk"
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= answer["usage"]["prompt_tokens"]


# ---- modes


def test_each_request_has_its_own_mode(client, bundled):
    def ask(**fields):
        body = {"kvchat": fields} if fields else {}
        return client.chat.completions.create(messages=messages(SEA), max_tokens=12, extra_body=body, **GREEDY)

    full = ask()
    narrow = ask(mode="streaming", budget=128, params={"sink": 8})
    params = narrow.kvchat["params"]
    assert (narrow.kvchat["mode"], params["budget"], params["sink"]) == ("streaming", 128, 8)
    assert narrow.kvchat["read"] < narrow.kvchat["stored"] / 2
    assert 0 < narrow.kvchat["coverage"] < 1
    assert narrow.kvchat["reduced"] > 0
    assert ask(mode="speculative").kvchat["params"]["budget"] != 128
    (of_server,) = bundled.ask("/v1/models").json["data"]
    assert of_server["kvchat"]["mode"] == "full"
    again = ask()
    assert (again.kvchat["mode"], again.kvchat["read_share"]) == ("full", 1.0)
    assert again.choices[0].message.content == full.choices[0].message.content
    for wrong in (
        {"mode": "fast"},
        {"budget": 64},
        {"mode": "streaming", "budget": 1},
        {"params": {"sinks": 3}},
        {"mode": "streaming", "budget": 256, "params": {"budget": 512}},
    ):
        refused = bundled.chat(SEA, kvchat=wrong)
        assert refused.status == 400, wrong
        assert refused.error["message"]


TEMPLATE = (
    "{% if shout %}LOUD {% endif %}{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% if tools %}Write <tool_call>{}</tool_call>.\n{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{% for call in m.tool_calls or [] %}<tool_call>"
    "{{ call.function | tojson }}</tool_call>{% endfor %}\n{% endfor %}assistant:"
)


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """A server with its own settings and template."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "template.jinja").write_text(TEMPLATE)
    flags = ("--mode", "streaming", "--budget", "256", "--max-new-tokens", "5", "--temperature", "0", "--system", SEA)
    with serving(folder, *flags, "--chat-template", str(folder / "template.jinja")) as served:
        yield served
    assert not (folder / "served").exists(), "nothing is saved without --keep"


def test_options_of_the_server_set_mode_and_limits(own):
    answer = own.ask("/v1/chat/completions", {"messages": messages(STORY)}).json
    assert (answer["kvchat"]["mode"], answer["kvchat"]["params"]["budget"]) == ("streaming", 256)
    assert (answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]) == (5, "length")
    assert answer["usage"]["prompt_tokens"] > 300
    brief = [{"role": "system", "content": "Be brief."}, *messages(STORY)]
    short = own.ask("/v1/chat/completions", {"messages": brief}).json
    assert short["usage"]["prompt_tokens"] < 100
    for path, request in (("chat/completions", {"messages": messages(STORY)}), ("completions", {"prompt": STORY})):
        endless = own.ask(f"/v1/{path}", {**request, "max_tokens": -1, "stop": list("aeiou")}).json
        assert endless["choices"][0]["finish_reason"] == "stop"
    full = own.chat(STORY, kvchat={"mode": "full"}, max_tokens=7).json
    assert (full["kvchat"]["mode"], full["usage"]["completion_tokens"]) == ("full", 7)


# ---- tools and probabilities


def test_a_template_gets_variables_tools_and_their_results(own):
    def count(turns, **fields):
        body = {"messages": turns, **fields}
        return own.ask("/v1/chat/completions/input_tokens", body).json["input_tokens"]

    question = messages("What is the weather in Paris?")
    bare, with_tools = count(question), count(question, tools=TOOLS)
    assert count(question, chat_template_kwargs={"shout": True}) > bare
    assert count(question, chat_template_kwargs={"shout": False}) == bare
    refused = own.chat(QUESTION, chat_template_kwargs={"whisper": True})
    assert (refused.status, refused.error["param"]) == (400, "whisper")
    assert "shout" in refused.error["message"]
    assert own.chat(QUESTION, reasoning_effort="low").status == 400
    assert with_tools > bare + 40
    assert count(question, tools=TOOLS, tool_choice="none") == count(question, tools=[]) == bare
    function = {"name": "weather", "arguments": '{"city": "Paris"}'}
    called = {"id": "1", "type": "function", "function": function}
    conversation = [*question, {"role": "assistant", "content": None, "tool_calls": [called]}]
    conversation.append({"role": "tool", "tool_call_id": "1", "content": "Sunny."})
    assert count(conversation, tools=TOOLS) > with_tools + 20
    first = own.ask("/v1/chat/completions", {"messages": question, "tools": TOOLS, "max_tokens": 1}).json
    assert first["choices"][0]["finish_reason"] == "length"
    answer = own.ask("/v1/chat/completions", {"messages": conversation, "tools": TOOLS, "max_tokens": 4}).json
    assert answer["choices"][0]["message"]["content"]
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= with_tools - 1
    spelled = [{"type": "function", "function": {"name": "weather", "description": "<|im_end|>" * 9}}]
    assert count(question, tools=spelled) > bare + 9 * 3  # spelled out, not a special token


def test_a_forced_tool_is_called(own):
    city = {"type": "object", "properties": {"city": {"enum": ["Rome", "Paris"]}}, "required": ["city"]}
    function = {"name": "weather", "parameters": city | {"additionalProperties": False}}
    tools = [{"type": "function", "function": function}, {"type": "function", "function": {"name": "time"}}]
    body = {"messages": messages(QUESTION), "tools": tools, "max_tokens": 100}
    named = {"type": "function", "function": {"name": "weather"}}
    for choice, names in (("required", ("weather", "time")), (named, ("weather",))):
        (answer,) = own.ask("/v1/chat/completions", body | {"tool_choice": choice}).json["choices"]
        (call,) = answer["message"]["tool_calls"]
        assert (answer["finish_reason"], answer["message"]["content"]) == ("tool_calls", None)
        assert call["function"]["name"] in names
        assert json.loads(call["function"]["arguments"]) in ({"city": "Rome"}, {"city": "Paris"}, {})
        stream = own.ask("/v1/chat/completions", body | {"tool_choice": choice, "stream": True})
        pieces = [piece["choices"][0] for piece in stream.pieces]
        (part,) = [part for piece in pieces for part in piece["delta"].get("tool_calls", ())]
        assert (part["function"], pieces[-1]["finish_reason"]) == (call["function"], "tool_calls")
    tools[1]["function"]["parameters"] = {"type": "obj"}
    refused = own.ask("/v1/chat/completions", body | {"tool_choice": "required"})
    assert (refused.status, "obj" in refused.error["message"]) == (400, True)


def test_logprobs_are_those_of_the_sampled_tokens(client):
    request = {"messages": messages(STORY), "max_tokens": 24, "logprobs": True, "top_logprobs": 2}
    choice = client.chat.completions.create(**request, **GREEDY).choices[0]
    scores = choice.logprobs.content
    assert "".join(one.token for one in scores) == choice.message.content
    assert all(len(one.top_logprobs) == 2 and one.top_logprobs[0].token == one.token for one in scores)
    assert all(one.top_logprobs[1].logprob <= one.logprob <= 0 for one in scores)
    pieces = [piece.choices[0] for piece in client.chat.completions.create(**request, stream=True, **GREEDY)]
    streamed = [one for piece in pieces if piece.logprobs for one in piece.logprobs.content]
    assert [one.token for one in streamed] == [one.token for one in scores]
    assert [one.logprob for one in streamed] == pytest.approx([one.logprob for one in scores], abs=1e-3)
    warm = client.chat.completions.create(
        messages=messages(STORY), max_tokens=24, logprobs=True, temperature=5.0, seed=1, model="bundled"
    )
    assert min(one.logprob for one in warm.choices[0].logprobs.content) < -3  # the model's own, before the temperature
    assert warm.choices[0].logprobs.content[0].top_logprobs == []
    text = client.completions.create(prompt="Once upon a time", logprobs=3, **GREEDY).choices[0]
    assert "".join(text.logprobs.tokens) == text.text
    assert [len(top) for top in text.logprobs.top_logprobs] == [3] * 16
    assert [text.text[at:][:1] for at in text.logprobs.text_offset] == [token[:1] for token in text.logprobs.tokens]
    assert client.completions.create(prompt="Once upon a time", **GREEDY).choices[0].logprobs is None


def test_penalties_reduce_repetition(client):
    def drawn(**fields):
        request = {"prompt": "one two three one two three one two three", "max_tokens": 40, "logprobs": 0}
        return client.completions.create(**request, **fields, **GREEDY).choices[0].logprobs.tokens

    free = drawn()
    assert drawn(presence_penalty=0, frequency_penalty=0.0) == free
    repeated = len(free) - len(set(free))
    for fields in ({"presence_penalty": 2}, {"frequency_penalty": 2}):
        held = drawn(**fields)
        assert len(held) - len(set(held)) < repeated
    liked = drawn(frequency_penalty=-2)
    assert len(set(liked)) < len(set(free))


# ---- refusals


def test_a_conversation_longer_than_the_context_is_refused(client):
    with pytest.raises(BadRequestError) as caught:
        client.chat.completions.create(messages=messages("word " * 20_000), **GREEDY)
    assert caught.value.type == "exceed_context_size_error"
    assert caught.value.code == "context_length_exceeded"
    assert caught.value.body["n_prompt_tokens"] > 20_000 > caught.value.body["n_ctx"] == 16384
    with pytest.raises(BadRequestError):
        client.chat.completions.create(messages=messages("word " * 20_000), stream=True, **GREEDY)


MANY_WAYS = {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(1000)}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 2}, "n"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": -2.5}, "frequency_penalty"),
        ({"logit_bias": {"5": 3}}, "logit_bias"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}, "messages.0.content"),
        ({"logprobs": 3}, "logprobs"),
        ({"top_logprobs": 3}, None),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "grammar"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "obj"}}}}, None),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": MANY_WAYS}}}, None),
        ({"tools": TOOLS}, "tools"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "time"}}}, None),
        ({"tool_choice": "required"}, None),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}, "tools.0.function.parameters"),
        ({"tools": TOOLS, "parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"tools": TOOLS, "response_format": {"type": "json_object"}}, None),
        ({"tools": [{"type": "function", "function": {}}]}, "tools.0.function.name"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"messages": [*messages("Hi."), {"role": "tool", "content": "a", "tool_call_id": "1"}]}, "messages"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages.0"),
        ({"messages": [{"role": "function", "content": "a"}]}, "messages.0.role"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages.0.content"),
        ({"messages": [{"role": "assistant", "content": " "}]}, None),
        ({"messages": []}, "messages"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "0.5"}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop": [5]}, "stop.0"),
        ({"stop": 5}, "stop"),
        ({"mirostat": 2}, "mirostat"),
        ({"seed": -(2**70)}, "seed"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_unsupported_fields_are_refused(bundled, fields, param):
    refused = bundled.ask("/v1/chat/completions", {"messages": messages(QUESTION), **fields})
    assert refused.status == 400
    assert refused.error["type"] == "invalid_request_error"
    assert refused.error["param"] == param
    assert refused.error["message"]
    assert "max_new_tokens" not in refused.error["message"], "no request has this name"


def test_neutral_fields_are_accepted(bundled):
    neutral = {
        "n": 1, "presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "logprobs": False, "tools": [],
        "tool_choice": "none", "user": "me", "metadata": {"a": "b"}, "stop": None,
        "stream": False, "seed": 1, "store": False, "top_p": 1, "min_p": 0, "top_k": 0, "max_tokens": 4,
        "mirostat": None, "response_format": {"type": "text", "grammar": None}, "model": "", "reasoning_effort": "none",
        "parallel_tool_calls": False, "prompt_cache_retention": "24h",
    }  # fmt: skip
    assert bundled.chat(QUESTION, **neutral).status == 200
    assert bundled.chat(QUESTION, stop=["", ""], seed=-1, top_k=-1, max_tokens=4).status == 200
    body = json.dumps({"messages": messages(QUESTION), "max_tokens": 4}).encode()
    assert bundled.ask("/v1/chat/completions", b"\xef\xbb\xbf" + body, Content_Type="Application/JSON").status == 200
    reply = {"role": "assistant", "content": "Paris.", **dict.fromkeys(("refusal", "tool_calls", "audio", "images"))}
    reply["provider_specific_fields"] = {"refusal": None}
    body = {"messages": [*messages(QUESTION), reply, *messages("Sure?")], "max_tokens": 4}
    assert bundled.ask("/v1/chat/completions", body).status == 200


# ---- metrics


def test_prometheus_reads_the_metrics(bundled):
    before = bundled.figure("tokens_predicted_total")
    answer = bundled.chat(STORY, max_tokens=9).json
    families = {one.name: one for one in text_string_to_metric_families(bundled.ask("/metrics").text)}
    drawn = families["kvchat:tokens_predicted"]
    assert drawn.type == "counter"
    assert drawn.samples[0].value == before + answer["usage"]["completion_tokens"]
    assert families["kvchat:kv_tokens"].samples[0].value == answer["kvchat"]["stored"]
    assert families["kvchat:time_to_first_token_seconds"].type == "histogram"
    assert all(re.fullmatch(r"kvchat:[a-z_]+", name) for name in families)


# ---- many clients at once


def test_many_clients_get_their_own_answers_and_reread_nothing(bundled):
    """Eight clients continue conversations and ask for titles in between; 200 requests in the long form."""
    rounds, clients = 25 if "KVCHAT_TEST_BODIES" in os.environ else 5, 8
    problems: list[str] = []
    reread: list[int] = []
    levels: list[float] = []

    def converse(number):
        with bundled.client() as client:
            turns, stored = [f"My number is {number}{number}{number}. {SEA[:400]}Which number is mine?"], 0
            for turn in range(rounds):
                if turn % 5 == number % 5:
                    title = messages(f"Title {number}: {TITLE[:300]}")
                    client.chat.completions.create(messages=title, max_tokens=4, **GREEDY)
                    continue
                answer = client.chat.completions.create(messages=messages(*turns), max_tokens=6, **GREEDY)
                text = answer.choices[0].message.content
                reread.append(max(0, stored - cached(answer)))
                stored = cached(answer) + answer.timings["prompt_n"] + answer.usage.completion_tokens - 1
                alone = answers.setdefault(tuple(turns), text)
                if alone != text:
                    problems.append(f"{number}: {text!r} is not {alone!r}")
                turns += [text, f"And {number}{turn}?"]
                levels.append(bundled.figure("process_bytes"))

    answers: dict[tuple[str, ...], str] = {}
    threads = [threading.Thread(target=converse, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems
    assert len(answers) == clients * rounds * 4 // 5
    assert sum(reread) == 0
    half = len(levels) // 2
    assert max(levels[half:]) < 1.25 * max(levels[:half])
    for turns, text in list(answers.items())[::20]:  # alone, without a cache
        again = bundled.chat(*turns, max_tokens=6).json
        assert again["choices"][0]["message"]["content"] == text
