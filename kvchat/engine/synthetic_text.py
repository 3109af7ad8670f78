"""Synthetic English sentences from a seed: the text of calibration and benchmarks where no file is given."""

from __future__ import annotations

import random
from collections.abc import Iterator

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
