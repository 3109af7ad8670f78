"""Mode switches: storms, refusals, memory that runs out (E8)."""

import gc
import random
import time
from itertools import permutations

import pytest
import torch
from support.kv_run import Run
from support.kv_steps import use_gpu_path
from support.memory import stored_rows, tensors_of
from support.memory_faults import NO_MEMORY, PLACES, MemoryRunsOut
from support.mode_rows import CORE, FIRST, MIXED, ROWS
from support.toy_model import toy

from kvchat.config.modes import mode_names, registered
from kvchat.errors import DoesNotFitError
from kvchat.kv.manager import KVManager
from kvchat.kv.memory import available
from kvchat.kv.memory.device_slots import DeviceSlots
from kvchat.kv.ops.torch_ops import TorchOps

PLAIN = ("plain", "plain")


def storm(run: Run, switches: int, seed: int) -> list[str]:
    """Random switches with a few steps between them; returns the modes entered."""
    dice, entered = random.Random(seed), []
    for _ in range(switches):
        mode, params = ROWS[dice.choice(list(ROWS))]
        run.switch(mode, **params)
        run.step(dice.choice([0, 0, 1, 2]))
        entered.append(mode)
    return entered


def test_a_hundred_switches_change_no_bytes_and_leak_no_memory():
    run, calm = (Run(toy(MIXED, page=8), "full").begun(150, 5) for _ in range(2))
    before = stored_rows(run.kv)
    entered = storm(run, 99, seed=1)
    run.switch("full")
    assert set(entered) == set(registered())
    run.check()
    calm.step(len(run.ids) - len(calm.ids))
    calm.switch("full")
    # The toy's layers are independent, so all of them equal the undisturbed run's, not only layer 0.
    for layer, (one, other) in enumerate(zip(stored_rows(run.kv), stored_rows(calm.kv), strict=True)):
        assert torch.equal(one, other)
        assert torch.equal(one[:, :, :155], before[layer])
    assert_same_memory(run.kv, calm.kv)


def assert_same_memory(one: KVManager, other: KVManager) -> None:
    gc.collect()
    assert one.device_bytes == other.device_bytes
    assert sorted(tensors_of(one).values()) == sorted(tensors_of(other).values())
    ours = {id(one.state.geometry), id(other.state.geometry)}  # other tests may hold slots too
    alive = [each for each in gc.get_objects() if type(each) is DeviceSlots and id(each.geometry) in ours]
    assert len(alive) == len(one.state.slots) + len(other.state.slots)


@pytest.mark.parametrize("row", FIRST.values())
def test_switches_leak_no_device_memory(row):
    mode, params = ROWS[row]
    run, fresh = (Run(toy(PLAIN, page=8), mode, **params) for _ in range(2))
    fresh.prefill(120)
    run.prefill(120)
    for other, given in (ROWS[other] for other in FIRST.values()):
        run.switch(other, **given)
    run.switch(mode, **params)
    fresh.switch(mode, **params)
    assert_same_memory(run.kv, fresh.kv)


@pytest.mark.parametrize("row", CORE)
def test_switches_work_when_empty_and_after_a_prefill(row):
    mode, params = ROWS[row]
    run = Run(toy(PLAIN, page=8), "full")
    run.switch(mode, **params)
    run.prefill(1)
    run.step(3)
    run.prefill(130)
    run.switch("full")
    run.switch(mode, **params)
    run.step(20)
    run.check()


def test_a_switch_returns_the_bytes_moved():
    run = Run(toy(PLAIN, page=8), "streaming", **ROWS["streaming-plain"][1]).begun(200)
    g = run.toy.geometry
    assert run.switch("full") == 200 * g.token_bytes
    assert run.switch("streaming", **ROWS["streaming-plain"][1]) == 64 * g.token_bytes


def test_a_refused_switch_keeps_the_mode(monkeypatch):
    run = Run(toy(PLAIN, page=8), "speculative", **ROWS["speculative"][1]).begun(200, 10)
    monkeypatch.setattr(available, "free_bytes", lambda device: 0)
    with pytest.raises(DoesNotFitError, match=r"freeze.* [\d.]+ KiB on cpu, and [\d.]+ KiB"):
        run.kv.switch(run.mode("freeze"))
    run.step(10)
    run.check()


SOME_SWITCHES = [
    ("full", "speculative"),
    ("streaming", "full"),
    ("sync", "freeze"),
    ("speculative", "sync"),
    ("freeze", "streaming"),
]


@pytest.mark.slow("a switch for each place where memory runs out")
@pytest.mark.parametrize("short", [False, True])
@pytest.mark.parametrize(("old", "new"), list(permutations(mode_names(), 2)) if PLACES else SOME_SWITCHES)
def test_the_mode_stays_if_memory_runs_out_in_a_switch(old, new, short, count):
    failed = 0
    for at in range(1, 1000, 1 if PLACES else 18):
        run = Run(toy(("plain", "plain"), page=8), ROWS[old][0], **ROWS[old][1]).begun(60, 3)
        target = run.mode(ROWS[new][0], **ROWS[new][1])
        try:
            with MemoryRunsOut(at, short=short):
                run.kv.switch(target)
            break
        except NO_MEMORY:
            failed += 1
        assert run.kv.mode is not target
        run.reference.enter(len(run.ids))
        run.step(3)
        run.check()
    count["failures of memory"] += failed
    assert failed > 1


# ---- Recall in any order and at any time gives the same outputs (E9)


NEVER_RECALL = {row for row, (mode, _) in ROWS.items() if mode in ("full", "streaming")}


@pytest.mark.parametrize("row", [row for row in CORE if row not in NEVER_RECALL])
def test_recall_order_and_delays_do_not_change_outputs(row, monkeypatch):
    plain, run = (Run.of_row(row, toy(PLAIN, page=8, kv_heads=4)) for _ in range(2))
    for one in (plain, run):
        use_gpu_path(one.kv)
        one.kv.state.host.pageable_reason = "so that copies are picked"
    plain.prefill(150)
    expected = [plain.step() for _ in range(20)]
    copy, dice = TorchOps._copy, torch.Generator().manual_seed(0)

    def shuffled(self, host, slots, source, v_source, target, v_target):
        order = torch.randperm(len(source), generator=dice)
        time.sleep(0.0005)
        for part in order.tensor_split(3):
            copy(self, host, slots, source[part], v_source, target[part], v_target)

    monkeypatch.setattr(TorchOps, "_copy", shuffled)
    run.prefill(150)
    moved = run.kv.state.transfer.moved_bytes()
    for step in expected:
        assert all(torch.equal(a, b) for a, b in zip(step, run.step(), strict=True))
    run.check()
    assert run.kv.state.transfer.moved_bytes() > moved
