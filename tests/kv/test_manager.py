"""The kv in every mode: truncation, failures and growth (E8); turns (E10) are in ``modes/test_every_mode.py``."""

from contextlib import suppress
from itertools import product

import pytest
import torch
from support.eight_bit_run import EightBitRun
from support.grids import sampled
from support.integrity import check_integrity
from support.kv_run import Run
from support.kv_steps import decode_step, forward, prefill
from support.memory import stored_rows
from support.memory_faults import out_of_memory
from support.mode_rows import CORE, FIRST, ROWS
from support.toy_model import toy

from kvchat.errors import DoesNotFitError
from kvchat.kv.inspect import attended
from kvchat.kv.manager import take_checkpoint
from kvchat.kv.memory import available
from kvchat.kv.memory.device_slots import DeviceSlots
from kvchat.kv.ops.cpu_ops import CpuOps
from kvchat.kv.ops.torch_ops import TorchOps
from kvchat.kv.transfer import StepTimer, Transfer

PLAIN = ("plain", "plain")


# ---- truncation


@pytest.mark.parametrize(("row", "to"), sampled(CORE, [0, 3, 17, 100, 158, 159]))
def test_tokens_written_after_a_truncation_are_read(row, to):
    """Each mode's two core rows with one length each, all in the long form; ``test_properties`` has any."""
    run = Run.of_row(row, toy(PLAIN, page=8)).begun(135, 25)
    run.truncate(to)
    run.check()
    if to % 2 or not to:
        run.prefill(7)
    run.step(30)
    run.check()


# ---- failures


def fail_in_step(run):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run.kv, "forward_end", out_of_memory)
        with pytest.raises(torch.OutOfMemoryError):
            run.step_alone()


@pytest.mark.parametrize("row", CORE)
def test_a_failed_step_stores_nothing_and_the_next_is_correct(row):
    run = Run.of_row(row, toy(PLAIN, page=8)).begun(120, 20)
    before = stored_rows(run.kv)
    fail_in_step(run)
    assert run.kv.total == 140
    assert all(torch.equal(a, b) for a, b in zip(stored_rows(run.kv), before, strict=True))
    if run.kv.mode.name != "streaming":  # which keeps exactly what it kept before the step
        run.reference.enter(140)
    run.step(20)
    run.check()


CHANGES = {"move_shared": TorchOps, "move_pages": CpuOps, "move_tokens": TorchOps, "end_step": StepTimer}


@pytest.mark.parametrize("row", CORE)
def test_interrupted_steps_leave_no_wrong_slot(row, monkeypatch):
    """Before and after each change."""
    run = Run.of_row(row, toy(PLAIN, page=8)).begun(120, 20)

    def interrupting(genuine, is_after):
        def interrupted(*args):
            if is_after:
                genuine(*args)
            raise KeyboardInterrupt

        return interrupted

    for (name, owner), is_after in product(CHANGES.items(), (False, True)):
        before = stored_rows(run.kv)
        with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
            patch.setattr(owner, name, interrupting(getattr(owner, name), is_after))
            run.step_alone()
        assert int(run.kv.state.position) == run.kv.total
        check_integrity(run.kv.state)
        for now, then in zip(stored_rows(run.kv), before, strict=True):
            assert torch.equal(now[:, :, : then.shape[2]], then)
        run.step_alone()
        check_integrity(run.kv.state)


@pytest.mark.parametrize("row", CORE)
def test_failed_refills_are_repeated_before_the_next_step(row, monkeypatch):
    run = Run.of_row(row, toy(PLAIN, page=8)).begun(120, 20)
    before = [(slots.table >= 0).sum() for slots in run.kv.state.slots]
    with monkeypatch.context() as patch:
        patch.setattr(TorchOps, "move_picked", out_of_memory)
        fail_in_step(run)
    with decode_step(run.kv):
        held = [(slots.table >= 0).sum() for slots in run.kv.state.slots]
        with forward(run.kv):
            for i in range(2):
                run.kv.attention(i, *run.toy.qkv(i, [900], 140), run.toy.specs[i])
    check_integrity(run.kv.state)
    assert all(now >= 0.8 * then for now, then in zip(held, before, strict=True))


def test_a_failed_prefill_stores_nothing():
    run = Run.of_row("streaming", toy(PLAIN, page=8)).begun(120)
    with suppress(torch.OutOfMemoryError), prefill(run.kv, 2):
        run.kv.attention(0, *run.toy.qkv(0, [900, 901], 120), run.toy.specs[0])
        out_of_memory()
    run.kv.refill()
    run.reference.enter(120)
    run.step(20)
    run.check()


@pytest.mark.parametrize("mode", ["full", "speculative"])
def test_slots_that_fail_to_grow_grow_later(mode, monkeypatch):
    run = Run.of_row(mode, toy(PLAIN, page=8)).begun(100)
    while run.kv.total < run.kv.state.capacity:
        run.step()
    with monkeypatch.context() as patch:
        patch.setattr(DeviceSlots, "grown", out_of_memory)
        for _ in range(2):
            with pytest.raises(torch.OutOfMemoryError), decode_step(run.kv), forward(run.kv):
                pass
    run.step(20)
    run.check()


def test_a_host_pool_that_fails_to_grow_grows_later(monkeypatch):
    run = Run(toy(PLAIN, page=8), "full").begun(120)
    while run.kv.total < run.kv.state.host.capacity:
        run.step()
    with monkeypatch.context() as patch:
        patch.setattr(available, "host_free", lambda: 0)
        with pytest.raises(DoesNotFitError, match=r"KiB.* 0 B more"), decode_step(run.kv), forward(run.kv):
            pass
    run.step(20)
    run.check()


def test_ops_change_when_the_pool_is_no_longer_pinned(monkeypatch):
    run = Run(toy(PLAIN, page=8), "speculative", budget=80, sink=8, window=24).begun(150)
    before, host = run.kv.state.ops, run.kv.state.host

    def reserve(tokens):
        monkeypatch.setattr(type(host), "pinned", False)
        return True

    monkeypatch.setattr(type(host), "pinned", True)
    monkeypatch.setattr(host, "reserve", reserve)
    run.step(20)
    assert run.kv.state.ops is not before
    assert run.kv.state.transfer.ops is run.kv.state.ops
    run.check()


# ---- what a failure leaves behind


def test_a_failed_truncation_is_completed_by_the_next_step(monkeypatch):
    run = Run.of_row("streaming", toy(PLAIN, page=8)).begun(200, 20)
    with monkeypatch.context() as patch:
        patch.setattr(Transfer, "load_table", out_of_memory)
        with pytest.raises(torch.OutOfMemoryError):
            run.kv.truncate(40)
    other = Run.of_row("streaming", toy(PLAIN, page=8)).begun(200, 20)
    other.truncate(40)
    for each in (run, other):
        each.step_alone()
    assert torch.equal(attended(run.kv.state, 0), attended(other.kv.state, 0))
    check_integrity(run.kv.state)


def test_an_interrupted_prefill_changes_nothing():
    run = Run(toy(PLAIN, page=8), "full").begun(60)
    run.kv.begin_prefill(10)  # interrupted before its forward
    run.step(5)
    run.check()


# ---- Checkpoint and restore: the same bytes, and a mode that continues from them


@pytest.mark.parametrize("row", FIRST.values())
def test_restored_tokens_equal_the_stored_ones(row):
    mode, params = ROWS[row]
    run = Run(toy(page=8), mode, **params).begun(300, 5)
    kv, start = run.kv, 117  # inside a page
    stored = stored_rows(kv)
    query, control = kv.state.query.clone(), kv.state.control.clone()
    checkpoint = take_checkpoint(kv.state, start)
    kv.truncate(start)
    for layer in kv.state.host.layers:
        layer[start // kv.state.geometry.page + 1 :] = 7.0
    kv.restore(checkpoint)
    kv.switch(run.mode(mode, **params))
    assert kv.total == 305
    assert all(map(torch.equal, stored_rows(kv), stored))
    assert torch.equal(kv.state.query, query)
    assert torch.equal(kv.state.control, control)
    check_integrity(kv.state)


def test_full_precision_and_8_bit_pages_are_restored():
    run = EightBitRun(toy(page=8, unified=True), "full", quantizes=False).begun(60)
    run.set(True)
    run.step(50)
    kv, start = run.kv, 77  # inside an 8-bit page
    stored, quantized = [kv.state.host.dense(layer, kv.total) for layer in range(3)], kv.state.host.quantized
    checkpoint = take_checkpoint(kv.state, start)
    kv.truncate(start)
    run.set(False)
    with prefill(kv, 30):
        for layer in range(3):
            kv.attention(layer, *run.toy.qkv(layer, list(range(30)), start), run.toy.specs[layer])
    kv.truncate(0)  # the pool is full-precision again
    kv.truncate(0)
    with prefill(kv, start):
        for layer in range(3):
            kv.attention(layer, *run.toy.qkv(layer, run.ids[:start], 0), run.toy.specs[layer])
    kv.restore(checkpoint)
    kv.refill()
    assert kv.state.host.quantized[start // 8 :] == quantized[start // 8 :]
    for layer, parts in enumerate(stored):
        for found, before in zip(kv.state.host.dense(layer, kv.total), parts, strict=True):
            assert torch.equal(found[:, start // 8 * 8 :], before[:, start // 8 * 8 :])
    check_integrity(kv.state)
