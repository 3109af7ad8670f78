"""Warnings of the engine: memory that stops being pinned in the middle of a conversation, steps without a graph."""

from __future__ import annotations

from functools import partial

import torch
from support.loads import entering
from support.memory import Pins
from support.message import lacks

from kvchat.engine.session import Session
from kvchat.kv import state as state_module
from kvchat.kv.memory.host_pool import HostPool
from kvchat.kv.ops.choose import triton_refusal
from kvchat.kv.ops.torch_ops import TorchOps


def test_a_conversation_goes_on_when_memory_can_no_longer_be_pinned(model, monkeypatch):
    calm, pins = Session(model), Pins()
    monkeypatch.setattr(state_module, "HostPool", partial(HostPool, registrar=pins))
    session = Session(model)
    assert session.snapshot().badges == ()
    pins.fails_at = pins.calls + 3  # in the third layer, when the pool grows
    ids = [(7 * i) % 4000 + 10 for i in range(700)]
    for each in (calm, session):
        each.prefill(ids[:600])
        each.switch("speculative", budget=192, sink=32, window=64)
    assert not pins.held
    assert session.snapshot().badges == ("pageable host memory: no more memory may be pinned",)
    for token in ids[600:]:
        assert torch.equal(session.step(token), calm.step(token))
    assert calm.snapshot().badges == ()


def test_a_step_that_cannot_be_captured_has_a_badge(model):
    session = Session(model)
    session._runner.graphs.refusal = "RuntimeError: not permitted"
    assert session.snapshot().badges == ("no CUDA graph: RuntimeError: not permitted",)


def test_a_gpu_without_kernels_has_a_badge(model):
    session = Session(model)
    assert session.snapshot().badges == ()
    state = session._kv.state
    refusal = triton_refusal(state.geometry, torch.device("cuda"))
    state.ops = TorchOps(state.geometry, state.host, state.device, refusal)
    assert session.snapshot().badges == ("no Triton kernels: the kernels are for bfloat16 and float16, not float32",)


def test_a_mode_that_saves_no_memory_has_a_badge_until_it_is_changed(model):
    session = Session(model, entering("sync", {"offload": False}))
    session.prefill([(7 * i) % 4000 + 10 for i in range(600)])
    (badge,) = session.snapshot().badges
    assert not lacks(badge, "sync", "100%", "full")
    session.switch("sync", offload=True)
    assert session.snapshot().badges == ()
