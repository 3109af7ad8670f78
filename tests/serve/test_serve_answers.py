"""Answers as clients get them: thoughts apart, streams like whole answers; and a command that lacks packages."""

import itertools
import json
from types import SimpleNamespace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.fake_engine import CALLS
from support.served import messages
from transformers import AutoTokenizer
from transformers.cli.serving.utils import get_response_template

from kvchat import libraries, paths
from kvchat.cli import serve as command
from kvchat.config.sources import Resolved
from kvchat.engine.template import ChatTemplate
from kvchat.errors import UsageError
from kvchat.protocol.figures import Stats
from kvchat.protocol.messages import Finished, Load, Loaded, Sampling, Started, Text, parse_args
from kvchat.serve.answers import Answer, Calls, timings
from kvchat.serve.app import framed
from kvchat.serve.requests import ChatRequest, Defaults

THOUGHTFUL = "<think>\nThey ask, so </ I answer.\n</think>\n\nParis, </think> of course."


def streamed(answer: Answer, text: str, cuts: list[int], reason: str) -> list[dict]:
    """The choices of a stream's pieces, fed by texts that end at ``cuts``."""
    pieces = [*answer.begin()]
    for begin, end in itertools.pairwise([0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]):
        answer.feed(Text(text[begin:end], 1))
        pieces += answer.more()
    pieces += answer.end(Finished(reason, text, Stats()), None)
    return [piece["choices"][0] for piece in pieces]


def thought_and_text(choices: list[dict]) -> tuple[str, str]:
    """The thought and the text."""
    names = "reasoning_content", "content"
    return tuple("".join(choice["delta"].get(name, "") for choice in choices) for name in names)


def whole(answer: Answer, text: str, reason: str = "eos") -> dict:
    """The choice of an answer that is not streamed."""
    answer.feed(Text(text, 1))
    return answer.whole(Finished(reason, text, Stats()), None)["choices"][0]


@pytest.mark.parametrize("streams_usage", [False, True])
def test_a_stream_reports_timings_once_at_its_end(streams_usage):
    pieces = [*Answer("m", is_chat=True, streams_usage=streams_usage).end(Finished("eos", "", Stats(9, 3)), None)]
    assert ["timings" in piece for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert bool(pieces[-1].get("usage")) == streams_usage


@given(
    text=st.sampled_from([THOUGHTFUL, THOUGHTFUL.removeprefix("<think>\n"), "Paris, <think>.", "<thin", ""]),
    begun=st.booleans(),
    cuts=st.lists(st.integers(0, len(THOUGHTFUL)), max_size=9),
    reason=st.sampled_from(["eos", "length"]),
)
@example(text=THOUGHTFUL, begun=True, cuts=[2], reason="eos")
def test_streamed_pieces_match_the_whole_answer(text, begun, cuts, reason):
    answers = Answer("m", is_chat=True), Answer("m", is_chat=True)
    for answer in answers:
        answer.feed(Started(9, 0, "</think>" if begun else ""))
    message = whole(answers[0], text, reason)["message"]
    separated = message.get("reasoning_content", ""), message["content"]
    assert thought_and_text(streamed(answers[1], text, cuts, reason)) == separated
    if text == THOUGHTFUL and not begun:
        assert separated == ("They ask, so </ I answer.", "Paris, </think> of course.")


CALLING = (
    'I look.\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n'
    '<tool_call>{"name": "g", "arguments": {}}</tool_call>'
)


BROKEN = 'I look. <tool_call>{"name": "f", "arguments": {}}</tool_call> <tool_call>{"name": "g", "arg</tool_call> Oh.'


@given(
    text=st.sampled_from(
        [CALLING, f"<think>\nhm</think>\n\n{CALLING}", BROKEN, "I <look> for a <tool_cal", "Paris. <think>So", ""]
    ),
    cuts=st.lists(st.integers(0, len(CALLING)), max_size=9),
)
def test_streamed_tool_calls_match_the_whole_answer(text, cuts):
    message = whole(calling(), text)["message"]
    choices = streamed(calling(), text, cuts, "eos")
    calls = [call["function"] for choice in choices for call in choice["delta"].get("tool_calls", ())]
    assert calls == [call["function"] for call in message.get("tool_calls", ())]
    assert len(calls) == (2 if CALLING in text else text == BROKEN)
    assert thought_and_text(choices)[1] == (message["content"] or "")
    assert choices[-1]["finish_reason"] == ("tool_calls" if calls else "stop")


def calling(form: str = CALLS, once: bool = False) -> Answer:
    return Answer("m", is_chat=True, calls=Calls(form, [], once))


@pytest.mark.parametrize(
    ("of_template", "written"),
    [
        (
            "[TOOL_CALLS]{{ name }}[ARGS]{{ arguments | tojson }}{{ eos_token }}",
            '[TOOL_CALLS]f[ARGS]{"a": {"b": 1}}[TOOL_CALLS]g[ARGS]{}',
        ),
        (
            "[TOOL_CALLS]{{ name }}[CALL_ID]{{ id }}[ARGS]{{ arguments | tojson }}",
            '[TOOL_CALLS]f[CALL_ID]abcdef123[ARGS]{"a": {"b": 1}}[TOOL_CALLS]g[CALL_ID]123456789[ARGS]{}',
        ),
        (
            "<|tool_call_start|>[{{ name }}(x='y')]<|tool_call_end|>",
            "<|tool_call_start|>[f(a={'b': 1}), g()]<|tool_call_end|>",
        ),
    ],
)
def test_calls_of_mistral_and_lfm2_are_found(of_template, written):
    tokenizer = AutoTokenizer.from_pretrained(paths.bundled_model_dir())
    for name, value in (("name", "c.function.name"), ("arguments", "c.function.arguments"), ("id", "c.id")):
        of_template = of_template.replace("{{ " + name, "{{ " + value)
    tokenizer.chat_template = (
        "{{ tools }}{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
        f"{of_template}{{% endfor %}}{{% endfor %}}"
    )
    form = ChatTemplate(tokenizer).calls
    message = whole(calling(form), f"I look.{written}")["message"]
    choices = streamed(calling(form), f"I look.{written}", list(range(len(written))), "eos")
    for calls in (message["tool_calls"], [call for one in choices for call in one["delta"].get("tool_calls", ())]):
        found = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]
        assert found == [("f", {"a": {"b": 1}}), ("g", {})]
    assert message["content"] == thought_and_text(choices)[1] == "I look."


def test_at_most_one_tool_call_is_sent_if_requested():
    message = whole(calling(once=True), CALLING)["message"]
    choices = streamed(calling(once=True), CALLING, [], "eos")
    for calls in (message["tool_calls"], [call for one in choices for call in one["delta"].get("tool_calls", ())]):
        assert [call["function"]["name"] for call in calls] == ["f"]


@pytest.mark.parametrize(
    ("call", "reason", "ending"),
    [
        *((f"{call}</tool_call>", "eos", "stop") for call in ('{"name": "f", "arguments": {"a": }', "[1]", '"f"', "{")),
        ('{"name": 7}</tool_call>', "eos", "stop"),
        ('{"name": "f", "argu', "length", "length"),  # cut off
    ],
)
def test_malformed_tool_calls_are_text(call, reason, ending):
    choice = whole(calling(), f"Oh. <tool_call>{call}", reason)
    assert (choice["finish_reason"], "tool_calls" in choice["message"]) == (ending, False)
    content = choice["message"]["content"].replace('"name":7', '"name": 7')
    assert call.removesuffix("</tool_call>").strip('"') in content


@pytest.mark.parametrize("reason", ["length", "eos"])
def test_a_tool_call_cut_off_in_its_arguments_is_text(reason):
    form = get_response_template(SimpleNamespace(), SimpleNamespace(config=SimpleNamespace(model_type="qwen3_5")))
    call = "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
    cut = f"{call}\n{call[: call.index('</function>')]}<parameter=b>\nto be wri"
    message = whole(calling(json.dumps(form)), cut, reason)["message"]
    assert [call["function"]["arguments"] for call in message["tool_calls"]] == ['{"a": "1"}']
    assert message["content"] == cut.removeprefix(call)


def test_timings_are_those_of_the_stats():
    stats = Stats(110, 10, 21, 131, prefill_tokens_per_s=50.0, decode_tokens_per_s=10.0)
    assert timings(stats) == {
        "cache_n": 10, "prompt_n": 100, "prompt_ms": 2000.0, "prompt_per_second": 50.0,
        "predicted_n": 21, "predicted_ms": 2000.0, "predicted_per_second": 10.0,
    }  # fmt: skip
    assert timings(Stats(10, 10))["prompt_ms"] == 0.0


@pytest.mark.parametrize("fields", [["reasoning_content"], ["reasoning"], ["reasoning", "reasoning_content"]])
def test_a_returned_thought_is_passed_to_the_template(fields):
    reply = {"role": "assistant", "content": "Paris.", **dict.fromkeys(fields, "They ask.")}
    request = ChatRequest.model_validate({"messages": [*messages("Where?"), reply, *messages("Sure?")]})
    turns = request.turns(Defaults(system="Be brief."))
    assert [turn.role for turn in turns] == ["system", "user", "assistant", "user"]
    assert (turns[2].content, json.loads(turns[2].more)) == ("Paris.", {"reasoning_content": "They ask."})


@pytest.mark.parametrize(
    ("sent", "expected"),
    [({"arguments": arguments}, {}) for arguments in ("", "null", None)]
    + [({}, {}), ({"arguments": {"a": 1}}, {"a": 1})],
)
def test_arguments_of_a_tool_call_become_an_object(sent, expected):
    """Without arguments, clients send "" or null or leave them out, and templates iterate over them."""
    called = {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", **sent}}]}
    (turn,) = ChatRequest.model_validate({"messages": [called]}).turns(Defaults())
    assert json.loads(turn.more)["tool_calls"][0]["function"] == {"name": "f", "arguments": expected}


def test_names_reach_the_template_and_cache_marks_do_not():
    mark = {"cache_control": {"type": "ephemeral"}}
    sent = [
        {"role": "user", "name": "bob", "content": [{"type": "text", "text": "Hi.", **mark}], **mark},
        {"role": "assistant", "name": "eve", "content": None},
    ]
    turns = ChatRequest.model_validate({"messages": sent}).turns(Defaults())
    assert [(turn.content, json.loads(turn.more)) for turn in turns] == [
        ("Hi.", {"name": "bob"}),
        ("", {"name": "eve"}),
    ]


@pytest.mark.parametrize("kind", ["json_object", "json_schema"])
def test_a_schema_can_be_next_to_the_type(kind):
    schema = {"type": "object", "properties": {"a": {}}}
    form = {"type": kind, "schema": schema, "json_schema": None}
    body = {"messages": messages("a"), "response_format": form}
    assert json.loads(ChatRequest.model_validate(body).json_schema()) == schema
    form |= {"type": "json_object", "schema": None}
    assert ChatRequest.model_validate(body).json_schema() == '{"type": "object"}'


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        *((None, ()), ("none", ()), ("auto", ()), ("required", ("f", "g"))),
        ({"type": "function", "function": {"name": "g"}}, ("g",)),
    ],
)
def test_a_tool_choice_names_the_tools_that_may_be_called(choice, names):
    tools = [{"type": "function", "function": {"name": name}} for name in "fg"]
    request = ChatRequest.model_validate({"messages": messages("a"), "tools": tools, "tool_choice": choice})
    assert request.must_call() == names
    assert bool(request.offered_tools()) == (choice != "none")


@pytest.mark.parametrize("stop", [None, "", [], ["", ""]])
def test_an_empty_stop_keeps_the_servers_own(stop):
    request = ChatRequest.model_validate({"messages": messages("a"), "stop": stop})
    assert request.sampling(Defaults(Sampling(stop=("x",))), 64).stop == ("x",)


def test_an_event_is_one_line_for_every_client():
    """httpx and others also end lines at these characters."""
    text = "a\u2028b\u2029c\u0085d"
    (line,) = framed({"said": text}).split("\n\n")[0].splitlines()
    assert json.loads(line.removeprefix("data: ")) == {"said": text}


def test_template_variables_override_the_servers():
    known = Loaded("m", "L", 1, "cpu", "float32", 64, 2, 2, 32, 64, "full", {}, template_variables=("depth", "other"))
    request = ChatRequest.model_validate({"messages": messages("a"), "chat_template_kwargs": {"depth": ["a", 2]}})
    args = request.template_args(Load(template_args=("depth=1", "other=x")), known)
    assert parse_args(args) == {"depth": ["a", 2], "other": "x"}


@pytest.mark.parametrize(
    ("used", "effort", "expected"),
    [
        ({"enable_thinking"}, "none", {"enable_thinking": False}),
        ({"enable_thinking"}, "low", {"enable_thinking": True}),
        ({"reasoning_effort"}, "low", {"reasoning_effort": "low"}),
        (set(), "none", {}),
    ],
)
def test_reasoning_effort_becomes_a_variable_of_the_template(used, effort, expected):
    known = Loaded("m", "L", 1, "cpu", "float32", 64, 2, 2, 32, 64, "full", {}, template_variables=(*used,))
    request = ChatRequest.model_validate({"messages": messages("a"), "reasoning_effort": effort})
    assert parse_args(request.template_args(Load(), known)) == expected


def test_a_silent_stream_is_kept_alive(fake):
    connection = fake.sent("/v1/chat/completions", {"messages": messages("hold"), "stream": True})
    response = connection.getresponse()
    lines = [response.readline() for _ in range(12)]
    response.close()
    connection.close()
    assert lines.count(b": ping\n") > 1


def test_missing_packages_name_the_install_command(monkeypatch):
    monkeypatch.setattr(libraries, "find_spec", lambda name: None if name == "prometheus_client" else name)
    with pytest.raises(UsageError) as caught:
        command.serve(Resolved.__new__(Resolved), "127.0.0.1", 0, "", (), 1)
    assert "prometheus-client" in caught.value.detail
    assert "install" in caught.value.hint
    assert "starlette" in caught.value.hint
