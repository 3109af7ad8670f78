"""Recovery's signals and ladder, with scripted numbers."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from kvchat.engine.recovery import Ladder, Signals
from kvchat.kv.modes.recovery_levels import LEVELS


def fed(signals: Signals, n: int, entropy: float = 2.0, log_prob: float = -2.0, spread: float = 0.2) -> list[object]:
    """``n`` tokens around the given values, no two 12-grams alike; what they triggered."""
    sign = [spread if i % 2 else -spread for i in range(n)]
    start = len(signals.tokens)
    return [signals.add(start + i, entropy + s, log_prob + s) for i, s in enumerate(sign)]


@pytest.fixture
def calm() -> Signals:
    signals = Signals()
    assert fed(signals, 100) == [None] * 100
    return signals


def test_two_spikes_of_entropy_in_four_tokens_trigger(calm: Signals) -> None:
    assert calm.add(1000, 4.0, -2.0) is None
    assert fed(calm, 2) == [None, None]
    trigger = calm.add(1001, 4.5, -2.0)
    assert trigger is not None
    assert trigger.signal == "entropy"
    assert trigger.value > 3


def test_spikes_four_tokens_apart_do_not(calm: Signals) -> None:
    assert calm.add(1000, 4.0, -2.0) is None
    assert fed(calm, 3) == [None] * 3
    assert calm.add(1001, 4.5, -2.0) is None


def test_a_spike_below_one_nat_is_none() -> None:
    signals = Signals()
    fed(signals, 100, entropy=0.1, spread=0.01)
    assert [signals.add(1000 + i, 0.99, -2.0) for i in range(4)] == [None] * 4


def test_nothing_is_compared_before_the_32nd_token() -> None:
    signals = Signals()
    fed(signals, 31)
    assert [signals.add(1000 + i, 9.0, -2.0) for i in range(2)] == [None, None]
    later = Signals()
    fed(later, 32)
    assert later.add(1000, 9.0, -2.0) is None
    assert later.add(1001, 9.0, -2.0) is not None


def test_eight_unlikely_tokens_trigger() -> None:
    signals = Signals()
    fed(signals, 100, spread=0.6)
    found = [signals.add(1000 + i, 2.0, -4.4) for i in range(8)]
    first = next(i for i, trigger in enumerate(found) if trigger)
    assert found[first].signal == "log-prob"
    # The mean of 8 has to fall by 3 * 0.6, six of these make it fall by 6/8 * 2.4.
    assert first in (5, 6)


def test_a_text_that_was_certain_is_not_alarmed_by_one_surprise() -> None:
    signals = Signals()
    fed(signals, 100, entropy=0.0, log_prob=0.0, spread=0.0)
    assert signals.add(1000, 9.0, -9.0) is None
    assert [signals.add(1001 + i, 0.2, -0.2) for i in range(8)] == [None] * 8


def test_the_same_twelve_tokens_for_the_third_time_trigger() -> None:
    signals, twelve = Signals(), list(range(12))
    found = [signals.add(token, 2.0, -2.0) for times in range(3) for token in [*twelve, 100 + times]]
    assert [trigger for trigger in found[:-2] if trigger] == []
    assert found[-2] == ("repetition", 3)


def test_withdrawn_tokens_are_forgotten() -> None:
    signals, undisturbed = Signals(), Signals()
    fed(signals, 50)
    fed(undisturbed, 50)
    for i in range(16):
        signals.add(7, 9.0, -9.0 - i)
    signals.withdraw(16)
    assert signals.tokens == undisturbed.tokens
    assert fed(signals, 60) == fed(undisturbed, 60)
    assert signals == undisturbed or set(signals._grams.values()) == {0, 1}


def actions(triggered: set[int], n: int, levels=LEVELS) -> dict[int, str]:
    ladder = Ladder(levels)
    taken = {i: ladder.token(i in triggered) for i in range(1, n + 1)}
    return {i: level for i, level in taken.items() if level}


def test_the_ladder_is_climbed_while_triggers_go_on() -> None:
    assert actions(set(range(1, 200)), 80) == {1: "SR", 18: "WR", 35: "FR", 52: "RR", 69: "FR"}


def test_a_trigger_in_the_cool_down_is_ignored() -> None:
    assert actions({10, 11, 26}, 40) == {10: "SR"}
    assert actions({10, 27}, 40) == {10: "SR", 27: "WR"}


def test_escalation_ends_after_32_tokens_and_calm_comes_after_64() -> None:
    assert actions({10, 42}, 100) == {10: "SR", 42: "WR"}
    assert actions({10, 43}, 100) == {10: "SR", 43: "SR"}
    assert actions({10, 30, 94}, 100) == {10: "SR", 30: "WR", 94: "WR"}
    assert actions({10, 30, 95}, 100) == {10: "SR", 30: "WR", 95: "SR"}


def test_a_rewalk_is_not_repeated_within_128_tokens() -> None:
    taken = actions(set(range(1, 400)), 400)
    rewalks = [i for i, level in taken.items() if level == "RR"]
    assert len(rewalks) >= 3
    assert all(b - a >= 128 for a, b in pairwise(rewalks))


def test_a_mode_without_the_lower_levels_begins_higher() -> None:
    assert actions({1, 20, 40}, 50, ("WR", "FR", "RR")) == {1: "WR", 20: "FR", 40: "RR"}
    assert actions(set(range(1, 200)), 150, ("RR",)) == {1: "RR", 129: "RR"}
    assert actions({1}, 5, ()) == {}


def test_the_level_is_shown_until_all_is_calm() -> None:
    ladder = Ladder()
    assert ladder.level == ""
    ladder.token(True)
    shown = []
    for _ in range(65):
        shown.append(ladder.level)
        ladder.token(False)
    assert set(shown) == {"SR"}
    assert ladder.level == ""


def test_noise_rarely_triggers() -> None:
    noise, signals = random.Random(0), Signals()
    found = [signals.add(i, max(0.0, noise.gauss(3, 1)), noise.gauss(-3, 1.5)) for i in range(20_000)]
    assert sum(trigger is not None for trigger in found) < 20
