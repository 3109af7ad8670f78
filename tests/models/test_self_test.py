"""The self-test must refuse every way of attending wrongly, each on a model where it matters."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from support import tiny_models

from kvchat.errors import ModelError
from kvchat.models import probe
from kvchat.models.attention_hook import DenseManager
from kvchat.models.probe import logits_error, logits_tolerance, relative_error, selftest


class ChangedSpec(DenseManager):
    """Attends with parts of the spec replaced."""

    def __init__(self, **changes):
        super().__init__()
        self.changes = changes

    def attention(self, layer, query, key, value, spec):
        return super().attention(layer, query, key, value, dataclasses.replace(spec, **self.changes))


class OneTokenLate(DenseManager):
    """Forgets the first stored token of one layer once there is more than a chunk."""

    def attention(self, layer, query, key, value, spec):
        attended = super().attention(layer, query, key, value, spec)
        if layer == 2:
            keys, values = self._stored[layer]
            self._stored[layer] = keys[:, 1:], values[:, 1:]
        return attended


class NotANumber(DenseManager):
    def attention(self, layer, query, key, value, spec):
        return super().attention(layer, query, key, value, spec) * torch.nan


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("llama", lambda: ChangedSpec(scaling=0.26)),
        ("mistral", lambda: ChangedSpec(window=None)),
        ("mistral", lambda: ChangedSpec(window=9)),
        ("gemma2", lambda: ChangedSpec(softcap=None)),
        ("gpt_oss", lambda: ChangedSpec(sinks=None)),
        ("llama", OneTokenLate),
        ("llama", NotANumber),
        ("mixtral", lambda: ChangedSpec(scaling=0.26)),
        ("mixtral", OneTokenLate),
        ("mixtral", NotANumber),
    ],
)
def test_a_backend_that_attends_wrongly_is_refused(name, backend):
    with pytest.raises(ModelError, match="logits differ"):
        selftest(tiny_models.model(name), backend)


def test_the_model_attends_by_the_hook_again_afterwards():
    model = tiny_models.model("llama")
    selftest(model)
    assert model.config._attn_implementation == "kvchat"


def test_it_is_repeatable():
    assert selftest(tiny_models.model("qwen3")) == selftest(tiny_models.model("qwen3"))


def test_a_model_that_begins_to_count_positions_at_2_is_refused():
    model = tiny_models.fresh("gpt2")
    forward = model.transformer.forward

    def counting(input_ids, position_ids=None, **kwargs):
        own = torch.arange(2, 2 + input_ids.shape[1])[None]
        return forward(input_ids, position_ids=own if position_ids is None else position_ids, **kwargs)

    model.transformer.forward = counting
    with pytest.raises(ModelError, match="differ"):
        selftest(model)


# ---- The measure of the start-up checks, and which limit applies to a model


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
