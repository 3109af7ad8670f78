"""Times of steps: what counts and what warms up."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from kvchat.bench import timing
from kvchat.bench.frame import parsed


def test_the_first_steps_do_not_count_and_the_median_of_the_others_does(monkeypatch):
    seconds = [0.0]
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: seconds[-1]))
    timed = timing.time_steps(
        lambda token: seconds.append(seconds[-1] + token), [50, 50, 50, 1, 2, 9], torch.device("cpu")
    )
    assert timed == timing.Timing(ms=2000, wall_ms=4000)


def test_warm_up_covers_every_kind_of_step_of_sync():
    assert timing.warm_up(torch.device("cuda")) >= 2 * parsed("sync", 256).m
