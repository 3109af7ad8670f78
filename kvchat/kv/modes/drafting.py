"""Prompt lookup: drafts of the next tokens, taken from where the last ones stand already.

What an answer quotes, edits or lists stands in the conversation before. The answer loop verifies a draft in one forward
of several rows: it draws each token from the exact logits after those before it, as it would without drafts, and stops
at the first that was drafted otherwise. A draft only saves forwards (Leviathan et al., arXiv:2211.17192, with a draft
that is certain; the lookup is Saxena's). Departures: a match is followed as long as it holds, and the length is chosen
by measured times and by how often matches of that length went on, also where nothing was drafted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from itertools import takewhile

GRAM = 3  # tokens that have to stand there already
LENGTHS = (3, 7, 15)  # tokens of a draft: with one more, numbers of rows that products are fast with
LONG = (4, 8, 16, 32)  # matches from so many tokens on are counted apart
EXPECTED = (0.4, 0.55, 0.7, 0.8, 0.9)  # share that goes on, by length of the match ...
TRUST = 4.0  # ... which counts as much as so many matches seen
GAIN = 1.1  # times faster than steps a draft has to promise to be
FIRST_ROW, MORE_ROWS = 1.6, 0.06  # of a verification's time, in steps, until one of so many rows was timed ...
TRY_AGAIN = 64  # ... and again so many tokens later
WEIGHT = 0.2  # of the newest time in the mean
OUTLIER = 3.0  # times the mean: something else took the time


class Lookup:
    """Drafts from the tokens of one conversation; ``clock`` gives seconds.

    ``drafted`` and ``accepted`` count tokens, ``rounds`` verifications, since the mode was entered.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.drafted = self.accepted = self.rounds = 0
        self._clock = clock
        self._ids: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}  # where the last occurrence of a gram ends
        self._at = self._length = 0  # what follows the match, and its length; 0 is none
        self._seen, self._went_on = [0] * len(EXPECTED), [0] * len(EXPECTED)
        self._seconds: dict[int, float] = {}  # by rows of a forward; 1 is a step
        self._timed_at: dict[int, int] = {}
        self._began, self._rows = 0.0, 0

    def begin(self, ids: Sequence[int]) -> None:
        """Begin after the stored tokens ``ids``, unless these were followed until now."""
        if len(ids) == len(self._ids):
            return
        self._ids, self._ends = [], {}
        self._at = self._length = self._rows = 0
        for token in ids:
            self._add(token)

    def draft(self, token: int, most: int, ends: Collection[int]) -> list[int]:
        """Return at most ``most`` tokens that may follow the drawn ``token``; none where a step is likely to be faster.

        None of them is one of ``ends``. What is stored until the next call is taken for what takes the time until then.
        """
        now = self._clock()
        if self._rows:
            self._note(now - self._began)
        self._began, self._rows = now, 1
        self._watch(token)
        self._add(token)
        if not self._at or 1 not in self._seconds:
            return []
        length = max((0, *LENGTHS), key=self._gain)
        found = map(self._next, range(min(length, most)))
        drafts = list(takewhile(lambda draft: draft not in ends, found))
        self._rows += len(drafts)
        return drafts

    def verified(self, drafts: Sequence[int], accepted: int) -> None:
        """The answer went on with the first ``accepted`` of ``drafts``."""
        self.rounds += 1
        self.drafted += len(drafts)
        self.accepted += accepted
        for draft in drafts[:accepted]:
            self._watch(draft)
            self._add(draft)

    def figures(self) -> dict[str, str]:
        """For screens; none before the first round."""
        if not self.rounds:
            return {}
        accepted, tokens = self.accepted / self.drafted, 1 + self.accepted / self.rounds
        return {"drafts accepted": f"{accepted:.0%} of {self.drafted:,}", "tokens a round": f"{tokens:.1f}"}

    def _watch(self, token: int) -> None:
        """Count whether the match went on with ``token``."""
        if self._at:
            kind = _kind(self._length)
            self._seen[kind] += 1
            self._went_on[kind] += self._next(0) == token

    def _add(self, token: int) -> None:
        goes_on = self._at and self._next(0) == token
        self._ids.append(token)
        gram = tuple(self._ids[-GRAM:])
        if goes_on:
            self._at, self._length = self._at + 1, self._length + 1
        else:
            self._at, self._length = self._ends.get(gram, 0), GRAM
        self._ends[gram] = len(self._ids)

    def _next(self, i: int) -> int:
        """Token number ``i`` behind the match; where it reaches the present it begins again."""
        return self._ids[self._at + i % (len(self._ids) - self._at)]

    def _note(self, seconds: float) -> None:
        before = self._seconds.get(self._rows, seconds)
        self._seconds[self._rows] = before + (min(seconds, before * OUTLIER) - before) * WEIGHT
        self._timed_at[self._rows] = len(self._ids)

    def _gain(self, length: int) -> float:
        """Tokens of a round with ``length`` drafts in the time of one by steps; what is asked for without drafts."""
        if not length:
            return GAIN
        kind, rows = _kind(self._length), length + 1
        share = (self._went_on[kind] + EXPECTED[kind] * TRUST) / (self._seen[kind] + TRUST)
        tokens = (1 - share**rows) / (1 - share)
        seconds = guess = self._seconds[1] * (FIRST_ROW + MORE_ROWS * rows)
        if len(self._ids) - self._timed_at.get(rows, -TRY_AGAIN) < TRY_AGAIN:
            seconds = self._seconds[rows]
        else:
            seconds = min(guess, self._seconds.get(rows, guess))
        return tokens * self._seconds[1] / seconds


def _kind(length: int) -> int:
    return sum(length >= long for long in LONG)
