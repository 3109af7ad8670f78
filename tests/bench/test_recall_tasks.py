"""The cases of the recall benchmark: drawn by seed, with every answer told at its place."""

from __future__ import annotations

import pytest

from kvchat.bench.recall_tasks import CHAIN, TASKS, WITHOUT_DEPTH, case
from kvchat.models.load import load_model
from kvchat.protocol.messages import Load

LENGTH = 600


@pytest.fixture(scope="module")
def tokenizer():
    return load_model(Load("bundled", "cpu"), lambda stage: None).tokenizer


@pytest.mark.parametrize("task", TASKS)
def test_the_same_seed_gives_the_same_case_which_tells_its_answers(task, tokenizer):
    made = case(task, LENGTH, 0.5, 4, "0/1", tokenizer)
    assert made == case(task, LENGTH, 0.5, 4, "0/1", tokenizer)
    assert made != case(task, LENGTH, 0.5, 4, "0/2", tokenizer)
    told = " ".join(turn.content for turn in made.turns[:-1])
    assert all(told.count(answer) == 1 for answer in made.answers)
    assert not any(answer in made.turns[-1].content for answer in made.answers)
    assert made.turns[-1].role == "user"
    assert len({answer for _, answer in made.later} | {*made.answers}) == len(made.later) + len(made.answers)
    assert all(told.count(answer) == 1 for _, answer in made.later)
    assert 0.95 * LENGTH < len(tokenizer.encode(told)) < 1.35 * LENGTH


def test_a_text_may_be_longer_than_the_book(tokenizer):
    assert len(tokenizer.encode(case("fact", 20_000, 1.0, 2, "0/1", tokenizer).turns[0].content)) > 20_000


@pytest.mark.parametrize("task", sorted(set(TASKS) - set(WITHOUT_DEPTH)))
@pytest.mark.parametrize("depth", [0.0, 0.3, 1.0])
def test_the_fact_stands_at_its_depth(task, depth, tokenizer):
    made = case(task, LENGTH, depth, 4, "0/3", tokenizer)
    text = made.turns[0].content
    assert text.index(made.answers[0]) / len(text) == pytest.approx(depth, abs=0.12)


def test_several_keys_and_values_are_told_and_the_chain_has_its_order(tokenizer):
    keys, values, everything, chain = (
        case(task, LENGTH, 0.5, 4, "7", tokenizer) for task in ("keys", "values", "all", "chain")
    )
    assert keys.turns[0].content.count("The value of") == 4
    assert len(values.answers) == len(set(values.answers)) == len(everything.answers) == 4
    text = chain.turns[0].content
    assert text.count("Let ") == CHAIN
    assert text.index(chain.answers[0]) < text.rindex("Let ")
    assert text[text.rindex("Let ") + 4 :].split()[0] in chain.turns[-1].content


def test_what_another_mode_is_asked_for_is_told_once_and_early(tokenizer):
    for number in range(12):
        made = case("switches", 3000, 0.0, 4, f"0/{number}", tokenizer)
        told = [i for i, turn in enumerate(made.turns) if made.answers[0] in turn.content]
        assert len(told) == 1
        assert told[0] < len(made.turns) - 5
        assert made.turns[-1].content == "What is the passkey?"
        assert 2900 < sum(len(tokenizer.encode(turn.content)) for turn in made.turns) < 3300
