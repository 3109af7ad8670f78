"""Answers constrained to a JSON schema or a tool call: whatever is sampled, in any mode, and only after a thought."""

import json

import pytest
import torch
from transformers import AutoTokenizer

from kvchat import libraries, paths
from kvchat.engine.prompt import PromptEncoder
from kvchat.engine.recovery import RecoveryMonitor, Trigger
from kvchat.engine.sampler import Grammar, Vocabulary, grammar_of
from kvchat.engine.session import Session
from kvchat.errors import UsageError
from kvchat.protocol.messages import Finished, Sampling, Turn, Variant
from kvchat.serve.answers import Calls

QUESTION = (Turn("user", "Tell me about Paris in JSON."),)
PROPERTIES = {
    "city": {"type": "string", "maxLength": 12},
    "people": {"type": "integer", "minimum": 0, "maximum": 99},
    "tags": {"type": "array", "items": {"enum": ["red", "blue"]}, "maxItems": 2},
}
SCHEMA = json.dumps(
    {"type": "object", "properties": PROPERTIES, "required": list(PROPERTIES), "additionalProperties": False}
)


def ask(session, **options) -> Finished:
    events = list(session.answer(QUESTION, options.pop("sampling"), **options))
    assert isinstance(events[-1], Finished)
    return events[-1]


def check(text: str) -> None:
    value = json.loads(text)
    assert value.keys() == PROPERTIES.keys()
    assert len(value["city"]) <= 12
    assert value["people"] in range(100)
    assert len(value["tags"]) <= 2
    assert {*value["tags"]} <= {"red", "blue"}


@pytest.mark.parametrize(
    ("seed", "variant"),
    [(0, None), (2, None), (0, Variant("full", {"draft": "lookup"})), (1, Variant("freeze", {"recovery": True}))],
)
def test_answers_fit_their_schema(session, seed, variant):
    sampling = Sampling(temperature=1.5 * seed, seed=seed, max_new_tokens=200)
    finished = ask(session, sampling=sampling, variant=variant, json_schema=SCHEMA)
    assert finished.reason == "eos"
    check(finished.text)


def test_answers_with_a_schema_use_no_drafts(session):
    """Drafts are verified without the schema. The prompt contains how the answer begins, so lookup would find some."""
    example = '{"city":"Paris","people":5,"tags":["red"]}'
    turns = (Turn("user", f"Copy this: {example} {example}"),)
    options = {"variant": Variant("full", {"draft": "lookup"}), "json_schema": SCHEMA}
    events = list(session.answer(turns, Sampling(temperature=0, max_new_tokens=200), **options))
    assert session._kv.mode.drafter.rounds == 0
    check(events[-1].text)


def test_schema_state_is_rewound_with_the_answer(session, monkeypatch):
    due = iter([*[None] * 12, ("RR", Trigger("entropy", 4.0))])
    monkeypatch.setattr(RecoveryMonitor, "take", lambda monitor: next(due, None))
    sampling = Sampling(temperature=1.0, seed=1, max_new_tokens=200)
    finished = ask(session, sampling=sampling, variant=Variant("freeze", {"recovery": True}), json_schema=SCHEMA)
    assert finished.stats.withdrawn_tokens == 12
    check(finished.text)


def test_next_answer_is_unconstrained_again(session):
    greedy = Sampling(temperature=0, max_new_tokens=12)
    free = ask(session, sampling=greedy).text
    assert ask(session, sampling=greedy, json_schema=SCHEMA).text.startswith("{")
    assert ask(session, sampling=greedy).text == free


def test_thoughts_are_unconstrained(bundled, monkeypatch):
    """Here a thought ends at the first full stop."""
    session = Session(bundled)
    monkeypatch.setattr(session._loop.encoder, "thought_end", lambda turns, prompt: ".")
    text = ask(session, sampling=Sampling(temperature=0, max_new_tokens=200), json_schema=SCHEMA).text
    thought, _, reply = text.partition(".")
    assert thought
    check(reply)


@pytest.fixture
def vocabulary(session):
    return Vocabulary(session._model.tokenizer, session._model.vocab, session._loop.ends)


def test_grammar_forgets_withdrawn_tokens(session, vocabulary):
    grammar, logits = Grammar(vocabulary, grammar_of(SCHEMA)), torch.zeros(session._model.vocab)
    states, drawn = [], []
    for _ in range(12):
        states.append(grammar.masked(logits))
        drawn.append(int(states[-1].argmax()))
        grammar.take(drawn[-1])
    assert not states[0].equal(states[-1])
    grammar.go_back(12)
    assert grammar.masked(logits).equal(states[0])
    grammar.go_back(5)  # of a thought, which the grammar did not take
    for token, state in zip(drawn, states, strict=True):
        assert grammar.masked(logits).equal(state)
        grammar.take(token)


def test_one_of_several_schemas_is_any_of_them(session):
    kinds = [{"const": name} for name in ("circle", "square")]
    answer = ask(session, sampling=Sampling(seed=1, max_new_tokens=20), json_schema=json.dumps({"oneOf": kinds}))
    assert json.loads(answer.text) in ("circle", "square")


@pytest.mark.parametrize("schema", ["{", '{"type": "obj"}', '{"$ref": "#/nowhere"}', "[]", '{"enum": []}'])
def test_invalid_schemas_are_refused(session, schema):
    with pytest.raises(UsageError) as caught:
        ask(session, sampling=Sampling(), json_schema=schema)
    assert caught.value.detail
    assert session.total == 0


# ---- tool calls

CALLING = (
    "{{ tools and '<tool_call>' }}{% for m in messages %}{{ m.content.split('</think>')[-1] }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}{% endfor %}"
)
CITY = {
    "$defs": {"City": {"enum": ["Rome", "Paris"]}},
    "properties": {"city": {"$ref": "#/$defs/City"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY}},
    {"type": "function", "function": {"name": 'what is the "time"'}},
]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_forced_answer_is_one_call_that_fits_its_tool(session, monkeypatch, seed):
    monkeypatch.setattr(session._model.tokenizer, "chat_template", CALLING)
    options = {"template_args": [f"tools={json.dumps(TOOLS)}"], "must_call": [TOOLS[seed % 2]["function"]["name"]]}
    finished = ask(session, sampling=Sampling(temperature=1.5 * seed, seed=seed, max_new_tokens=200), **options)
    assert finished.reason == "eos"
    parts = list(Calls(session._loop.encoder.calls, TOOLS).feed(finished.text, is_last=True))
    (call,) = [call["function"] for part in parts for call in part.get("tool_calls", ())]
    assert call["name"] == options["must_call"][0]
    if seed % 2:
        assert call["arguments"] == "{}"
    else:
        assert json.loads(call["arguments"])["city"] in ("Rome", "Paris")
    with pytest.raises(UsageError):
        ask(session, sampling=Sampling(), must_call=["weather"], template_args=['tools=[{"function": {"name": "f"}}]'])


def test_a_forced_call_is_written_with_the_models_tokens_after_any_thought():
    tokenizer = AutoTokenizer.from_pretrained(paths.bundled_model_dir())
    tokenizer.chat_template = CALLING
    tokenizer.add_tokens(["<tool_call>", "</tool_call>", "<think>", "</think>"])
    vocabulary = Vocabulary(tokenizer, len(tokenizer), {tokenizer.eos_token_id})
    lark = PromptEncoder(tokenizer, {"tools": TOOLS}).forced_call(["weather"])
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'

    def num_taken(text: str) -> int:
        grammar, logits = Grammar(vocabulary, lark), torch.zeros(len(tokenizer))
        ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
        for number, token in enumerate(ids):
            if not grammar.masked(logits)[token].isfinite():
                return number - len(ids)
            grammar.take(token)
        return 0

    assert [num_taken(f"{before}{call}") for before in ("", "\n\n", "<think>\nI look.\n</think>\n\n")] == [0] * 3
    assert num_taken(f"{call}\n{call}") < 0
    assert num_taken(call.replace("Paris", "Oslo")) < 0
    assert num_taken(call.replace("weather", "time")) < 0
    assert num_taken("<think>I look.") == -1


def test_a_forced_call_may_contain_what_is_spelled_like_a_control_token():
    tokenizer = AutoTokenizer.from_pretrained(paths.bundled_model_dir())
    tokenizer.chat_template = CALLING
    end = tokenizer.eos_token
    parameters = {"properties": {"mark": {"enum": [end, tokenizer.bos_token]}}}
    tools = [{"type": "function", "function": {"name": "cut", "parameters": parameters}}]
    lark = PromptEncoder(tokenizer, {"tools": tools}).forced_call(["cut"])
    grammar = Grammar(Vocabulary(tokenizer, len(tokenizer), {tokenizer.eos_token_id}), lark)
    call = f'<tool_call>\n{{"name": "cut", "arguments": {{"mark": "{end}"}}}}\n</tool_call>'
    for token in tokenizer.encode(call, add_special_tokens=False, split_special_tokens=True):
        assert grammar.masked(torch.zeros(len(tokenizer)))[token].isfinite()
        grammar.take(token)


def test_models_that_write_calls_otherwise_are_not_forced(session, monkeypatch):
    monkeypatch.setattr(session._model.tokenizer, "chat_template", CALLING + "{# <function= #}")
    with pytest.raises(UsageError):
        ask(session, sampling=Sampling(), must_call=["weather"], template_args=[f"tools={json.dumps(TOOLS)}"])


def test_missing_package_error_says_how_to_install_it(session, monkeypatch):
    monkeypatch.setattr(libraries, "find_spec", lambda name: None if name == "llguidance" else name)
    with pytest.raises(UsageError) as caught:
        ask(session, sampling=Sampling(), json_schema=SCHEMA)
    assert "llguidance" in caught.value.hint
