"""Answers that are held to a JSON schema: whatever is drawn, in any mode, and after a thought only."""

import json

import pytest
import torch

from kvchat import libraries
from kvchat.engine.recovery import RecoveryMonitor, Trigger
from kvchat.engine.sampler import Grammar, Vocabulary
from kvchat.engine.session import Session
from kvchat.errors import UsageError
from kvchat.protocol.messages import Finished, Sampling, Turn, Variant

ASKED = (Turn("user", "Tell me about Paris in JSON."),)
PROPERTIES = {
    "city": {"type": "string", "maxLength": 12},
    "people": {"type": "integer", "minimum": 0, "maximum": 99},
    "tags": {"type": "array", "items": {"enum": ["red", "blue"]}, "maxItems": 2},
}
SCHEMA = json.dumps(
    {"type": "object", "properties": PROPERTIES, "required": list(PROPERTIES), "additionalProperties": False}
)


def ask(session, **given) -> Finished:
    events = list(session.answer(ASKED, given.pop("sampling"), **given))
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
def test_an_answer_fits_its_schema(session, seed, variant):
    sampling = Sampling(temperature=1.5 * seed, seed=seed, max_new_tokens=200)
    finished = ask(session, sampling=sampling, variant=variant, json_schema=SCHEMA)
    assert finished.reason == "eos"
    check(finished.text)


def test_no_draft_is_made_beside_a_schema(session):
    """They are verified without the schema. The prompt holds how the answer begins, so that drafts would be found."""
    given = '{"city":"Paris","people":5,"tags":["red"]}'
    turns = (Turn("user", f"Copy this: {given} {given}"),)
    options = {"variant": Variant("full", {"draft": "lookup"}), "json_schema": SCHEMA}
    events = list(session.answer(turns, Sampling(temperature=0, max_new_tokens=200), **options))
    assert session._kv.mode.drafter.rounds == 0
    check(events[-1].text)


def test_the_schema_goes_back_with_the_answer(session, monkeypatch):
    due = iter([*[None] * 12, ("RR", Trigger("entropy", 4.0))])
    monkeypatch.setattr(RecoveryMonitor, "take", lambda monitor: next(due, None))
    sampling = Sampling(temperature=1.0, seed=1, max_new_tokens=200)
    finished = ask(session, sampling=sampling, variant=Variant("freeze", {"recovery": True}), json_schema=SCHEMA)
    assert finished.stats.withdrawn_tokens == 12
    check(finished.text)


def test_the_next_answer_is_free_again(session):
    greedy = Sampling(temperature=0, max_new_tokens=12)
    free = ask(session, sampling=greedy).text
    assert ask(session, sampling=greedy, json_schema=SCHEMA).text.startswith("{")
    assert ask(session, sampling=greedy).text == free


def test_a_thought_is_free(bundled, monkeypatch):
    """Its end is the first full stop here."""
    session = Session(bundled)
    monkeypatch.setattr(session._loop.encoder, "thought_end", lambda turns, prompt: ".")
    text = ask(session, sampling=Sampling(temperature=0, max_new_tokens=200), json_schema=SCHEMA).text
    thought, _, said = text.partition(".")
    assert thought
    check(said)


@pytest.fixture
def vocabulary(session):
    return Vocabulary(session._model.tokenizer, session._model.vocab, session._loop.ends)


def test_what_was_withdrawn_is_forgotten(session, vocabulary):
    grammar, logits = Grammar(vocabulary, SCHEMA), torch.zeros(session._model.vocab)
    states, drawn = [], []
    for _ in range(12):
        states.append(grammar.masked(logits))
        drawn.append(int(states[-1].argmax()))
        grammar.take(drawn[-1])
    assert not states[0].equal(states[-1])
    grammar.go_back(12)
    assert grammar.masked(logits).equal(states[0])
    grammar.go_back(5)  # of a thought, which was not taken
    for token, state in zip(drawn, states, strict=True):
        assert grammar.masked(logits).equal(state)
        grammar.take(token)


@pytest.mark.parametrize("schema", ["{", '{"type": "obj"}', '{"$ref": "#/nowhere"}', "[]", '{"enum": []}'])
def test_a_schema_that_nothing_fits_is_refused(session, schema):
    with pytest.raises(UsageError) as caught:
        ask(session, sampling=Sampling(), json_schema=schema)
    assert caught.value.detail
    assert session.total == 0


def test_without_its_package_it_is_said_how_to_install_it(session, monkeypatch):
    monkeypatch.setattr(libraries, "find_spec", lambda name: None if name == "llguidance" else name)
    with pytest.raises(UsageError) as caught:
        ask(session, sampling=Sampling(), json_schema=SCHEMA)
    assert "llguidance" in caught.value.hint
