"""Recovery in a session of a small random model with scripted logits; sampling and text are real."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch
from support.loads import load_in

from kvchat.engine.recovery import Ladder, RecoveryMonitor, Signals, measure
from kvchat.engine.sampler import Sampler
from kvchat.engine.session import Session
from kvchat.kv.modes.base import LEVELS
from kvchat.protocol.messages import Finished, Recovered, Sampling, Started, Text, Turn, Withdrawn

TURNS = (Turn("user", "Tell me about the sea. " * 40),)
RANDOM = Sampling(temperature=1.0, seed=1, max_new_tokens=180)
EAGER, RECOVERS = {"tau": 5.0}, {"recovery": True}


class Scripted(Session):
    """Certain of another token each time, except at the drawn tokens ``unsure``, where all are equally likely."""

    def script(self, unsure: Iterable[int]) -> Scripted:
        self.unsure, self.drawn, self.all_read = set(unsure), 0, []
        self._genuine_step, self._loop.step = self._loop.step, self._scripted_step
        return self

    def _scripted_step(self, token: int) -> torch.Tensor:
        logits = torch.full_like(self._genuine_step(token), -torch.inf).clone()
        self.all_read.append(bool(self.attended(0).all()))
        self.drawn += 1
        # No control token may end the answer: the ordinary ones begin at 300.
        logits[300:] = 0.0
        if self.drawn not in self.unsure:
            logits[300 + self.drawn * 7] = 50.0
        return logits


def run(session: Scripted, sampling: Sampling = RANDOM):
    """The events of an answer, and its text without what was withdrawn."""
    events, text = [], ""
    for event in session.answer(TURNS, sampling):
        events.append(event)
        if isinstance(event, Text):
            text += event.text
        elif isinstance(event, Withdrawn):
            text = text[: -event.chars]
    return events, text


def levels(events) -> list[str]:
    return [event.level for event in events if isinstance(event, Recovered)]


def spikes(*starts: int) -> set[int]:
    return {i for start in starts for i in (start, start + 1)}


def test_levels_escalate_in_order(model):
    session = Scripted(model, load_in("freeze", EAGER)).script(spikes(40, 70, 100, 130))
    events, text = run(session)
    assert levels(events) == ["SR", "WR", "FR", "RR"]
    assert all(event.signal == "entropy" and event.value > 3 for event in events if isinstance(event, Recovered))
    (withdrawn,) = [event for event in events if isinstance(event, Withdrawn)]
    assert withdrawn.tokens == 16
    finished, started = events[-1], events[0]
    assert isinstance(finished, Finished)
    assert isinstance(started, Started)
    assert finished.text == text == model.tokenizer.decode(session.token_ids)
    assert session.text(started.prompt_tokens, session.total) == text
    assert session.total == started.prompt_tokens + 180
    assert (finished.stats.recoveries, finished.stats.withdrawn_tokens) == (4, 16)
    assert finished.stats.generated_tokens == len(session.token_ids) == 180
    assert session.snapshot().extras["recovery"] == "RR"


def test_full_reset_reads_everything_for_a_while(model):
    session = Scripted(model, load_in("freeze", EAGER)).script(spikes(40, 60, 80))
    run(session)
    assert not any(session.all_read[20:42])
    assert all(session.all_read[82:146])
    assert not all(session.all_read[146:])


def test_regeneration_draws_other_tokens(model):
    """Tokens before the withdrawn ones stay, and the seed determines everything."""
    sampling = replace(RANDOM, seed=3, max_new_tokens=110)
    first, second, plain = (
        Scripted(model, load_in("full", params)).script(range(50, 400)) for params in (RECOVERS, RECOVERS, {})
    )
    assert levels(run(first, sampling)[0]) == levels(run(second, sampling)[0]) == ["RR"]
    run(plain, sampling)
    assert first.token_ids == second.token_ids
    assert first.token_ids[:35] == plain.token_ids[:35]
    assert first.token_ids[50:60] != plain.token_ids[50:60]


def test_recovery_is_off_where_it_would_change_nothing(model):
    for mode, params, temperature in (("freeze", {"recovery": False}, 1), ("streaming", {}, 1), ("full", RECOVERS, 0)):
        session = Scripted(model, load_in(mode, params)).script(spikes(40, 50))
        assert levels(run(session, replace(RANDOM, temperature=temperature, max_new_tokens=60))[0]) == []


def test_finished_answer_is_not_withdrawn(model):
    """The regeneration is due with the last token."""
    for tokens, expected in ((42, []), (43, ["RR"])):
        session = Scripted(model, load_in("full", RECOVERS)).script(spikes(40))
        assert levels(run(session, replace(RANDOM, max_new_tokens=tokens))[0]) == expected


def test_speculative_widens_its_budget_for_a_while(model):
    session = Scripted(model, load_in("speculative", RECOVERS | {"budget": 128})).script(spikes(40, 60))
    budgets = {}
    list(session.answer(TURNS, RANDOM, lambda generated: budgets.update({generated: session.info.params["budget"]})))
    assert [budgets[n] for n in (42, 43, 62, 63, 120, 150)] == [128, 256, 256, 512, 512, 128]


def test_mode_entered_during_recovery_stays(model):
    session = Scripted(model, load_in("speculative", RECOVERS | {"budget": 128})).script(spikes(40))
    list(session.answer(TURNS, RANDOM, lambda generated: generated == 60 and session.switch("streaming")))
    assert session.info.mode == "streaming"


def test_measure_returns_token_entropy_and_log_prob():
    token, entropy, log_prob = measure(torch.tensor([0.0, 0.0, -torch.inf, 0.0, 0.0]), torch.tensor(1)).tolist()
    assert token == 1
    assert entropy == pytest.approx(1.3863, abs=1e-4)
    assert log_prob == pytest.approx(-1.3863, abs=1e-4)


def test_rewinding_restores_the_sampler():
    sampler = Sampler(Sampling(temperature=1.0, seed=5, repetition_penalty=1.5), 50, "cpu")
    mode = type("Mode", (), {"parameters": type("P", (), {"recovery": True}), "recovery_levels": ("RR",)})
    guard = RecoveryMonitor(sampler)
    for _ in range(20):
        guard.draw(torch.zeros(50), mode)
    seen = sampler.state().seen
    assert guard.rewind() == 16
    assert sampler.state().seen.sum() < seen.sum()
    assert len(guard.signals.tokens) == 4


def test_chat_text_excludes_withdrawn_tokens(model):
    session = Scripted(model, load_in("full", RECOVERS)).script(spikes(40))
    text = "".join(session.chat("Hello.", replace(RANDOM, max_new_tokens=80)))
    assert text == model.tokenizer.decode(session.token_ids)


# ---- Recovery's signals and ladder, with scripted numbers


def feed(signals: Signals, n: int, entropy: float = 2.0, log_prob: float = -2.0, spread: float = 0.2) -> list[object]:
    """Add ``n`` tokens around the given values, no two 12-grams alike; return what they triggered."""
    sign = [spread if i % 2 else -spread for i in range(n)]
    start = len(signals.tokens)
    return [signals.add(start + i, entropy + s, log_prob + s) for i, s in enumerate(sign)]


def test_two_entropy_spikes_in_four_tokens_trigger():
    for between in (2, 3):
        signals = Signals()
        assert feed(signals, 100) == [None] * 100
        assert signals.add(1000, 4.0, -2.0) is None
        assert feed(signals, between) == [None] * between
        trigger = signals.add(1001, 4.5, -2.0)
        assert (trigger is None) == (between == 3)
        assert trigger is None or (trigger.signal == "entropy" and trigger.value > 3)
    feed(below := Signals(), 100, entropy=0.1, spread=0.01)
    assert [below.add(1000 + i, 0.99, -2.0) for i in range(4)] == [None] * 4, (
        "a value this low is not a spike, however certain the text was"
    )


def test_nothing_triggers_before_the_32nd_token():
    signals = Signals()
    feed(signals, 31)
    assert [signals.add(1000 + i, 9.0, -2.0) for i in range(2)] == [None, None]
    later = Signals()
    feed(later, 32)
    assert later.add(1000, 9.0, -2.0) is None
    assert later.add(1001, 9.0, -2.0) is not None


def test_eight_unlikely_tokens_trigger():
    signals = Signals()
    feed(signals, 100, spread=0.6)
    found = [signals.add(1000 + i, 2.0, -4.4) for i in range(8)]
    first = next(i for i, trigger in enumerate(found) if trigger)
    assert found[first].signal == "log-prob"
    # The mean of 8 has to fall by 3 * 0.6, six of these make it fall by 6/8 * 2.4.
    assert first in (5, 6)


def test_one_surprise_in_certain_text_does_not_trigger():
    signals = Signals()
    feed(signals, 100, entropy=0.0, log_prob=0.0, spread=0.0)
    assert signals.add(1000, 9.0, -9.0) is None
    assert [signals.add(1001 + i, 0.2, -0.2) for i in range(8)] == [None] * 8


def test_twelve_tokens_repeated_three_times_trigger():
    signals, twelve = Signals(), list(range(12))
    found = [signals.add(token, 2.0, -2.0) for times in range(3) for token in [*twelve, 100 + times]]
    assert [trigger for trigger in found[:-2] if trigger] == []
    assert found[-2] == ("repetition", 3)


def test_withdrawn_tokens_are_dropped_from_the_statistics():
    signals, undisturbed = Signals(), Signals()
    feed(signals, 50)
    feed(undisturbed, 50)
    for i in range(16):
        signals.add(7, 9.0, -9.0 - i)
    signals.withdraw(16)
    assert signals.tokens == undisturbed.tokens
    assert feed(signals, 60) == feed(undisturbed, 60)
    assert signals == undisturbed or set(signals._grams.values()) == {0, 1}


ALWAYS = range(1, 200)
CLIMB = {1: "SR", 18: "WR", 35: "FR", 52: "RR"}


@pytest.mark.parametrize(
    ("triggered", "levels_taken"),
    [
        (ALWAYS, CLIMB | {117: "SR", 134: "WR", 151: "FR", 180: "RR"}),  # nothing is frozen for 64 tokens: no second FR
        ([10, 11, 26], {10: "SR"}),  # triggers in the cool-down are ignored
        ([10, 27], {10: "SR", 27: "WR"}),
        ([10, 42], {10: "SR", 42: "WR"}),
        ([10, 43], {10: "SR", 43: "SR"}),  # escalation ends after 32 tokens
        ([10, 30, 94], {10: "SR", 30: "WR", 94: "WR"}),
        ([10, 30, 95], {10: "SR", 30: "WR", 95: "SR"}),  # the ladder resets after 64
    ],
    ids=str,
)
def test_ladder_climbs_while_triggers_continue(triggered, levels_taken):
    assert climb(triggered) == levels_taken


def test_modes_without_lower_levels_start_higher():
    assert climb({1, 20, 40}, ("WR", "FR", "RR")) == {1: "WR", 20: "FR", 40: "RR"}
    assert climb(ALWAYS, ("RR",)) == {1: "RR", 129: "RR"}
    assert climb({1}, ()) == {}


def climb(triggered, levels=LEVELS):
    """The levels taken in 199 tokens, by token."""
    ladder = Ladder(levels)
    return {i: level for i in ALWAYS if (level := ladder.token(i in triggered))}


def test_level_is_shown_until_triggers_stop():
    ladder = Ladder()
    assert ladder.level == ""
    ladder.token(True)
    for _ in range(65):
        assert ladder.level == "SR"
        ladder.token(False)
    assert ladder.level == ""


def test_noise_rarely_triggers():
    noise, signals = random.Random(0), Signals()
    found = [signals.add(i, max(0.0, noise.gauss(3, 1)), noise.gauss(-3, 1.5)) for i in range(20_000)]
    assert sum(trigger is not None for trigger in found) < 20
