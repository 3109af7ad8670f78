"""Loops that are compiled while a conversation goes on take over from torch between two tokens."""

from __future__ import annotations

import threading

import pytest
import torch
from support.kv_run import Run
from support.toy_model import toy

from kvchat.kv.ops import cpu_ops

# Every policy that loops choose or attend by, with pages of 32 tokens, as the loops take them.
MODES = {
    "full": ("full", {}),
    "full-resident": ("full", {"resident": 64}),
    "streaming": ("streaming", {"budget": 64}),
    "freeze": ("freeze", {"K": 12, "tau": 0.9, "k": 1.0}),
    "sync": ("sync", {"budget": 80, "m": 3}),
    "speculative": ("speculative", {"budget": 96, "window": 32}),
    "four-bits": ("speculative", {"budget": 96, "window": 32, "index": "bits4"}),
    "freekv": ("speculative", {"budget": 160, "sink": 8, "window": 32, "tau": 0.7}),
    "freekv-bits": ("speculative", {"budget": 160, "window": 32, "unit": "page", "query": "own"}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_what_is_read_and_computed_stays_the_references(mode, dtype, monkeypatch):
    monkeypatch.setattr(cpu_ops, "MANY", 1)
    monkeypatch.setattr(cpu_ops, "awaited", {})
    named = [name for name in vars(cpu_ops).values() if isinstance(name, str) and name.startswith(f"{cpu_ops.LOOPS}.")]
    cpu_ops.awaited.update({name: threading.Event() for name in named})
    name, params = MODES[mode]
    run = Run(toy(("plain", "plain"), dtype=dtype, unified=True), name, **params)
    run.prefill(230)
    run.step(3)
    while cpu_ops.awaited:
        cpu_ops.awaited.popitem()
        run.step(2)
    run.check()
