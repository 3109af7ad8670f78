"""The measure of the start-up checks, and which limit applies to a model."""

from __future__ import annotations

import math

import pytest
import torch
from support import tiny_models

from kvchat.engine.model import tolerances
from kvchat.engine.model.tolerances import logits_tolerance, relative_error


def test_relative_error():
    assert relative_error(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0])) == pytest.approx(0.1)
    assert math.isnan(relative_error(torch.tensor([torch.nan, 1.0]), torch.ones(2)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_dtype_decides(dtype):
    assert logits_tolerance(tiny_models.model("llama", dtype)) == tolerances.LOGITS[dtype]


def test_packed_weights_are_allowed_the_error_of_half_precision(monkeypatch):
    monkeypatch.setattr(tolerances, "is_packed", lambda model: True)
    assert logits_tolerance(tiny_models.model("llama")) == tolerances.LOGITS[torch.bfloat16]
