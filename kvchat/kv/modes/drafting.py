"""Speculative decoding: drafts several tokens, which one exact forward verifies together.

The answer loop samples each token from the exact logits, as it would without drafts, and stops at the first token that
differs from the draft, so a draft only saves forwards. This is the acceptance of Leviathan et al. (arXiv:2211.17192)
for a deterministic draft. A draft sampled with the same random numbers as the token itself is accepted whenever both
distributions give the same token.

``Lookup`` drafts what followed the last tokens at their previous occurrence (Saxena's prompt lookup), because answers
quote, edit and list. ``Window`` drafts with the model itself, which reads only its first and last tokens (like
MagicDec, arXiv:2408.11049, for many users); this pays if reading everything dominates a token's time, above all over a
link. ``Auto`` uses whichever is likely to be faster, or none. Departures: a match is followed as long as it holds, and
both choose the length of a draft by measured times and acceptance. A window does not read the pages that the
verification's attention chose (SparseSpec, arXiv:2512.01278): in a simulation these were accepted about as often.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from itertools import takewhile

GRAM = 3  # number of last tokens that are looked up
LENGTHS = (3, 7, 15)  # tokens of a draft; with one more row, sizes at which matrix products are fast
LONG = (4, 8, 16, 32)  # lengths of a match at which separate statistics begin
EXPECTED = (0.4, 0.55, 0.7, 0.8, 0.9)  # prior share of matches that continue, by length of the match ...
TRUST = 4.0  # ... which has the weight of 4 observed matches
OF_WINDOW = 0.8  # expected acceptance of a window's drafts until some were verified ...
HOPED = 0.95  # ... and the acceptance that a trial assumes
STEP_OF_WINDOW = 0.3  # assumed time per token drafted by a window, in steps, until one was timed
GAIN = 1.1  # minimum expected speedup over steps
FIRST_ROW, MORE_ROWS = 1.6, 0.06  # assumed time of a verification in steps, until one with as many rows was timed ...
TRY_AGAIN = 64  # ... and again if that was 64 tokens ago; a step is timed as often
TRIALS = 64, 1024  # tokens until a window that did not pay is tried again: at first, doubled each time, and at most
FIRST_STEPS = 3  # steps without drafts: on a GPU one warms up and one is captured
WEIGHT = 0.2  # weight of the newest time in the running mean
OUTLIER = 3.0  # a time above 3 times the mean is clipped, because other work took a part of it
RECENT = 512  # recent tokens that a window reads besides the first ones, if it has no slots

Guess = Callable[[int, int], list[int]]


class Drafter:
    """Drafts for one conversation; ``clock`` returns seconds.

    Since the mode was entered, ``drafted`` and ``accepted`` count tokens, ``tried`` drafted tokens whose predecessors
    were all accepted, and ``rounds`` verifications. Drafting stops once a round ``failed``.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.drafted = self.accepted = self.tried = self.rounds = 0
        self.failed = False
        self._clock = clock
        self._tokens = 0
        self._seconds: dict[int, float] = {}  # by rows of a forward; 1 is a step
        self._timed_at: dict[int, int] = {}
        self._steps = 0  # timed steps
        self._began, self._rows = 0.0, 0

    def begin(self, ids: Sequence[int]) -> None:
        """Begin after the stored tokens ``ids``, unless they are those followed so far."""
        if len(ids) != self._tokens:
            self._tokens, self._rows = len(ids), 0
            self._follow(ids)

    def draft(self, token: int, most: int, ends: Collection[int], guess: Guess) -> list[int]:
        """Draft at most ``most`` tokens after the sampled ``token``, up to one of ``ends``; none if a step is faster.

        ``guess(token, n)`` returns n tokens after ``token``, which is not stored yet, by what a window holds. The time
        until the next call is taken as the time of the verification or step.
        """
        if self._rows:
            self._note(self._rows, self._clock() - self._began)
        self._add(token)
        # Steps are timed now and then, even if every token could be drafted.
        is_timed = self._steps >= FIRST_STEPS and self._tokens - self._timed_at[1] < TRY_AGAIN
        drafts = self._draft(token, most, ends, guess) if is_timed else []
        self._began, self._rows = self._clock(), 1 + len(drafts)
        return drafts

    def verified(self, drafts: Sequence[int], accepted: int) -> None:
        """Note that the answer continues with the first ``accepted`` of ``drafts``."""
        self.rounds += 1
        self.drafted += len(drafts)
        self.accepted += accepted
        self.tried += min(accepted + 1, len(drafts))
        for draft in drafts[:accepted]:
            self._add(draft)

    def figures(self) -> dict[str, str]:
        if not self.rounds:
            return {}
        accepted, tokens = self.accepted / self.drafted, 1 + self.accepted / self.rounds
        return {"drafts accepted": f"{accepted:.0%} of {self.drafted:,}", "tokens a round": f"{tokens:.1f}"}

    def _follow(self, ids: Sequence[int]) -> None:
        """Begin another conversation, with ``ids``."""

    def _add(self, token: int) -> None:
        """Continue the conversation with ``token``."""
        self._tokens += 1

    def _draft(self, token: int, most: int, ends: Collection[int], guess: Guess) -> list[int]:
        raise NotImplementedError

    def _note(self, rows: int, seconds: float) -> None:
        self._seconds[rows] = _mean(self._seconds.get(rows, seconds), seconds)
        self._timed_at[rows] = self._tokens
        self._steps += rows == 1

    def _length(self, share: float, draft_s: float = 0.0) -> int:
        """Return the best number of drafts that take ``draft_s`` each, if ``share`` are accepted; 0 if none pays."""

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
    """Drafts what followed the last tokens at their previous occurrence in the conversation."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__(clock)
        self._ids: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}  # where the last occurrence of a gram ends
        self._at = self._matched = 0  # index after the match, and its length; 0 if there is none
        self._seen, self._continued = [0] * len(EXPECTED), [0] * len(EXPECTED)

    def _follow(self, ids: Sequence[int]) -> None:
        self._ids, self._ends, self._at, self._matched = [], {}, 0, 0
        for token in ids:
            self._match(token)

    def _add(self, token: int) -> None:
        super()._add(token)
        if self._at:
            kind = _kind(self._matched)
            self._seen[kind] += 1
            self._continued[kind] += self._next(0) == token
        self._match(token)

    def _draft(self, token: int, most: int, ends: Collection[int], guess: Guess) -> list[int]:
        if not self._at:
            return []
        kind = _kind(self._matched)
        share = (self._continued[kind] + EXPECTED[kind] * TRUST) / (self._seen[kind] + TRUST)
        found = map(self._next, range(min(self._length(share), most)))
        return list(takewhile(lambda draft: draft not in ends, found))

    def _match(self, token: int) -> None:
        continues = self._at and self._next(0) == token
        self._ids.append(token)
        gram = tuple(self._ids[-GRAM:])
        if continues:
            self._at, self._matched = self._at + 1, self._matched + 1
        else:
            self._at, self._matched = self._ends.get(gram, 0), GRAM
        self._ends[gram] = len(self._ids)

    def _next(self, i: int) -> int:
        """Return token number ``i`` after the match; at the end of the conversation it starts over."""
        return self._ids[self._at + i % (len(self._ids) - self._at)]


class Window(Drafter):
    """Drafts what the model generates when it reads only its first and last tokens."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__(clock)
        self._share, self._draft_s, self._drafted_at = OF_WINDOW, 0.0, 0
        self._pause = TRIALS[0]

    def _draft(self, token: int, most: int, ends: Collection[int], guess: Guess) -> list[int]:
        if self._tokens <= RECENT:  # the window would read everything
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
    """Drafts by lookup; if it finds nothing, with the window, if that pays."""

    _looked_up = False

    def _draft(self, token: int, most: int, ends: Collection[int], guess: Guess) -> list[int]:
        found = Lookup._draft(self, token, most, ends, guess)
        self._looked_up = bool(found)
        return found or Window._draft(self, token, most, ends, guess)

    def verified(self, drafts: Sequence[int], accepted: int) -> None:
        # The acceptance of a looked-up draft says nothing about the window.
        (Drafter if self._looked_up else Window).verified(self, drafts, accepted)


def _kind(length: int) -> int:
    return sum(length >= long for long in LONG)


def _mean(before: float, newest: float) -> float:
    """Return a running mean: a shorter time replaces it, because only longer ones can include other work."""
    if newest < before:
        return newest
    return before + (min(newest, before * OUTLIER) - before) * WEIGHT
