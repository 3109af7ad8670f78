"""Recall in any order and at any time gives the same answers (E9)."""

from __future__ import annotations

import time

import pytest
import torch
from support.kv_run import Run
from support.kv_steps import as_on_a_gpu
from support.mode_rows import MET, ROWS
from support.toy_model import toy

from kvchat.kv.ops.torch_ops import TorchOps

PLAIN = ("plain", "plain")
NEVER_RECALL = {row for row, (mode, _) in ROWS.items() if mode in ("full", "streaming")}


@pytest.mark.parametrize("row", [row for row in MET if row not in NEVER_RECALL])
def test_delays_and_the_order_of_recall_change_nothing(row, monkeypatch):
    plain, run = (Run.of_row(row, toy(PLAIN, page=8, kv_heads=4)) for _ in range(2))
    for one in (plain, run):
        as_on_a_gpu(one.kv)
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
