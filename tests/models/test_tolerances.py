"""The measure of the start-up checks, and which limit applies to a model."""

from __future__ import annotations

import math

import pytest
import torch
from support import tiny_models

from kvchat.models import probe
from kvchat.models.probe import logits_error, logits_tolerance, relative_error


def test_relative_error():
    assert relative_error(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0])) == pytest.approx(0.1)
    assert math.isnan(relative_error(torch.tensor([torch.nan, 1.0]), torch.ones(2)))


def test_of_a_mixture_a_share_of_the_tokens_counts():
    reference = torch.ones(4, 3)
    measured = reference * torch.tensor([1.1, 3.0, 1.2, 1.3])[:, None]
    for name, errors in (("mixtral", (0.1, 0.25)), ("llama", (1.02, 1.02))):
        found = [logits_error(tiny_models.model(name), measured, reference, share) for share in (0.0, 0.5)]
        assert found == pytest.approx(errors, abs=0.01)
        measured[0] = torch.nan
        assert math.isnan(logits_error(tiny_models.model(name), measured, reference, 0.0))
        measured[0] = 1.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_dtype_decides(dtype):
    assert logits_tolerance(tiny_models.model("llama", dtype)) == probe.LOGITS[dtype]


def test_packed_weights_are_allowed_the_error_of_half_precision(monkeypatch):
    monkeypatch.setattr(probe, "is_packed", lambda model: True)
    assert logits_tolerance(tiny_models.model("llama")) == probe.LOGITS[torch.bfloat16]
