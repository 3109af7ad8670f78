"""Recovery in a session whose logits are scripted over a small random model; sampling and text are the real ones."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch
from support.loads import entering

from kvchat.engine.recovery import RecoveryMonitor, measure
from kvchat.engine.sampler import Sampler
from kvchat.engine.session import Session
from kvchat.protocol.messages import Finished, Recovered, Sampling, Started, Text, Turn, Withdrawn

TURNS = (Turn("user", "Tell me about the sea. " * 40),)
RANDOM = Sampling(temperature=1.0, seed=1, max_new_tokens=180)
EAGER = {"tau": 5.0}


class Scripted(Session):
    """Certain of another token each time, but at the tokens ``unsure`` (counted as drawn), where all are alike."""

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
    """The events, and the text that is left of them."""
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


def test_each_level_comes_in_its_turn(small_model):
    session = Scripted(small_model, entering("freeze", EAGER)).script(spikes(40, 70, 100, 130))
    events, text = run(session)
    assert levels(events) == ["SR", "WR", "FR", "RR"]
    assert all(event.signal == "entropy" and event.value > 3 for event in events if isinstance(event, Recovered))
    (withdrawn,) = [event for event in events if isinstance(event, Withdrawn)]
    assert withdrawn.tokens == 16
    finished, started = events[-1], events[0]
    assert isinstance(finished, Finished)
    assert isinstance(started, Started)
    assert finished.text == text == small_model.tokenizer.decode(session.token_ids)
    assert session.text(started.prompt_tokens, session.total) == text
    assert session.total == started.prompt_tokens + 180
    assert (finished.stats.recoveries, finished.stats.withdrawn_tokens) == (4, 16)
    assert finished.stats.generated_tokens == len(session.token_ids) == 180
    assert session.snapshot().extras["recovery"] == "RR"


def test_a_full_reset_reads_everything_for_a_while(small_model):
    session = Scripted(small_model, entering("freeze", EAGER)).script(spikes(40, 60, 80))
    run(session)
    assert not any(session.all_read[20:42])
    assert all(session.all_read[82:146])
    assert not all(session.all_read[146:])


def test_the_regeneration_takes_another_way(small_model):
    """Tokens before the withdrawn ones stay, and the seed determines all of it."""
    sampling = Sampling(temperature=1.0, seed=3, max_new_tokens=110)
    first = Scripted(small_model, entering("full", {"recovery": True})).script(range(50, 400))
    second = Scripted(small_model, entering("full", {"recovery": True})).script(range(50, 400))
    plain = Scripted(small_model, entering("full", {})).script(range(50, 400))
    assert levels(run(first, sampling)[0]) == levels(run(second, sampling)[0]) == ["RR"]
    run(plain, sampling)
    assert first.token_ids == second.token_ids
    assert first.token_ids[:35] == plain.token_ids[:35]
    assert first.token_ids[50:60] != plain.token_ids[50:60]


def test_off_by_a_setting_and_where_nothing_would_change(small_model):
    unsure, drawn = spikes(40, 50), replace(RANDOM, max_new_tokens=60)
    assert levels(run(Scripted(small_model, entering("freeze", {"recovery": False})).script(unsure), drawn)[0]) == []
    assert levels(run(Scripted(small_model, entering("streaming", {})).script(unsure), drawn)[0]) == []
    greedy = replace(drawn, temperature=0)
    assert levels(run(Scripted(small_model, entering("full", {"recovery": True})).script(unsure), greedy)[0]) == []


def test_a_finished_answer_is_not_taken_back(small_model):
    """The regeneration is due with the last token."""
    session = Scripted(small_model, entering("full", {"recovery": True})).script(spikes(40))
    assert levels(run(session, Sampling(temperature=1.0, seed=1, max_new_tokens=42))[0]) == []
    session = Scripted(small_model, entering("full", {"recovery": True})).script(spikes(40))
    assert levels(run(session, Sampling(temperature=1.0, seed=1, max_new_tokens=43))[0]) == ["RR"]


def test_speculative_widens_its_budget_for_a_while(small_model):
    session = Scripted(small_model, entering("speculative", {"budget": 128, "recovery": True})).script(spikes(40, 60))
    budgets = {}

    def between(generated: int) -> None:
        budgets[generated] = session.info.params["budget"]

    list(session.answer(TURNS, RANDOM, between))
    assert [budgets[n] for n in (42, 43, 62, 63, 120)] == [128, 256, 256, 512, 512]
    assert budgets[150] == 128


def test_a_mode_entered_meanwhile_stays(small_model):
    session = Scripted(small_model, entering("speculative", {"budget": 128, "recovery": True})).script(spikes(40))

    def between(generated: int) -> None:
        if generated == 60:
            session.switch("streaming")

    list(session.answer(TURNS, RANDOM, between))
    assert session.info.mode == "streaming"


def test_what_is_measured():
    token, entropy, log_prob = measure(torch.tensor([0.0, 0.0, -torch.inf, 0.0, 0.0]), torch.tensor(1)).tolist()
    assert token == 1
    assert entropy == pytest.approx(1.3863, abs=1e-4)
    assert log_prob == pytest.approx(-1.3863, abs=1e-4)


def test_rewinding_puts_the_sampler_back():
    sampler = Sampler(Sampling(temperature=1.0, seed=5, repetition_penalty=1.5), 50, "cpu")
    mode = type("Mode", (), {"parameters": type("P", (), {"recovery": True}), "recovery_levels": ("RR",)})
    guard = RecoveryMonitor(sampler)
    for _ in range(20):
        guard.draw(torch.zeros(50), mode)
    seen = sampler.state().seen
    assert guard.rewind() == 16
    assert sampler.state().seen.sum() < seen.sum()
    assert len(guard.signals.tokens) == 4


def test_the_conversation_kept_inside_has_no_withdrawn_text(small_model):
    session = Scripted(small_model, entering("full", {"recovery": True})).script(spikes(40))
    text = "".join(session.chat("Hello.", Sampling(temperature=1.0, seed=1, max_new_tokens=80)))
    assert text == small_model.tokenizer.decode(session.token_ids)
