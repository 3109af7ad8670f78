"""What packed weights lose is measured while a model is loaded, and told where it is much."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from kvchat import paths
from kvchat.engine.session import Session
from kvchat.models import load
from kvchat.models.load import LoadedModel, load_model
from kvchat.protocol.messages import Load

pytestmark = pytest.mark.usefixtures("untested")


def loaded(quantize: str) -> LoadedModel:
    return load_model(Load(quantize=quantize), lambda stage: None)


def told(model: LoadedModel) -> list[str]:
    return [note for note in model.notes if "KL " in note]


def answered(model: LoadedModel, ids: list[int]) -> Tensor:
    """Log-probabilities ``[tokens - 1, vocab]`` after each token but the first, as a conversation reads them."""
    session = Session(model)
    session.prefill(ids[:1])
    logits = [session.step(token).double() for token in ids[1:]]
    session.close()
    return torch.stack(logits).log_softmax(-1)


def test_a_loss_that_changes_answers_is_told_as_large_as_it_is() -> None:
    packed, plain = loaded("int4"), loaded("none")
    ids = plain.tokenizer(load.TEXT).input_ids[: load.TOKENS]
    expected, found = answered(plain, ids), answered(packed, ids)
    divergence = float((expected.exp() * (expected - found)).sum(-1).mean())
    same = float((expected.argmax(-1) == found.argmax(-1)).double().mean())
    (note,) = told(packed)
    figures = re.search(r"KL ([\d.]+) .* (\d+)%", note)
    assert figures
    assert float(figures[1]) == pytest.approx(divergence, rel=0.1)
    assert divergence > 0.1
    assert int(figures[2]) == pytest.approx(100 * same, abs=4)
    assert "int8 or none" in note
    assert told(plain) == []


def test_a_loss_that_nobody_notices_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert told(loaded("int8")) == []
    monkeypatch.setattr(load, "MOST", 0.0)
    paths.tested_file().unlink()  # what was found out before
    (note,) = told(loaded("int8"))
    figure = re.search(r"KL ([\d.]+) ", note)
    assert figure
    assert float(figure[1]) < 0.005


def test_a_text_that_the_tokenizer_cannot_write_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "TEXT", "")
    assert told(loaded("int4")) == []
