"""The prefill benchmark: its rows are consistent, and both sides process the same prompt."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from support.integrity import check_integrity
from support.memory_faults import HostMemoryError
from support.shape_runner import filled

from kvchat.bench import decode, model_shapes, prefill, timing
from kvchat.bench.frame import Frame, ModelChoice, parsed
from kvchat.bench.settings import Prefill
from kvchat.engine.runner import ModelRunner, geometry_of, traits_of
from kvchat.errors import DoesNotFitError, UsageError
from kvchat.kv.memory import rates
from kvchat.kv.modes import build

CPU = ModelChoice(device="cpu")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_rows_compare_prefill_with_one_forward(monkeypatch):
    read, one_shot = [], []
    plain_read, plain_shot = prefill._read, prefill._one_shot
    monkeypatch.setattr(prefill, "_read", lambda runner, ids: read.append(ids) or plain_read(runner, ids))
    monkeypatch.setattr(prefill, "_one_shot", lambda model, ids: one_shot.append(ids) or plain_shot(model, ids))
    lines = []
    settings = Prefill(shape="tiny", lengths=(40, 600), turn=5, rounds=2)
    result = prefill.run(settings, CPU, Frame(report=lines.append))
    assert [(row["tokens"], row["chunk"]) for row in result["rows"]] == [(40, 40), (600, 512)]
    for row in result["rows"]:
        assert row["times_one_shot"] == pytest.approx(sum(row["ratios"]) / 2)
        assert all(row[peak] is None or row[peak] > 2**20 for peak in ("peak_bytes", "one_shot_peak_bytes"))
        assert row["turn_seconds"] > 0
    assert [len(ids) for ids in read] == [40, 40, 5, 40, 5, 600, 600, 5, 600, 5]
    assert all(ids in read for ids in one_shot)
    assert len(lines) == 2
    json.dumps(result)


PEAKS = """
import sys, torch
from types import SimpleNamespace
from kvchat.bench import prefill

def peak(taken):
    model = SimpleNamespace(device=torch.device("cpu"))
    return prefill._measured(model, lambda: torch.ones(taken, dtype=torch.uint8)).peak_bytes

peak(1)
sys.stdout.write(" ".join(str(peak(taken)) for taken in (1, int(sys.argv[1]), 1)))
"""


@pytest.mark.slow("a process imports torch and transformers")
def test_the_peak_covers_one_measurement_only():
    """In its own process, because memory of other tests could be freed during the measurement."""
    if not timing.forget_peak():
        pytest.skip("the system cannot reset a process's peak")
    nbytes = 200 * 2**20
    command = [sys.executable, "-c", PEAKS, str(nbytes)]
    child = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    before, large, after = map(int, child.stdout.split())
    assert large - before == pytest.approx(nbytes, rel=0.1)
    assert after < large - 0.9 * nbytes


def test_the_one_shot_peak_excludes_the_host_pool(tiny_shape):
    runner = ModelRunner(tiny_shape, build(parsed("full"), geometry_of(tiny_shape), traits_of(tiny_shape)))
    pool = runner.kv.state.host.nbytes
    assert pool > 0
    assert prefill._without_pool(runner, prefill.Reading(1.0, pool + 5)) == 5
    assert prefill._without_pool(runner, prefill.Reading(1.0, None)) is None
    assert prefill._without_pool(runner, None) is None


def test_a_one_shot_that_does_not_fit_has_no_ratio(monkeypatch):
    monkeypatch.setattr(prefill, "_one_shot", lambda model, ids: None)
    lines = []
    settings = Prefill(shape="tiny", lengths=(40,), rounds=1)
    (row,) = prefill.run(settings, CPU, Frame(report=lines.append))["rows"]
    assert (row["times_one_shot"], row["one_shot_seconds"], row["ratios"]) == (None, None, [])
    assert "does not fit" in lines[0]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), HostMemoryError(2**40), MemoryError()])
def test_a_one_shot_out_of_memory_returns_none(tiny_shape, monkeypatch, error):
    monkeypatch.setattr(prefill, "_measured", Mock(side_effect=error))
    assert prefill._one_shot(tiny_shape, [1, 2, 3]) is None


def test_prompts_beyond_the_context_are_rejected():
    with pytest.raises(UsageError, match=r"4,000 tokens and a turn of 200 after them are 4,200.*reads 4,096"):
        prefill.run(Prefill(shape="tiny", lengths=(4000,), turn=200), CPU)


@pytest.mark.cuda
def test_prefill_on_a_gpu_stays_within_the_predicted_memory():
    result = prefill.run(Prefill(shape="llama-3.2-1b", lengths=(4096, 30_000), rounds=1))
    for row in result["rows"]:
        assert row["peak_bytes"] <= row["predicted_peak_bytes"]
    assert result["rows"][1]["peak_bytes"] < result["rows"][1]["one_shot_peak_bytes"]
    torch.cuda.empty_cache()


# ---- Known model shapes: their sizes, and random K/V in every slot


SPECULATIVE = parsed("speculative:sink=64,window=64", 320)  # six retrieved pages


def test_filled_slots_are_nonzero_and_layers_differ(tiny_shape, monkeypatch):
    monkeypatch.setattr(model_shapes, "FILL_TOKENS", 128)
    runner = filled(tiny_shape, build(SPECULATIVE, geometry_of(tiny_shape), traits_of(tiny_shape)), 900)
    kv = runner.kv
    assert kv.total == 900
    keys = [kv.state.host.dense(layer, 900)[0] for layer in range(tiny_shape.layers)]
    assert all(bool((k != 0).all()) for k in keys)
    assert not torch.equal(keys[0], keys[1])
    assert bool((kv.state.slots[-1].pages >= 0).all())
    check_integrity(kv.state)


@pytest.mark.parametrize(
    ("name", "billions", "token_bytes"),
    [
        ("llama-3.1-8b", 8.03, 131_072),
        ("llama-3.2-3b", 3.21, 114_688),
        ("llama-3.2-1b", 1.24, 32_768),
        ("qwen2.5-7b", 7.62, 57_344),
        ("qwen3-4b", 4.02, 147_456),
        ("qwen3-8b", 8.19, 147_456),
        ("mistral-7b", 7.25, 131_072),
    ],
)
def test_shapes_have_the_published_sizes(name, billions, token_bytes):
    import transformers

    class_name, arguments = model_shapes.SHAPES[name]
    config = getattr(transformers, class_name)(**arguments)
    with torch.device("meta"):
        built = transformers.AutoModelForCausalLM.from_config(config)
    assert sum(p.numel() for p in built.parameters()) / 1e9 == pytest.approx(billions, abs=0.01)
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    assert config.num_hidden_layers * config.num_key_value_heads * head * 2 * 2 == token_bytes


@pytest.mark.parametrize(
    ("choice", "message"),
    [(ModelChoice("x/y"), "cannot be combined"), (ModelChoice(quantize="int8"), "cannot be quantized"),
     (ModelChoice(dtype="int8"), 'no dtype "int8"')],
)  # fmt: skip
def test_invalid_options_for_random_weights_are_rejected(choice, message):
    with pytest.raises(UsageError, match=message):
        model_shapes.choose("tiny", choice, lambda line: None)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), HostMemoryError(2**40), MemoryError()])
def test_a_shape_does_not_fit_if_memory_runs_out(monkeypatch, error):
    monkeypatch.setattr(model_shapes, "wrap", Mock(side_effect=error))
    with pytest.raises(DoesNotFitError, match="tiny does not fit cpu"):
        model_shapes.build("tiny", "cpu")


# ---- Step times: which steps count and which warm up


def test_step_times_are_medians_without_the_warm_up(monkeypatch):
    seconds = [0.0]
    clock = SimpleNamespace(perf_counter=lambda: seconds[-1], process_time=lambda: seconds[-1] / 2)
    monkeypatch.setattr(timing, "time", clock)
    timed = timing.time_steps(
        lambda token: seconds.append(seconds[-1] + token), [50, 50, 50, 1, 2, 9], torch.device("cpu")
    )
    assert timed == timing.Timing(ms=2000, wall_ms=4000, processor_ms=2000)


def test_the_warm_up_covers_two_sync_intervals():
    assert timing.warm_up(torch.device("cuda")) >= 2 * parsed("sync", 256).m


# ---- A process's peak memory, read from fake files


def test_the_peak_is_reset_and_read(tmp_path):
    (tmp_path / "status").write_text("Name:\tpython\nVmHWM:\t  2048 kB\nVmRSS:\t  1024 kB\n")
    assert timing.forget_peak(tmp_path)
    assert (tmp_path / "clear_refs").read_text() == "5"
    assert timing.read_peak(tmp_path) == 2048 * 1024


def test_an_unreadable_peak_is_none(tmp_path):
    assert not timing.forget_peak(tmp_path / "absent")
    assert timing.read_peak(tmp_path) is None
    (tmp_path / "status").write_text("Name:\tpython\nVmHWM:\n")
    assert timing.read_peak(tmp_path) is None


# ---- Device rates: bytes over the best time


HERE = torch.device("cpu")


def test_rates_are_bytes_over_the_best_time(monkeypatch):
    monkeypatch.setattr(decode, "GATHER_TOKENS", {"cpu": 2**12})
    monkeypatch.setattr(rates, "_timed", lambda run, device: 1e-3)
    # A copy reads and writes, so its bytes count twice and it is the faster of the two here.
    assert rates.read(HERE, torch.float32, 2**22) == pytest.approx(2 * 2**22 / 1e-3)
    assert decode.gather(HERE, torch.float32) == pytest.approx(2**12 * 2 * 512 / 4 / 1e-3 / 1e9, rel=0.1)


def test_the_first_timed_run_does_not_count():
    runs = []
    assert rates.seconds(lambda: runs.append(1), HERE) > 0
    assert len(runs) == 1 + rates.RUNS


def test_the_cpu_share_balances_the_cpu_and_the_link():
    nbytes, link, cpu, layers = 4e9, 13e9, 30e9, 32
    share = rates.share_on_cpu(nbytes, link, cpu, layers)
    assert share * nbytes / cpu == pytest.approx((1 - share) * nbytes / link)
    launching = rates.TURN_S * layers
    enough = launching * link / share  # bytes at which it saves what launching costs
    assert rates.share_on_cpu(1.01 * enough, link, cpu, layers) == share
    assert rates.share_on_cpu(0.99 * enough, link, cpu, layers) == 0
    assert rates.share_on_cpu(nbytes, link, 0.0, layers) == 0


@pytest.mark.cuda
def test_gpu_roofline_rates_are_plausible():
    assert decode.kernel_gather(torch.device("cuda"), torch.float32) == {}
    found = decode.measure(torch.device("cuda"), torch.bfloat16)
    assert found.read > found.to_device > 0
    assert found.gather > 0.5 * found.to_device
    assert found.to_host > 0


# ---- Busy processes end with their measurement; the time of other processes is counted


def children(pid: int) -> list[int]:
    listed = Path(f"/proc/{pid}/task/{pid}/children")
    if not listed.exists():
        pytest.skip("the system does not list a process's children")
    return [int(child) for child in listed.read_text().split()]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_busy_processes_end_when_the_measurement_fails():
    before = set(children(os.getpid()))
    started = set()

    def measure():
        with timing.keep_busy(2):
            started.update(set(children(os.getpid())) - before)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure()
    assert len(started) == 2
    assert not any(map(is_alive, started))


def test_busy_processes_end_when_the_measurement_is_killed():
    script = "from kvchat.bench.timing import keep_busy\nwith keep_busy(1): print(flush=True); input()"
    killed = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with killed:
        assert killed.stdout
        killed.stdout.readline()
        (orphan,) = children(killed.pid)
        killed.kill()
    deadline = time.monotonic() + 60
    while is_alive(orphan):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("threads", "load", "share"), [(1, 0, 1.0), (2, 2, 0.5), (2, 0, 1.0), (1, 1, 1.0), (64, 2, 0.5), (1, 7, 0.25)]
)
def test_the_fair_share_depends_on_threads_and_load(monkeypatch, threads, load, share):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    assert timing.fair_share(threads, load) == share


def test_the_share_of_other_processes_is_computed(tmp_path, monkeypatch):
    stat = tmp_path / "stat"
    ticks = os.sysconf("SC_CLK_TCK")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1})
    stat.write_text("cpu  9 9 9 9 9 9 9 9 9 9\ncpu1 100 0 0 100 0 0 0 0 50 0\n")
    monkeypatch.setattr(time, "process_time", lambda: 1.0)
    before = timing.sample_processors(stat)
    stat.write_text(f"cpu1 {100 + 6 * ticks} 0 0 {100 + 3 * ticks} {ticks} 0 0 0 50 0\n")
    monkeypatch.setattr(time, "process_time", lambda: 5.0)
    assert timing.share_of_others(before, timing.sample_processors(stat)) == [pytest.approx(0.2)]
    assert timing.share_of_others(before, before) == []


def test_child_processes_do_not_count_as_others():
    before = timing.sample_processors()
    if before is None:
        pytest.skip("the system does not report processor times")
    own = time.process_time()
    with timing.keep_busy(1):
        deadline = time.monotonic() + 60
        while timing.sample_processors()[2] - before[2] < 0.5 + time.process_time() - own:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        running = timing.sample_processors()[2]
    assert timing.sample_processors()[2] >= running - 0.05


def test_missing_processor_times_give_no_share_of_others(tmp_path):
    assert timing.sample_processors(tmp_path / "none") is None
    assert timing.share_of_others(None, (1.0, 1.0, 1.0)) == []
