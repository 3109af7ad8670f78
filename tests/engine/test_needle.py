"""A fact hidden in a text: the same for the same seed, told once, early."""

from __future__ import annotations

import pytest

from kvchat.engine import synthetic_text
from kvchat.engine.session import Session
from kvchat.engine.synthetic_text import sentences
from kvchat.errors import DoesNotFitError


def test_the_fact_is_told_once_and_early(model):
    tokenizer = model.tokenizer
    for seed in "012":
        case = synthetic_text.hide(seed, 600, tokenizer)
        assert case == synthetic_text.hide(seed, 600, tokenizer)
        texts = [turn.content for turn in case.turns]
        assert sum(case.answer in text for text in texts) == 1
        before = next(at for at, text in enumerate(texts) if case.answer in text)
        read = [len(tokenizer.encode(text)) for text in texts]
        assert 600 <= sum(read) < 800
        assert sum(read[before + 1 :]) > 100, "it does not stand right before the question"
        assert case.turns[-1].content.endswith("?")


def test_one_text_says_the_fact_once_in_its_first_half(model):
    for seed in "012":
        case = synthetic_text.in_one_text(seed, 600, model.tokenizer)
        assert case == synthetic_text.in_one_text(seed, 600, model.tokenizer)
        (turn,) = case.turns
        assert turn.content.count(case.answer) == 1
        before, after = turn.content.split(case.answer)
        assert len(before) < len(after)
        assert 600 <= len(model.tokenizer.encode(turn.content)) < 720
        assert turn.content.endswith("?")


@pytest.mark.parametrize("tokens", [0, 1, 30, 300])
def test_a_passage_ends_with_the_sentence_that_makes_it_long_enough(model, tokens):
    text, sentence, whole = sentences(7), sentences(7), ""
    while len(model.tokenizer.encode(whole)) < tokens:
        whole = f"{whole} {next(sentence)}".strip()
    assert synthetic_text.passage(text, tokens, model.tokenizer) == whole
    assert next(text) == next(sentence), "no sentence more is taken"


def test_a_long_passage_is_counted_a_few_times_only(model):
    class Counting:
        counted = 0

        def encode(self, text):
            self.counted += 1
            return model.tokenizer.encode(text)

    counting = Counting()
    synthetic_text.passage(sentences(0), 20_000, counting)
    assert counting.counted < 100


def test_a_text_longer_than_the_context_is_refused(model):
    with pytest.raises(DoesNotFitError):
        Session(model).hide_needle(model.context + 1, 0)
