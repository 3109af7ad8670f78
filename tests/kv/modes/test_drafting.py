"""Drafting by prompt lookup and by a window: which tokens are drafted, and when."""

from itertools import accumulate

import pytest
from transformers import AutoTokenizer

from kvchat.bench.texts import passages
from kvchat.kv.modes.drafting import LENGTHS, RECENT, TRIALS, Auto, Lookup, Window
from kvchat.paths import bundled_model_dir

STEP, END = 1.0, 99_999
QUOTED = list(range(100, 140))


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


def answer(lookup, clock, tokens, row_time, guess=None):
    """Decode ``tokens``, where a forward of n rows takes ``row_time(n)``; returns the number of forwards."""
    forwards, at = 0, 0
    while at < len(tokens):
        drafts = lookup.draft(tokens[at], len(tokens) - at - 1, {END}, guess)
        clock.now += row_time(1 + len(drafts))
        forwards, at = forwards + 1, at + 1
        if drafts:
            accepted = next(
                (i for i, draft in enumerate(drafts) if tokens[at : at + 1 + i][i:] != [draft]), len(drafts)
            )
            lookup.verified(drafts, accepted)
            at += accepted
    return forwards


def drafter_for(ids, clock=None, kind=Lookup):
    drafter = kind(clock or Clock())
    drafter.begin(ids)
    return drafter


def constant(_rows):
    return STEP


def test_quotations_take_far_fewer_forwards(clock):
    lookup = drafter_for([*QUOTED, 1, 2], clock)
    forwards = answer(lookup, clock, [5, 6, *QUOTED], constant)
    assert forwards < 12
    assert lookup.accepted == len(QUOTED) + 2 - forwards
    assert lookup.accepted / lookup.drafted > 0.8


def test_drafting_stops_if_rows_cost_as_much_as_steps(clock):
    lookup = drafter_for([*QUOTED, 1, 2], clock)
    for _ in range(20):  # the first is a trial
        answer(lookup, clock, QUOTED, lambda rows: rows * STEP)
    assert lookup.rounds <= 20 * len(LENGTHS)
    before = lookup.rounds
    answer(lookup, clock, QUOTED[:32], lambda rows: rows * STEP)
    assert lookup.rounds - before <= len(LENGTHS)


def test_drafting_stops_after_rejected_matches(clock):
    text = [token for i in range(400) for token in (1, 2, 3, 1000 + i)]
    lookup = drafter_for([1, 2, 3, 4], clock)
    answer(lookup, clock, text[:400], lambda rows: STEP * (1 + 0.1 * rows))
    before = lookup.rounds
    answer(lookup, clock, text[400:], lambda rows: STEP * (1 + 0.1 * rows))
    assert lookup.rounds == before


def test_the_last_occurrence_is_drafted(clock):
    lookup = drafter_for([1, 2, 3, *QUOTED, 1, 2, 3, *reversed(QUOTED), 9, 9], clock)
    answer(lookup, clock, [1, 2, 3, *reversed(QUOTED)], constant)
    assert lookup.accepted == lookup.drafted > 0


def test_repetitions_are_drafted_beyond_the_end(clock):
    lookup = drafter_for([7, 8, 9, 7, 8, 9], clock)
    answer(lookup, clock, [7, 8, 9] * 30, constant)
    assert lookup.accepted / lookup.drafted > 0.9


def test_drafts_exclude_end_tokens_and_respect_the_limit(clock):
    lookup = drafter_for([*QUOTED[:20], END, 5, *QUOTED[:20], END, 5], clock)
    seen = []
    for token in QUOTED[:20]:
        clock.now += STEP
        seen.append(lookup.draft(token, 4, {END}, None))
    assert any(seen)
    assert all(len(drafts) <= 4 and END not in drafts for drafts in seen)
    assert seen[-1] == []


def test_begin_forgets_the_previous_conversation():
    lookup = drafter_for(QUOTED)
    lookup.begin([1, 2, 3])
    assert answer(lookup, Clock(), QUOTED, constant) == len(QUOTED)


def test_figures_count_accepted_drafts():
    lookup = drafter_for([*QUOTED, 1, 2])
    assert lookup.figures() == {}
    lookup.verified([1, 2, 3], 2)
    lookup.verified([1], 0)
    assert lookup.figures() == {"drafts accepted": "50% of 4", "tokens a round": "2.0"}


def guessing(clock, right, seconds):
    """Guesses that count up as the answer does, except where ``right`` is false."""

    def guess(token):
        clock.now += seconds
        return token + 1 if right(token) else 0

    return chained(guess)


def chained(one):
    """Guesses of several tokens: ``one`` applied to its own guesses."""

    def guess(token, tokens):
        return list(accumulate(range(tokens), lambda last, _: one(last), initial=token))[1:]

    return guess


@pytest.mark.parametrize(
    ("seconds", "right", "forwards"),
    [
        (0.05, lambda token: True, 70),  # nearly free and always right
        (0.05, lambda token: token % 5, 170),
        (1.0, lambda token: True, 400),  # as slow as a step
        (0.05, lambda token: False, 400),
    ],
)
def test_window_drafts_only_while_it_pays(clock, seconds, right, forwards):
    window = drafter_for(list(range(-RECENT, 1)), clock, Window)
    took = answer(window, clock, list(range(1, 401)), lambda rows: 1 + 0.05 * rows, guessing(clock, right, seconds))
    assert took <= forwards
    if forwards == 400:
        assert window.drafted < 150  # only trials


def test_window_drafts_exclude_end_tokens(clock):
    window = drafter_for(list(range(RECENT + 1)), clock, Window)
    for token in range(END - 9, END):
        drafts = window.draft(token, 5, {END}, guessing(clock, lambda _: True, 0.01))
        assert len(drafts) <= 5
        assert END not in drafts
        clock.now += 1


def test_a_slow_first_step_does_not_make_drafts_pay(clock):
    """First steps warm up, are captured on a GPU, or wait for loops to compile."""
    steps = []
    window = drafter_for(list(range(RECENT + 1)), clock, Window)

    def guess(_token):
        clock.now += STEP
        return 7

    def row_time(rows):
        steps.append(rows)
        return 10 * STEP if len(steps) == 1 else STEP * (1 + (rows > 1))

    answer(window, clock, list(range(100, 1100)), row_time, chained(guess))
    assert clock.now < 1.2 * 1000 * STEP


def test_window_drafts_nothing_in_short_conversations(clock):
    window = drafter_for([1, 2, 3], clock, Window)
    answer(window, clock, list(range(1, RECENT - 5)), constant, guessing(clock, lambda _: True, 0.01))
    assert window.rounds == 0


def test_auto_looks_up_repetitions_and_guesses_the_rest(clock):
    guessed = []
    auto = drafter_for([*range(1000, 1000 + RECENT), *QUOTED, 1, 2], clock, Auto)

    def guess(token):
        guessed.append(token)
        clock.now += 0.05
        return token + 1

    def row_time(rows):
        return 1 + 0.05 * rows

    answer(auto, clock, list(range(5000, 5200)), row_time, chained(guess))
    assert len(guessed) > 100
    assert auto.accepted > 150
    guessed.clear()
    answer(auto, clock, QUOTED, row_time, chained(guess))
    assert len(guessed) <= LENGTHS[-1]  # until the quotation is recognized
    assert auto.drafted - auto.accepted < 30


def test_auto_turns_off_if_drafts_lose_and_returns(clock):
    share = [0.0]
    auto = drafter_for(list(range(-RECENT, 1)), clock, Auto)

    def guess(token):
        clock.now += 0.1
        return token + 1 if share[0] else 0

    def row_time(rows):
        return 1.5 + 0.05 * rows if rows > 1 else 1

    answer(auto, clock, list(range(1, 2001)), row_time, chained(guess))
    assert clock.now < 2000 / 0.97
    share[0], before = 1.0, clock.now
    answer(auto, clock, list(range(2001, 4001)), row_time, chained(guess))
    assert clock.now - before < 0.6 * 2000 + TRIALS[1]


def test_lookups_do_not_affect_the_window_estimate(clock):
    auto = drafter_for([*range(1000, 1000 + RECENT), *QUOTED, 1, 2], clock, Auto)
    share = auto._share
    answer(auto, clock, [5, 6, *QUOTED[:25], *range(300, 330)], constant, chained(lambda _: END))
    assert auto.rounds > 0
    assert auto.drafted > auto.accepted
    assert auto._share == share


# Forward times by rows, in steps: SmolLM2 in float32 on a CPU, and the estimate until forwards are timed.
ROWS = {"smollm2": {1: 1, 4: 1.28, 8: 1.70, 16: 2.20}, "untimed": {1: 1, 4: 1.84, 8: 2.08, 16: 2.56}}


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize(("kind", "most"), [(Lookup, 4.0), (Window, 0.0), (Auto, 4.0)])
def test_drafting_costs_little_on_prose(kind, most, rows):
    """Books, in answers of 100 tokens with a new drafter each; a window's guess takes three quarters of a step."""
    ids = [
        token
        for passage in passages((), 500, AutoTokenizer.from_pretrained(bundled_model_dir()))
        for token in passage.ids
    ]
    took, rejected, starts = [], 0, range(3000, 9000, 100)
    for start in starts:
        clock = Clock()
        drafter = kind(clock)
        drafter.begin(ids[start - 3000 : start])
        guess = guessing(clock, lambda _: True, 0.75)
        answer(drafter, clock, ids[start : start + 100], lambda n: next(rows[k] for k in rows if k >= n), guess)
        took.append(clock.now)
        rejected += drafter.drafted - drafter.accepted
    assert max(took) < 100 / 0.97
    assert sum(took) < 100 * len(starts) / 0.99
    assert rejected / len(starts) <= most
