"""Drafts: tokens that may follow, which one exact forward of several rows verifies together.

The answer loop draws each token from the exact logits after those before it, as it would without drafts, and stops at
the first that was drafted otherwise: a draft only saves forwards. That is the acceptance of Leviathan et al.
(arXiv:2211.17192) for a draft that is certain; one that is drawn with the random numbers that will draw the token
itself is accepted wherever both distributions give the same.

``Lookup`` takes what followed the last tokens where they stand already (Saxena's prompt lookup): answers quote, edit
and list. ``Window`` lets the model go on with its first and last tokens alone (as MagicDec, arXiv:2408.11049, does for
many users): it pays where reading everything is what a token costs, over a link most of all. ``Auto`` takes whichever
has something that promises to be faster, or none. Departures: a match is followed as long as it holds, and both choose
the length of a draft by measured times and by what was accepted. A window reads no pages that the verification's
attention chose (SparseSpec, arXiv:2512.01278): in a simulation these were accepted about as often.
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
OF_WINDOW = 0.8  # share of a window's drafts that is expected until some were verified ...
HOPED = 0.95  # ... and that a trial hopes for
STEP_OF_WINDOW = 0.3  # of a step's time, until one was timed
GAIN = 1.1  # times faster than steps a draft has to promise to be
FIRST_ROW, MORE_ROWS = 1.6, 0.06  # of a verification's time, in steps, until one of so many rows was timed ...
TRY_AGAIN = 64  # ... and again so many tokens later; a step is timed as often
TRIALS = 64, 1024  # tokens after which a window that did not pay is tried again: first, and at most, twice each time
FIRST_STEPS = 3  # without drafts: on a GPU one warms up, one is captured
WEIGHT = 0.2  # of the newest time in the mean
OUTLIER = 3.0  # times the mean: something else took the time
RECENT = 512  # tokens that a window reads beside the first ones, where it has no slots

Guess = Callable[[int, int], list[int]]


class Drafter:
    """Drafts for one conversation; ``clock`` gives seconds.

    ``drafted`` and ``accepted`` count tokens, ``tried`` those of which all before were accepted, ``rounds``
    verifications, since the mode was entered. It drafts no more once a round ``failed``.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.drafted = self.accepted = self.tried = self.rounds = 0
        self.failed = False
        self._clock = clock
        self._tokens = 0
        self._seconds: dict[int, float] = {}  # by rows of a forward; 1 is a step
        self._timed_at: dict[int, int] = {}
        self._steps = 0  # that were timed
        self._began, self._rows = 0.0, 0

    def begin(self, ids: Sequence[int]) -> None:
        """Begin after the stored tokens ``ids``, unless these were followed until now."""
        if len(ids) != self._tokens:
            self._tokens, self._rows = len(ids), 0
            self._follow(ids)

    def draft(self, token: int, most: int, ends: Collection[int], guess: Guess) -> list[int]:
        """Return at most ``most`` tokens that may follow the drawn ``token``; none where a step is likely to be faster.

        None of them is one of ``ends``. ``guess`` gives so many tokens after one that is not stored yet, by what a
        window holds. What is stored until the next call is taken for what takes the time until then.
        """
        if self._rows:
            self._note(self._rows, self._clock() - self._began)
        self._add(token)
        # While every token is drafted no step is timed.
        is_timed = self._steps >= FIRST_STEPS and self._tokens - self._timed_at[1] < TRY_AGAIN
        drafts = self._draft(token, most, ends, guess) if is_timed else []
        self._began, self._rows = self._clock(), 1 + len(drafts)
        return drafts

    def verified(self, drafts: Sequence[int], accepted: int) -> None:
        """The answer went on with the first ``accepted`` of ``drafts``."""
        self.rounds += 1
        self.drafted += len(drafts)
        self.accepted += accepted
        self.tried += min(accepted + 1, len(drafts))
        for draft in drafts[:accepted]:
            self._add(draft)

    def figures(self) -> dict[str, str]:
        """For screens; none before the first round."""
        if not self.rounds:
            return {}
        accepted, tokens = self.accepted / self.drafted, 1 + self.accepted / self.rounds
        return {"drafts accepted": f"{accepted:.0%} of {self.drafted:,}", "tokens a round": f"{tokens:.1f}"}

    def _follow(self, ids: Sequence[int]) -> None:
        """Another conversation begins with ``ids``."""

    def _add(self, token: int) -> None:
        """The conversation goes on with ``token``."""
        self._tokens += 1

    def _draft(self, token: int, most: int, ends: Collection[int], guess: Guess) -> list[int]:
        raise NotImplementedError

    def _note(self, rows: int, seconds: float) -> None:
        self._seconds[rows] = _mean(self._seconds.get(rows, seconds), seconds)
        self._timed_at[rows] = self._tokens
        self._steps += rows == 1

    def _length(self, share: float, draft_s: float = 0.0) -> int:
        """The most promising number of drafts that take ``draft_s`` each, where ``share`` go on; 0 where none pays."""

        def gain(length: int) -> float:
            if not length:
                return GAIN
            rows = length + 1
            tokens = rows if share == 1 else (1 - share**rows) / (1 - share)
            seconds = guess = self._seconds[1] * (FIRST_ROW + MORE_ROWS * rows)
            if self._tokens - self._timed_at.get(rows, -TRY_AGAIN) < TRY_AGAIN:
                seconds = self._seconds[rows]
            else:
                seconds = min(guess, self._seconds.get(rows, guess))
            return tokens * self._seconds[1] / (seconds + length * draft_s)

        return max((0, *LENGTHS), key=gain)


class Lookup(Drafter):
    """What followed the last tokens where they stand already in the conversation."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__(clock)
        self._ids: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}  # where the last occurrence of a gram ends
        self._at = self._matched = 0  # what follows the match, and its length; 0 is none
        self._seen, self._went_on = [0] * len(EXPECTED), [0] * len(EXPECTED)

    def _follow(self, ids: Sequence[int]) -> None:
        self._ids, self._ends, self._at, self._matched = [], {}, 0, 0
        for token in ids:
            self._match(token)

    def _add(self, token: int) -> None:
        super()._add(token)
        if self._at:
            kind = _kind(self._matched)
            self._seen[kind] += 1
            self._went_on[kind] += self._next(0) == token
        self._match(token)

    def _draft(self, token: int, most: int, ends: Collection[int], guess: Guess) -> list[int]:
        if not self._at:
            return []
        kind = _kind(self._matched)
        share = (self._went_on[kind] + EXPECTED[kind] * TRUST) / (self._seen[kind] + TRUST)
        found = map(self._next, range(min(self._length(share), most)))
        return list(takewhile(lambda draft: draft not in ends, found))

    def _match(self, token: int) -> None:
        goes_on = self._at and self._next(0) == token
        self._ids.append(token)
        gram = tuple(self._ids[-GRAM:])
        if goes_on:
            self._at, self._matched = self._at + 1, self._matched + 1
        else:
            self._at, self._matched = self._ends.get(gram, 0), GRAM
        self._ends[gram] = len(self._ids)

    def _next(self, i: int) -> int:
        """Token number ``i`` behind the match; where it reaches the present it begins again."""
        return self._ids[self._at + i % (len(self._ids) - self._at)]


class Window(Drafter):
    """What the model says when it reads its first and last tokens alone."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__(clock)
        self._share, self._draft_s, self._drafted_at = OF_WINDOW, 0.0, 0
        self._pause = TRIALS[0]

    def _draft(self, token: int, most: int, ends: Collection[int], guess: Guess) -> list[int]:
        if self._tokens <= RECENT:  # it would read everything
            return []
        draft_s = self._draft_s or STEP_OF_WINDOW * self._seconds[1]
        length, is_trial = self._length(self._share, draft_s), False
        if length:
            self._pause = TRIALS[0]
        elif not self._drafted_at or self._tokens - self._drafted_at > self._pause:
            length, is_trial, self._pause = LENGTHS[0], True, min(2 * self._pause, TRIALS[1])
        if not (length := min(length, most)):
            return []
        began = self._clock()
        drafts = guess(token, 1 if is_trial else length)
        draft_s = (self._clock() - began) / len(drafts)
        self._draft_s, self._drafted_at = _mean(self._draft_s or draft_s, draft_s), self._tokens
        if is_trial:
            if not self._length(HOPED, draft_s):
                return []
            drafts += guess(drafts[-1], length - 1)
        return list(takewhile(lambda draft: draft not in ends, drafts))

    def verified(self, drafts: Sequence[int], accepted: int) -> None:
        super().verified(drafts, accepted)
        for number in range(min(accepted + 1, len(drafts))):
            self._share += ((number < accepted) - self._share) * WEIGHT / 2


class Auto(Lookup, Window):
    """What followed the last tokens where they stand already; elsewhere what the window says, where that pays."""

    _looked_up = False

    def _draft(self, token: int, most: int, ends: Collection[int], guess: Guess) -> list[int]:
        found = Lookup._draft(self, token, most, ends, guess)
        self._looked_up = bool(found)
        return found or Window._draft(self, token, most, ends, guess)

    def verified(self, drafts: Sequence[int], accepted: int) -> None:
        # What was looked up says nothing about the window.
        (Drafter if self._looked_up else Window).verified(self, drafts, accepted)


def _kind(length: int) -> int:
    return sum(length >= long for long in LONG)


def _mean(before: float, newest: float) -> float:
    """What took longer than before may be other work, what took less is not."""
    if newest < before:
        return newest
    return before + (min(newest, before * OUTLIER) - before) * WEIGHT
