"""One token's layer of packed weights is two loops, and computes what its modules compute."""

from __future__ import annotations

import pytest
import torch

from kvchat.models.fuse import modules, one_token
from kvchat.models.load import load_model
from kvchat.protocol.messages import Load


def bundled(**how):
    return load_model(Load("bundled", "cpu", **how), lambda stage: None).model


@pytest.mark.parametrize("quantize", ["int4", "int8"])
def test_it_computes_what_the_modules_compute(quantize, monkeypatch):
    called, own = [], one_token.OneTokenLayer.__call__
    monkeypatch.setattr(one_token.OneTokenLayer, "__call__", lambda *given: called.append(1) or own(*given))
    model = bundled(quantize=quantize, dtype="float32")
    called.clear()
    logits = modules.sample_logits(model)
    assert len(called) == modules.CHECKED_STEPS * model.config.num_hidden_layers
    plain = modules.sample_logits(bundled(quantize=quantize, dtype="float32", fast=False))
    torch.testing.assert_close(logits[modules.CHECKED_PROMPT :], plain[modules.CHECKED_PROMPT :], rtol=0, atol=0.02)


@pytest.mark.parametrize("how", [{"quantize": "none"}, {"quantize": "int4", "dtype": "bfloat16"}])
def test_other_weights_and_numbers_go_through_the_modules(how, monkeypatch):
    monkeypatch.setattr(one_token.OneTokenLayer, "__call__", lambda *_: pytest.fail("asked"))
    modules.sample_logits(bundled(**how))
