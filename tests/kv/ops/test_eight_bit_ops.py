"""Every mode over 8-bit pages is dense attention over K/V that numpy quantized."""

from __future__ import annotations

import pytest
import torch
from support.eight_bit_run import EightBitRun
from support.kv_steps import as_on_a_gpu
from support.mode_rows import CORE, MIXED, ROWS
from support.toy_model import toy

from kvchat.kv.inspect import attended
from kvchat.kv.memory.host_pool import HostPool


@pytest.mark.parametrize(("row", "unified"), [*((row, True) for row in CORE), ("full-resident", False)])
def test_every_mode_is_dense_attention_over_rounded_pages(row, unified):
    run = EightBitRun.of_row(row, toy(("plain", "plain"), kv_heads=2, group=3, d_v=24, page=8, unified=unified))
    run.prefill(90, chunk=37)
    run.step(17)
    run.check()
    run.truncate(83)
    run.check()
    run.prefill(19)
    run.step(9)
    run.check()
    assert all(run.kv.state.host.quantized[:-1])


@pytest.mark.parametrize("row", ["full", "streaming", "speculative", "sync", "freeze-budget"])
def test_pinned_messages_are_read_from_pages_of_both_kinds(row):
    mode, params = ROWS[row]
    run = EightBitRun(toy(("plain", "plain"), page=8, unified=True), mode, quantizes=False, **params)
    run.prefill(60)
    run.set(True)
    run.prefill(90)
    run.pin([*range(30, 35), *range(60, 85)])
    run.step(25)
    run.check()
    run.pin([*range(60, 64)])
    run.prefill(20)
    run.step(9)
    run.check()
    assert all(bool(attended(run.kv.state, layer)[:, 60:64].all()) for layer in range(2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("row", ["full", "full-resident", "speculative"])
def test_half_precision_windows_caps_and_learned_sinks(row, dtype):
    run = EightBitRun.of_row(row, toy(MIXED, page=8, dtype=dtype, unified=row == "full"))
    run.prefill(90, chunk=50)
    run.step(20)
    run.check()


@pytest.mark.parametrize("row", ["full", "streaming", "freeze", "sync", "speculative"])
def test_pages_of_both_kinds_are_one_conversation_through_every_switch(row):
    run = EightBitRun(toy(("plain", "plain"), page=8, unified=True), "full", quantizes=False)
    mode, params = ROWS[row]
    run.prefill(70)
    run.set(True)
    run.step(21)
    run.switch(mode, **params)
    run.prefill(20)
    run.step(5)
    run.set(False)
    run.step(20)
    run.check()
    quantized = run.kv.state.host.quantized
    assert quantized[:14] == [False] * 8 + [True] * 6
    assert quantized[-2:] == [False] * 2
    run.switch("full")
    run.step(9)
    run.check()


@pytest.mark.parametrize("row", ["full-resident", "speculative", "sync", "freeze"])
def test_steps_that_ask_nothing_read_the_same(row):
    mode, params = ROWS[row]
    made = toy(("plain", "plain"), kv_heads=2, group=2, page=8)
    runs = [EightBitRun(made, mode, **params) for _ in range(2)]
    for run, path in zip(runs, (lambda kv: None, as_on_a_gpu), strict=True):
        run.prefill(90)
        path(run.kv)
        run.step(15)
        run.check()


def test_what_is_empty_and_exact_again_is_the_plain_pool():
    run = EightBitRun(toy(("plain", "plain"), page=8, unified=True), "full")
    run.prefill(50)
    run.set(False)
    run.truncate(0)
    run.prefill(20)
    run.step(5)
    run.check()
    assert type(run.kv.state.host) is HostPool
