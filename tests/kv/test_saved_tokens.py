"""Tokens set aside and put back: the same bytes, and a mode that goes on with them as before."""

from __future__ import annotations

import pytest
import torch
from support.kv_run import Run
from support.mode_rows import FIRST, ROWS
from support.toy_model import toy

from kvchat.kv.inspect import check_integrity
from kvchat.kv.saved_tokens import save


@pytest.mark.parametrize("row", FIRST.values())
def test_what_was_put_back_is_what_was_stored(row):
    mode, params = ROWS[row]
    run = Run(toy(page=8), mode, **params)
    run.prefill(300)
    run.step(5)
    kv, start = run.kv, 117  # inside a page
    stored = [torch.stack(kv.state.host.dense(layer, kv.total)).clone() for layer in range(kv.state.geometry.layers)]
    query, pinned = kv.state.query.clone(), kv.state.pinned.clone()
    saved = save(kv.state, start)
    kv.truncate(start)
    for layer in kv.state.host.layers:
        layer[start // kv.state.geometry.page + 1 :] = 7.0
    kv.put_back(saved)
    kv.switch(run.mode(mode, **params))
    assert kv.total == 305
    for layer, before in enumerate(stored):
        assert torch.equal(torch.stack(kv.state.host.dense(layer, kv.total)), before)
    assert torch.equal(kv.state.query, query)
    assert torch.equal(kv.state.pinned, pinned)
    check_integrity(kv.state)
