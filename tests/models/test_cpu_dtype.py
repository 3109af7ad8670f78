"""The dtype of "auto" on a CPU: measured for large models, told, and float32 for small ones."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from support.message import lacks

from kvchat.models import description
from kvchat.models.description import resolve_dtype

CPU = torch.device("cpu")


def config(rows: int, columns: int, own: torch.dtype | None = torch.bfloat16) -> SimpleNamespace:
    made = SimpleNamespace(dtype=own, intermediate_size=rows, hidden_size=columns)
    made.get_text_config = lambda decoder: made
    return made


@pytest.mark.parametrize(
    ("exact", "half", "chosen"),
    [(20.0, 10.0, torch.bfloat16), (20.0, 19.0, torch.float32), (10.0, 20.0, torch.float32)],
)
def test_what_is_clearly_faster_is_taken_and_told(monkeypatch, exact, half, chosen):
    monkeypatch.setattr(description, "milliseconds", lambda rows, columns: (exact, half))
    large = config(14336, 4096)
    assert resolve_dtype("auto", large, CPU) == chosen
    told = description.note("auto", chosen, large)
    assert bool(told) == (chosen == torch.bfloat16)
    assert not told or not lacks(told, "10.0 ms", "20.0 ms", "model.dtype = float32")
    assert resolve_dtype("bfloat16", large, CPU) == torch.bfloat16
    assert description.note("bfloat16", torch.bfloat16, large) == ""


@pytest.mark.parametrize(
    "small",
    [config(1024, 384), config(0, 4096), config(14336, 4096, torch.float32), config(14336, 4096, None)],
)
def test_small_models_and_others_are_not_measured(monkeypatch, small):
    monkeypatch.setattr(description, "milliseconds", None)
    assert resolve_dtype("auto", small, CPU) == torch.float32


def test_both_are_measured_once(monkeypatch):
    description.milliseconds.cache_clear()
    called, linear = [], description.one_product
    monkeypatch.setattr(description, "one_product", lambda *args: called.append(args) or linear(*args))
    first = description.milliseconds(64, 32)
    assert description.milliseconds(64, 32) == first
    assert len(called) == description.ROUNDS
    assert all(0 < time < float("inf") for time in first)
