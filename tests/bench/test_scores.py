"""Scores of made-up answers, worked out by hand from the data sets' definitions."""

from __future__ import annotations

import pytest

from kvchat.bench import data_sets


@pytest.mark.parametrize(
    ("answer", "reference", "f1"),
    [
        ("The Eiffel Tower!", "eiffel tower", 1),
        ("in Paris, near the Louvre", "Paris", 2 / 5),  # "the" does not count
        ("red red blue", "red green", 2 / 5),
        ("nothing", "", 0),
    ],
)
def test_f1_counts_words_without_case_articles_and_punctuation(answer, reference, f1):
    assert data_sets.token_f1(answer, reference) == pytest.approx(f1)


@pytest.mark.parametrize(
    ("answer", "reference", "f1"),
    [
        ("the cat sat on the mat", "the cat sat on the mat", 1),
        # Longest in common: police ... the gunman; 4 different words against 4.
        ("police kill the gunman", "police killed the gunman", 2 * 3 / 8),
        # The union over the answer's sentences: w1 w2 and w1 w3 w5 of w1 w2 w3 w4 w5 (the paper of ROUGE).
        ("w1 w2 w6 w7 w8. w1 w3 w8 w9 w5", "w1 w2 w3 w4 w5", 2 * 4 / (8 + 5)),
        ("", "words", 0),
        ("a b", "c d", 0),
    ],
)
def test_rouge_l_is_the_union_of_the_sentences_longest_subsequences(answer, reference, f1):
    assert data_sets.rouge_l(answer, reference) == pytest.approx(f1)


def test_a_class_is_shared_by_all_that_are_named():
    classes = ("Food", "Food and drink", "Sport")
    assert data_sets.class_share("It is Sport", "Sport", classes) == 1
    assert data_sets.class_share("Sport or Food", "Sport", classes) == 0.5
    assert data_sets.class_share("Food and drink", "Food and drink", classes) == 1, "Food is part of the right name"
    assert data_sets.class_share("Weather", "Sport", classes) == 0


def test_numbers_retrieved_and_counted():
    assert data_sets.number_share("Paragraph 12", "Paragraph 12") == 1
    assert data_sets.number_share("12 or 7, not 3", "Paragraph 12") == pytest.approx(1 / 3)
    assert data_sets.number_share("none", "Paragraph 12") == 0


def test_code_is_the_first_line_that_is_no_comment():
    answer = "\n# add one\n```python\nreturn x + 1\nreturn None"
    assert data_sets.code_similarity(answer, "return x + 1") == 1
    assert data_sets.code_similarity("return x", "return x + 1") == pytest.approx(0.8)
    assert data_sets.code_similarity("# nothing", "return x") == 0


def test_ruler_counts_contained_references_or_any():
    assert data_sets.contained("The numbers are 12 and 34.", ("12", "34", "56")) == pytest.approx(2 / 3)
    assert data_sets.any_contained("it was ANNE", ("Anne", "Emma")) == 1
    assert data_sets.any_contained("it was Jane", ("Anne", "Emma")) == 0


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        ("so \\boxed{7}, no: \\boxed{ 204 } since 3 is odd", 204),
        ("The answer is 033.", 33),
        ("x = 3.14, so 1,204 in all", None),
        ("1024", None),
        ("nothing", None),
    ],
)
def test_the_integer_of_an_aime_answer(answer, found):
    assert data_sets.final_integer(answer) == found
