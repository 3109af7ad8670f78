"""A token's time by the length of the conversation: what is decoded after what, in turns, and the ratios."""

from __future__ import annotations

import itertools
from statistics import median

import pytest

from kvchat.bench import decoding, lengths
from kvchat.bench.decoding import ModeRun
from kvchat.bench.frame import Frame, ModelChoice
from kvchat.bench.report import tables
from kvchat.bench.timing import Timing
from kvchat.errors import DoesNotFitError, UsageError

CPU = ModelChoice(device="cpu")
SHORT, LONG = 400, 900


def settings(**changes):
    return lengths.Settings(
        **{"shape": "tiny", "contexts": (LONG, SHORT), "budget": 256, "steps": 4, "rounds": 3, **changes}
    )


def test_a_ratio_is_the_median_of_those_within_a_round(monkeypatch):
    times = iter([10.0, 11.0, 20.0, 40.0, 30.0, 36.0])  # short, long, short, long: the machine is slower every time
    monkeypatch.setattr(ModeRun, "measure", lambda self, tokens: Timing(next(times), 0.0))
    short, long = lengths.run(settings(modes=("full",)), CPU)["summary"]
    assert (short["context"], long["context"]) == (SHORT, LONG)
    assert short["times_shortest"] == 1
    assert long["times_shortest"] == median([11 / 10, 40 / 20, 36 / 30])
    assert (long["ms"], long["ms_spread"]) == (36, [11, 40])


def test_every_mode_decodes_after_each_context_in_turns_and_reads_what_it_always_reads(monkeypatch):
    stored = []

    def timed(step, tokens, device):
        runner = step.__self__
        before = runner.kv.total
        for token in tokens:
            step(token)
        stored.append((runner.kv.mode.name, before, runner.kv.total - before))
        return Timing(1.0, 1.0)

    monkeypatch.setattr(decoding, "time_steps", timed)
    asked = settings(rounds=2)
    rows = lengths.run(asked, CPU)["summary"]
    turns = itertools.product(asked.modes, range(2), (SHORT, LONG))
    assert stored == [(mode, context, 7) for mode, _, context in turns]
    held = {(row["variant"], row["context"]): row["kv_device_bytes"] for row in rows}
    assert held["streaming", SHORT] == held["streaming", LONG]
    assert held["sync", SHORT] < held["sync", LONG]


def test_the_table_has_times_and_ratios_and_a_refused_mode_its_reason():
    lines = []
    result = lengths.run(
        settings(modes=("streaming", "speculative:window=4"), rounds=1), CPU, Frame(report=lines.append)
    )
    table = tables(result)[0].markdown()
    assert "times the shortest" in table
    assert "| streaming | 400 |" in table
    assert "The speculative window is too small" in table
    assert any("900 tokens" in line and "x the shortest" in line for line in lines)


@pytest.mark.parametrize("contexts", [(SHORT,), (SHORT, SHORT)])
def test_one_length_is_refused(contexts):
    with pytest.raises(UsageError, match="1 was given: 400"):
        lengths.run(settings(contexts=contexts), CPU)


def test_a_length_beyond_the_context_is_refused_before_anything_is_stored():
    with pytest.raises(DoesNotFitError, match="The contexts do not fit the model"):
        lengths.run(settings(contexts=(SHORT, 10**9)), CPU)
