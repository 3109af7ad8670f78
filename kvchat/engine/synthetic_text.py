"""Synthetic English sentences from a seed, for calibration, benchmarks and hidden facts.

A hidden fact is a passkey that an early turn tells and the last turn asks for.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kvchat.protocol.messages import Turn

PEOPLE = [
    "the miller",
    "my aunt",
    "an old sailor",
    "the doctor",
    "a young teacher",
    "the baker",
    "her brother",
    "the captain",
    "a stranger",
]
DEEDS = [
    "walked to",
    "wrote a letter about",
    "remembered",
    "came back from",
    "spoke for an hour about",
    "painted",
    "dreamed of",
    "looked for",
    "never forgot",
    "asked the way to",
]
THINGS = [
    "the harbour",
    "the garden behind the church",
    "a small house by the river",
    "the road over the hills",
    "the market",
    "the long winter",
    "a broken clock",
    "the bridge",
    "an empty station",
    "the lighthouse",
    "the school in the valley",
]
TIMES = [
    "in the morning",
    "when the rain had stopped",
    "before anybody else was awake",
    "late in the autumn",
    "after the war",
    "on the second day",
    "while the others slept",
    "for the last time",
    "without saying a word",
]
SAYINGS = [
    "It was nothing new.",
    "Nobody answered.",
    "The wind had turned to the north.",
    "Then there was silence for a while.",
    "They laughed about it later.",
    "A dog barked somewhere.",
    "The light was already fading.",
    "That was all she knew.",
]
PASSAGES = 8
ANSWER_TOKENS = 24
TOLD, ASKED = "The passkey is {}. Remember it.", "What is the passkey?"


def sentences(seed: int) -> Iterator[str]:
    """Yield sentences endlessly; equal seeds give equal sentences."""
    random_ = random.Random(seed)
    while True:
        if random_.random() < 0.25:
            yield random_.choice(SAYINGS)
            continue
        who, did, what, when = (random_.choice(words) for words in (PEOPLE, DEEDS, THINGS, TIMES))
        start, end = (f"{when}, {who}", "") if random_.random() < 0.3 else (who, f" {when}")
        yield f"{start[0].upper()}{start[1:]} {did} {what}{end}."


@dataclass(frozen=True)
class Case:
    """A conversation that ends with a question, and the text that the answer must contain."""

    turns: tuple[Turn, ...]
    answer: str


def hide(seed: str, tokens: int, tokenizer: Any) -> Case:
    """Return a conversation of about ``tokens`` tokens that ends by asking for a fact told early; seeded."""
    random_ = random.Random(seed)
    passkey = str(random_.randrange(10_000, 100_000))
    told = random_.randrange(PASSAGES - 2)
    turns = [Turn("user", "I will read you a story in parts."), Turn("assistant", "Go on.")]
    text = sentences(random_.randrange(2**32))
    for part in range(PASSAGES):
        turns += [Turn("user", passage(text, tokens // PASSAGES, tokenizer)), Turn("assistant", "I see.")]
        if part == told:
            turns += [Turn("user", TOLD.format(passkey)), Turn("assistant", "Got it.")]
    return Case((*turns, Turn("user", ASKED)), passkey)


def in_one_text(seed: str, tokens: int, tokenizer: Any) -> Case:
    """Return one question about a text of about ``tokens`` tokens that states the fact in its first half.

    Instruct models are trained on such prompts: most answer them within their context, as does the bundled model.
    """
    random_ = random.Random(seed)
    passkey = str(random_.randrange(10_000, 100_000))
    text, before = sentences(random_.randrange(2**32)), round(tokens * random_.uniform(0.1, 0.4))
    parts = (passage(text, before, tokenizer), TOLD.format(passkey), passage(text, tokens - before, tokenizer))
    return Case((Turn("user", "\n\n".join(("Read this text.", *parts, ASKED))),), passkey)


def passage(text: Iterator[str], tokens: int, tokenizer: Any) -> str:
    """Return sentences of ``text``, plain ASCII, of at least ``tokens`` tokens."""
    read = ""
    while (missing := tokens - len(tokenizer.encode(read))) > 0:
        counted = len(read)
        # A character is at most one token, so fewer characters than are missing need not be counted.
        while len(read) <= counted or len(read) - counted < missing:
            read += " " * bool(read) + next(text)
    return read
