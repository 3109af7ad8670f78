"""A fact hidden in a long text: conversations that ask for a passkey told in one early turn."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kvchat.engine.synthetic_text import sentences
from kvchat.protocol.messages import Turn

PASSAGES = 8
ANSWER_TOKENS = 24
TOLD, ASKED = "The passkey is {}. Remember it.", "What is the passkey?"


@dataclass(frozen=True)
class Case:
    """A conversation that ends with the question, and what the answer must contain."""

    turns: tuple[Turn, ...]
    answer: str


def hide(seed: str, tokens: int, tokenizer: Any) -> Case:
    """A conversation of about ``tokens`` tokens that asks for what it told early; the same for the same seed."""
    random_ = random.Random(seed)
    passkey = str(random_.randrange(10_000, 100_000))
    told = random_.randrange(PASSAGES - 2)
    turns = [Turn("user", "I will read you a story in parts."), Turn("assistant", "Go on.")]
    text = sentences(random_.randrange(2**32))
    for part in range(PASSAGES):
        turns += [Turn("user", passage(text, tokens // PASSAGES, tokenizer)), Turn("assistant", "I see.")]
        if part == told:
            turns += [Turn("user", f"The passkey is {passkey}. Remember it."), Turn("assistant", "Got it.")]
    return Case((*turns, Turn("user", "What is the passkey?")), passkey)


def in_one_text(seed: str, tokens: int, tokenizer: Any) -> Case:
    """One question about a text of about ``tokens`` tokens that says the fact in its first half.

    It is what instruct models are trained on: most answer it where they can read so much, and the bundled one does.
    """
    random_ = random.Random(seed)
    passkey = str(random_.randrange(10_000, 100_000))
    text, before = sentences(random_.randrange(2**32)), round(tokens * random_.uniform(0.1, 0.4))
    parts = (passage(text, before, tokenizer), TOLD.format(passkey), passage(text, tokens - before, tokenizer))
    return Case((Turn("user", "\n\n".join(("Read this text.", *parts, ASKED))),), passkey)


def passage(text: Iterator[str], tokens: int, tokenizer: Any) -> str:
    """Sentences of ``text``, plain ASCII, until they are ``tokens`` tokens."""
    read = ""
    while (missing := tokens - len(tokenizer.encode(read))) > 0:
        counted = len(read)
        # A character is at most one token: fewer characters than are missing need not be counted.
        while len(read) <= counted or len(read) - counted < missing:
            read += " " * bool(read) + next(text)
    return read
