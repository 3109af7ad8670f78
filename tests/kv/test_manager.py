"""The kv in every mode: switches, truncation, failures, growth, turns (E8, E10)."""

from __future__ import annotations

import gc
import random
from contextlib import suppress
from itertools import permutations

import pytest
import torch
from support.grids import pairwise, thinned
from support.kv_run import Run
from support.kv_steps import decode_step, forward, prefill
from support.memory import tensors_of
from support.memory_faults import NO_MEMORY, PLACES, MemoryRunsOut
from support.mode_rows import CORE, MIXED, ROWS
from support.toy_model import toy

from kvchat.config.modes import mode_names
from kvchat.errors import DoesNotFitError
from kvchat.kv.inspect import attended, check_integrity
from kvchat.kv.manager import KVManager
from kvchat.kv.memory import available, budget
from kvchat.kv.memory.device_slots import DeviceSlots
from kvchat.kv.memory.step_timer import StepTimer
from kvchat.kv.ops.cpu_ops import CpuOps
from kvchat.kv.ops.torch_ops import TorchOps
from kvchat.kv.transfer import Transfer

PLAIN = ("plain", "plain")


def stored(kv: KVManager) -> list[torch.Tensor]:
    return [torch.stack(kv.state.host.dense(layer, kv.total)).clone() for layer in range(kv.state.geometry.layers)]


# ---- E8: a storm of switches


def storm(run: Run, switches: int, seed: int) -> list[str]:
    """Random switches with a few steps between them; the modes that were entered."""
    dice, entered = random.Random(seed), []
    for _ in range(switches):
        mode, params = ROWS[dice.choice(list(ROWS))]
        run.switch(mode, **params)
        run.step(dice.choice([0, 0, 1, 2]))
        entered.append(mode)
    return entered


def test_a_hundred_switches_change_no_stored_byte_and_leave_no_device_byte():
    run, calm = (Run(toy(MIXED, page=8), "full") for _ in range(2))
    for one in (run, calm):
        one.prefill(150)
        one.step(5)
    before = stored(run.kv)
    entered = storm(run, 99, seed=1)
    run.switch("full")
    assert set(entered) == set(mode_names())
    run.check()
    calm.step(len(run.ids) - len(calm.ids))
    calm.switch("full")
    # The toy's layers do not depend on each other, so all of them equal the undisturbed run's, not layer 0 only.
    for layer, (one, other) in enumerate(zip(stored(run.kv), stored(calm.kv), strict=True)):
        assert torch.equal(one, other)
        assert torch.equal(one[:, :, :155], before[layer])
    assert_same_memory(run.kv, calm.kv)


def assert_same_memory(one: KVManager, other: KVManager) -> None:
    gc.collect()
    assert one.device_bytes == other.device_bytes
    assert sorted(tensors_of(one).values()) == sorted(tensors_of(other).values())
    mine = {
        id(one.state.geometry),
        id(other.state.geometry),
    }  # other tests hold slots too
    alive = [thing for thing in gc.get_objects() if type(thing) is DeviceSlots and id(thing.geometry) in mine]
    assert len(alive) == len(one.state.slots) + len(other.state.slots)


@pytest.mark.parametrize("row", ROWS)
def test_switches_leave_no_device_byte_behind(row):
    mode, params = ROWS[row]
    run, fresh = (Run(toy(PLAIN, page=8), mode, **params) for _ in range(2))
    fresh.prefill(120)
    run.prefill(120)
    for other, given in ROWS.values():
        run.switch(other, **given)
    run.switch(mode, **params)
    fresh.switch(mode, **params)
    assert_same_memory(run.kv, fresh.kv)


@pytest.mark.parametrize("row", CORE)
def test_a_switch_in_an_empty_store_and_right_after_a_prefill(row):
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


def test_a_switch_tells_what_moved():
    run = Run(toy(PLAIN, page=8), "streaming", **ROWS["streaming-plain"][1])
    run.prefill(200)
    g = run.toy.geometry
    assert run.switch("full") == 200 * g.token_bytes
    assert run.switch("streaming", **ROWS["streaming-plain"][1]) == 64 * g.token_bytes


def test_a_refused_switch_keeps_the_mode_and_its_numbers(monkeypatch):
    run = Run(toy(PLAIN, page=8), "speculative", **ROWS["speculative"][1])
    run.prefill(200)
    run.step(10)
    monkeypatch.setattr(budget, "free_bytes", lambda device: 0)
    with pytest.raises(DoesNotFitError, match=r"freeze mode does not fit.* takes \d+ KiB on cpu, \d+ KiB are free"):
        run.kv.switch(run.mode("freeze"))
    run.step(10)
    run.check()


@pytest.mark.parametrize("row", CORE)
def test_memory_that_runs_out_in_a_switch_leaves_the_old_mode(row, monkeypatch):
    mode, params = ROWS[row]
    run = Run(toy(PLAIN, page=8), mode, **params)
    run.prefill(200)
    run.step(10)
    new = run.mode("full")
    monkeypatch.setattr(new, "fill", out_of_memory)
    with pytest.raises(torch.OutOfMemoryError):
        run.kv.switch(new)
    run.reference.enter(len(run.ids))  # the old mode was entered anew, with all that may be read
    run.step(10)
    run.check()


def out_of_memory(*_args, **_kwargs):
    raise torch.OutOfMemoryError("no memory left")


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
def test_memory_that_runs_out_anywhere_in_a_switch_leaves_the_old_mode(old, new, short, count):
    failed = 0
    for at in range(1, 1000, 1 if PLACES else 9):
        run = Run(toy(("plain", "plain"), page=8), ROWS[old][0], **ROWS[old][1])
        run.prefill(60)
        run.step(3)
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
    assert failed > 3


# ---- truncation


@pytest.mark.parametrize(("row", "to"), thinned(CORE, [0, 3, 17, 100, 158, 159], each=3))
def test_what_is_written_anew_after_a_truncation_is_what_is_read(row, to):
    """A mode's two core rows to three of the lengths each, to all in the long form; ``test_properties`` to any."""
    mode, params = ROWS[row]
    run = Run(toy(PLAIN, page=8), mode, **params)
    run.prefill(135)
    run.step(25)
    run.truncate(to)
    run.check()
    if to % 2 or not to:
        run.prefill(7)
    run.step(30)
    run.check()


# ---- failures


def fail_in_step(run: Run) -> None:
    with decode_step(run.kv), forward(run.kv):
        for i in range(2):
            run.kv.attention(i, *run.toy.qkv(i, [900], 140), run.toy.specs[i])
        out_of_memory()


def fail_in_prefill(run: Run) -> None:
    with prefill(run.kv, 2):
        run.kv.attention(0, *run.toy.qkv(0, [900, 901], 120), run.toy.specs[0])
        out_of_memory()


@pytest.mark.parametrize("row", CORE)
def test_a_step_that_fails_stores_nothing_and_the_next_one_is_right(row):
    mode, params = ROWS[row]
    run = Run(toy(PLAIN, page=8), mode, **params)
    run.prefill(120)
    run.step(20)
    before = stored(run.kv)
    with pytest.raises(torch.OutOfMemoryError):
        fail_in_step(run)
    assert run.kv.total == 140
    assert all(torch.equal(a, b) for a, b in zip(stored(run.kv), before, strict=True))
    if mode != "streaming":  # what was kept before the step is kept after it, and nothing else
        run.reference.enter(140)
    run.step(20)
    run.check()


def step_alone(run: Run) -> None:
    """A step without the reference, which knows nothing of what an aborted one left in scores and queries."""
    with decode_step(run.kv), forward(run.kv):
        for i in range(2):
            run.kv.attention(i, *run.toy.qkv(i, [900], run.kv.total), run.toy.specs[i])


CHANGES = {"move_shared": TorchOps, "move_pages": CpuOps, "move_tokens": TorchOps, "end_step": StepTimer}


@pytest.mark.parametrize(("row", "name", "when"), pairwise(CORE, [*CHANGES], ["before", "after"]))
def test_steps_cut_short_where_slots_change_leave_no_false_slot(row, name, when, monkeypatch):
    """Every row at every change, before it or after it in turn; both in the long form."""
    mode, params = ROWS[row]
    run = Run(toy(PLAIN, page=8), mode, **params)
    run.prefill(120)
    run.step(20)
    owner, genuine = CHANGES[name], getattr(CHANGES[name], name)

    def cut(*args):
        if when == "after":
            genuine(*args)
        raise KeyboardInterrupt

    for _ in range(10):
        before = stored(run.kv)
        with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
            patch.setattr(owner, name, cut)
            step_alone(run)
        assert int(run.kv.state.position) == run.kv.total
        check_integrity(run.kv.state)
        for now, then in zip(stored(run.kv), before, strict=True):
            assert torch.equal(now[:, :, : then.shape[2]], then)
        step_alone(run)
        check_integrity(run.kv.state)


@pytest.mark.parametrize("row", CORE)
def test_slots_that_cannot_be_filled_again_now_are_before_the_next_step(row, monkeypatch):
    mode, params = ROWS[row]
    run = Run(toy(PLAIN, page=8), mode, **params)
    run.prefill(120)
    run.step(20)
    before = [(slots.table >= 0).sum() for slots in run.kv.state.slots]
    with monkeypatch.context() as patch:
        patch.setattr(TorchOps, "move_picked", out_of_memory)
        with pytest.raises(torch.OutOfMemoryError):
            fail_in_step(run)
    with decode_step(run.kv):
        held = [(slots.table >= 0).sum() for slots in run.kv.state.slots]
        with forward(run.kv):
            for i in range(2):
                run.kv.attention(i, *run.toy.qkv(i, [900], 140), run.toy.specs[i])
    check_integrity(run.kv.state)
    assert all(now >= 0.8 * then for now, then in zip(held, before, strict=True))


def test_a_prefill_that_fails_stores_nothing():
    run = Run(toy(PLAIN, page=8), "streaming", **ROWS["streaming"][1])
    run.prefill(120)
    with pytest.raises(torch.OutOfMemoryError):
        fail_in_prefill(run)
    run.kv.refill()
    run.reference.enter(120)
    run.step(20)
    run.check()


@pytest.mark.parametrize("mode", ["full", "speculative"])
def test_slots_that_cannot_grow_now_grow_later(mode, monkeypatch):
    params = ROWS[mode][1]
    run = Run(toy(PLAIN, page=8), mode, **params)
    run.prefill(100)
    while run.kv.total < run.kv.state.capacity:
        run.step()
    with monkeypatch.context() as patch:
        patch.setattr(DeviceSlots, "grown", out_of_memory)
        for _ in range(2):
            with pytest.raises(torch.OutOfMemoryError), decode_step(run.kv), forward(run.kv):
                pass
    run.step(20)
    run.check()


def test_a_host_pool_that_cannot_grow_now_grows_later(monkeypatch):
    run = Run(toy(PLAIN, page=8), "full")
    run.prefill(120)
    while run.kv.total < run.kv.state.host.capacity:
        run.step()
    with monkeypatch.context() as patch:
        patch.setattr(available, "host_free", lambda: 0)
        with (
            pytest.raises(DoesNotFitError, match=r"KiB of it are held and 0 B more are free"),
            decode_step(run.kv),
            forward(run.kv),
        ):
            pass
    run.step(20)
    run.check()


# ---- E10: turns


def test_turns_are_one_prefill_of_the_transcript():
    turns, once = (Run(toy(MIXED, page=8), "full") for _ in range(2))
    turns.prefill(50, chunk=20)
    turns.step(30)
    turns.prefill(40)
    turns.step(25)
    once.prefill(145)
    assert all(torch.equal(a, b) for a, b in zip(stored(turns.kv), stored(once.kv), strict=True))
    for a, b in zip(turns.step(), once.step(), strict=True):
        torch.testing.assert_close(a, b, atol=2e-6, rtol=0)


@pytest.mark.parametrize("row", CORE)
def test_the_next_turns_prefill_is_exact_in_every_mode(row):
    """Run checks every prefill against everything stored; here the turns alternate often."""
    mode, params = ROWS[row]
    run = Run(toy(PLAIN, page=8), mode, **params)
    for turn in range(12):
        run.prefill(1 + 7 * turn % 40, chunk=16)
        run.step(5)
    run.check()


def test_a_step_in_an_empty_store():
    run = Run(toy(PLAIN), "full")
    run.step(3)
    run.check()


def test_a_pool_that_cannot_be_pinned_any_more_is_read_by_other_ops(monkeypatch):
    run = Run(toy(PLAIN, page=8), "speculative", budget=80, sink=8, window=24)
    run.prefill(150)
    before = run.kv.state.ops
    monkeypatch.setattr(run.kv.state.host, "pageable_reason", "no more memory may be pinned")
    monkeypatch.setattr(run.kv.state.host, "reserve", lambda tokens: True)
    run.step(20)
    assert run.kv.state.ops is not before
    assert run.kv.state.transfer.ops is run.kv.state.ops
    run.check()


# ---- what a failure leaves behind


def test_a_truncation_that_fails_reads_everything_again_afterwards(monkeypatch):
    run = Run(toy(PLAIN, page=8), "streaming", **ROWS["streaming"][1])
    run.prefill(200)
    run.step(20)
    with monkeypatch.context() as patch:
        patch.setattr(Transfer, "load_table", out_of_memory)
        with pytest.raises(torch.OutOfMemoryError):
            run.kv.truncate(40)
    other = Run(toy(PLAIN, page=8), "streaming", **ROWS["streaming"][1])
    other.prefill(200)
    other.step(20)
    other.truncate(40)
    for each in (run, other):
        with decode_step(each.kv), forward(each.kv):
            for layer in range(each.toy.geometry.layers):
                each.kv.attention(layer, *each.toy.qkv(layer, [900], 40), each.toy.specs[layer])
    assert torch.equal(attended(run.kv.state, 0), attended(other.kv.state, 0))
    check_integrity(run.kv.state)


def test_a_prefill_that_is_cut_short_anywhere_costs_nothing():
    run = Run(toy(PLAIN, page=8), "full")
    run.prefill(60)
    run.kv.begin_prefill(10)  # and no more: interrupted before its forward
    run.step(5)
    run.check()
