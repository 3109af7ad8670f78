"""Scores of an answer against its references, from 0 to 1, as the data sets define them.

LongBench's code similarity is the ratio of its library's pure-Python path (difflib), and its ROUGE-L that of the
library ``rouge``, which counts different words, without its empty ones. Neither library is kept any more.
"""

from __future__ import annotations

import difflib
import re
import string
from collections import Counter
from collections.abc import Sequence

Words = Sequence[str]
ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)
NOT_CODE = ("`", "#", "//")
HIGHEST = 999  # answer of an AIME problem


def token_f1(answer: str, reference: str) -> float:
    """F1 of the words that both have, without case, punctuation and articles (LongBench, questions)."""
    one, other = _normal(answer), _normal(reference)
    shared = sum((Counter(one) & Counter(other)).values())
    return 2 * shared / (len(one) + len(other)) if shared else 0.0


def rouge_l(answer: str, reference: str) -> float:
    """F1 of the longest common subsequences of sentences, as sets of different words (LongBench, summaries)."""
    given, wanted = _sentences(answer), _sentences(reference)
    words = [{word for sentence in sentences for word in sentence} for sentences in (given, wanted)]
    if not all(words):
        return 0.0
    common = {word for one in wanted for other in given for word in _common_subsequence(one, other)}
    return 2 * len(common) / (len(words[0]) + len(words[1])) if common else 0.0


def class_share(answer: str, reference: str, classes: Words) -> float:
    """1 over the number of class names in the answer if the right one is among them (LongBench, few-shot)."""
    named = [name for name in classes if name in answer]
    # A class whose name is part of the right one's does not count.
    named = [name for name in named if name == reference or name not in reference]
    return 1 / len(named) if reference in named else 0.0


def number_share(answer: str, reference: str) -> float:
    """The share of numbers in the answer that are the reference's last one (LongBench, counting and retrieval)."""
    wanted = re.findall(r"\d+", reference)
    numbers = re.findall(r"\d+", answer)
    return numbers.count(wanted[-1]) / len(numbers) if numbers and wanted else 0.0


def code_similarity(answer: str, reference: str) -> float:
    """Similarity of the answer's first line that is code, in steps of 0.01 (LongBench, completion)."""
    lines = answer.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in NOT_CODE)), "")
    return round(100 * difflib.SequenceMatcher(None, line, reference).ratio()) / 100


def contained(answer: str, references: Words) -> float:
    """The share of the references that the answer contains, without case (RULER)."""
    return sum(reference.lower() in answer.lower() for reference in references) / len(references)


def any_contained(answer: str, references: Words) -> float:
    """True if the answer contains one of the references, without case (RULER, questions)."""
    return float(any(reference.lower() in answer.lower() for reference in references))


def final_integer(answer: str) -> int | None:
    """The integer in the answer's last box, else its last number, if it may answer an AIME problem."""
    boxed = re.findall(r"\\boxed\s*\{\s*\$?\s*(\d+)\s*\$?\s*\}", answer)
    numbers = boxed or re.findall(r"(?<![\d.,])\d+(?![\d]|[.,]\d)", answer)
    found = int(numbers[-1]) if numbers else HIGHEST + 1
    return found if found <= HIGHEST else None


def _normal(text: str) -> list[str]:
    return ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split()


def _sentences(text: str) -> list[list[str]]:
    return [sentence.split() for sentence in text.split(".") if sentence.split()]


def _common_subsequence(one: Words, other: Words) -> list[str]:
    """A longest common subsequence; of several the one whose words come first in ``other``."""
    lengths = [[0] * (len(other) + 1) for _ in range(len(one) + 1)]
    for i, word in enumerate(one):
        for j, its in enumerate(other):
            lengths[i + 1][j + 1] = lengths[i][j] + 1 if word == its else max(lengths[i][j + 1], lengths[i + 1][j])
    found, i, j = list[str](), len(one), len(other)
    while i and j:
        if one[i - 1] == other[j - 1]:
            found.append(one[i - 1])
            i, j = i - 1, j - 1
        elif lengths[i - 1][j] > lengths[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return found[::-1]
