"""Tokens checkpointed and restored: the same bytes, and a mode that goes on with them as before."""

from __future__ import annotations

import pytest
import torch
from support.eight_bit_run import EightBitRun
from support.kv_run import Run
from support.kv_steps import prefill
from support.mode_rows import FIRST, ROWS
from support.toy_model import toy

from kvchat.kv.inspect import check_integrity
from kvchat.kv.manager import take_checkpoint


@pytest.mark.parametrize("row", FIRST.values())
def test_what_was_put_back_is_what_was_stored(row):
    mode, params = ROWS[row]
    run = Run(toy(page=8), mode, **params)
    run.prefill(300)
    run.step(5)
    kv, start = run.kv, 117  # inside a page
    stored = [torch.stack(kv.state.host.dense(layer, kv.total)).clone() for layer in range(kv.state.geometry.layers)]
    query, pinned = kv.state.query.clone(), kv.state.control.clone()
    checkpoint = take_checkpoint(kv.state, start)
    kv.truncate(start)
    for layer in kv.state.host.layers:
        layer[start // kv.state.geometry.page + 1 :] = 7.0
    kv.restore(checkpoint)
    kv.switch(run.mode(mode, **params))
    assert kv.total == 305
    for layer, before in enumerate(stored):
        assert torch.equal(torch.stack(kv.state.host.dense(layer, kv.total)), before)
    assert torch.equal(kv.state.query, query)
    assert torch.equal(kv.state.control, pinned)
    check_integrity(kv.state)


def test_pages_of_both_kinds_are_put_back_where_they_were_cut_off():
    run = EightBitRun(toy(page=8, unified=True), "full", quantizes=False)
    run.prefill(60)
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
    kv.truncate(0)  # the pool is a plain one again
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
