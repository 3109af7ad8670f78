"""Times of steps: what counts and what warms up."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kvchat.bench import decode, timing
from kvchat.bench.frame import parsed
from kvchat.kv.memory import rates


def test_the_first_steps_do_not_count_and_the_median_of_the_others_does(monkeypatch):
    seconds = [0.0]
    clock = SimpleNamespace(perf_counter=lambda: seconds[-1], process_time=lambda: seconds[-1] / 2)
    monkeypatch.setattr(timing, "time", clock)
    timed = timing.time_steps(
        lambda token: seconds.append(seconds[-1] + token), [50, 50, 50, 1, 2, 9], torch.device("cpu")
    )
    assert timed == timing.Timing(ms=2000, wall_ms=4000, processor_ms=2000)


def test_warm_up_covers_every_kind_of_step_of_sync():
    assert timing.warm_up(torch.device("cuda")) >= 2 * parsed("sync", 256).m


# ---- The peak of a process's memory, read from made-up files


def test_the_peak_is_forgotten_and_read(tmp_path):
    (tmp_path / "status").write_text("Name:\tpython\nVmHWM:\t  2048 kB\nVmRSS:\t  1024 kB\n")
    assert timing.forget_peak(tmp_path)
    assert (tmp_path / "clear_refs").read_text() == "5"
    assert timing.read_peak(tmp_path) == 2048 * 1024


def test_where_the_system_does_not_tell_nothing_is_claimed(tmp_path):
    assert not timing.forget_peak(tmp_path / "absent")
    assert timing.read_peak(tmp_path) is None
    (tmp_path / "status").write_text("Name:\tpython\nVmHWM:\n")
    assert timing.read_peak(tmp_path) is None


# ---- Rates of a device: bytes over the best time


CPU = torch.device("cpu")


def test_rates_are_bytes_over_the_best_time(monkeypatch):
    monkeypatch.setattr(decode, "GATHER_TOKENS", {"cpu": 2**12})
    monkeypatch.setattr(rates, "_timed", lambda run, device: 1e-3)
    # A copy reads and writes, so it counts twice and is the better of the two here.
    assert rates.read(CPU, torch.float32, 2**22) == pytest.approx(2 * 2**22 / 1e-3)
    assert decode.gather(CPU, torch.float32) == pytest.approx(2**12 * 2 * 512 / 4 / 1e-3 / 1e9, rel=0.1)


def test_every_timed_run_but_the_first_counts():
    runs = []
    assert rates.seconds(lambda: runs.append(1), CPU) > 0
    assert len(runs) == 1 + rates.RUNS


def test_the_cpu_takes_as_long_for_its_share_as_the_link_for_the_rest():
    nbytes, link, beside, layers = 4e9, 13e9, 30e9, 32
    share = rates.share_on_cpu(nbytes, link, beside, layers)
    assert share * nbytes / beside == pytest.approx((1 - share) * nbytes / link)
    launching = rates.LAUNCHES_S * layers
    pays = launching * link / share  # bytes from which on it saves what launching costs
    assert rates.share_on_cpu(1.01 * pays, link, beside, layers) == share
    assert rates.share_on_cpu(0.99 * pays, link, beside, layers) == 0
    assert rates.share_on_cpu(nbytes, link, 0.0, layers) == 0


@pytest.mark.cuda
def test_roofline_of_a_gpu():
    assert decode.kernel_gather(torch.device("cuda"), torch.float32) == {}
    found = decode.measure(torch.device("cuda"), torch.bfloat16)
    assert found.read > found.to_device > 0
    assert found.gather > 0.5 * found.to_device
    assert found.to_host > 0
