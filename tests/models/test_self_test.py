"""The self-test must refuse every kind of wrong attention, each on a model where it matters."""

import copy
import dataclasses
import json
import math

import pytest
import torch
from support import tiny_models
from support.byte_tokenizer import byte_level
from support.tiny_runner import EmptyTokenizer
from tokenizers import normalizers
from torch import nn

from kvchat.errors import ModelError
from kvchat.models import load, probe
from kvchat.models.attention_hook import DenseManager
from kvchat.models.load import wrap
from kvchat.models.probe import logits_error, logits_tolerance, relative_error, selftest
from kvchat.models.quantize import int4_rows, int8_rows


class ChangedSpec(DenseManager):
    """Attends with parts of the spec replaced."""

    def __init__(self, **changes):
        super().__init__()
        self.changes = changes

    def attention(self, layer, query, key, value, spec):
        return super().attention(layer, query, key, value, dataclasses.replace(spec, **self.changes))


class OneTokenLate(DenseManager):
    """Drops the first stored token of one layer after the first chunk."""

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
def test_wrong_attention_is_refused(name, backend):
    with pytest.raises(ModelError, match="logits differ"):
        selftest(tiny_models.model(name), backend)


def test_the_self_test_restores_the_attention_hook():
    model = tiny_models.model("llama")
    selftest(model)
    assert model.config._attn_implementation == "kvchat"


def test_the_self_test_is_repeatable():
    assert selftest(tiny_models.model("qwen3")) == selftest(tiny_models.model("qwen3"))


def test_a_model_that_counts_positions_from_2_is_refused():
    model = tiny_models.fresh("gpt2")
    forward = model.transformer.forward

    def counting(input_ids, position_ids=None, **kwargs):
        own = torch.arange(2, 2 + input_ids.shape[1])[None]
        return forward(input_ids, position_ids=own if position_ids is None else position_ids, **kwargs)

    model.transformer.forward = counting
    with pytest.raises(ModelError, match="differ"):
        selftest(model)


# ---- The error measure of the start-up checks, and the limit for a model


def test_relative_error_matches_known_values():
    assert relative_error(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0])) == pytest.approx(0.1)
    assert math.isnan(relative_error(torch.tensor([torch.nan, 1.0]), torch.ones(2)))


def test_the_error_of_a_mixture_ignores_a_share_of_tokens():
    reference = torch.ones(4, 3)
    measured = reference * torch.tensor([1.1, 3.0, 1.2, 1.3])[:, None]
    for name, errors in (("mixtral", (0.1, 0.25)), ("llama", (1.02, 1.02))):
        found = [logits_error(tiny_models.model(name), measured, reference, share) for share in (0.0, 0.5)]
        assert found == pytest.approx(errors, abs=0.01)
        measured[0] = torch.nan
        assert math.isnan(logits_error(tiny_models.model(name), measured, reference, 0.0))
        measured[0] = 1.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_tolerance_depends_on_the_dtype(dtype):
    assert logits_tolerance(tiny_models.model("llama", dtype)) == probe.LOGITS[dtype]


def test_packed_weights_have_the_tolerance_of_half_precision(monkeypatch):
    monkeypatch.setattr(probe, "is_packed", lambda model: True)
    assert logits_tolerance(tiny_models.model("llama")) == probe.LOGITS[torch.bfloat16]


# ---- Digests of weights and tokenizers differ exactly if these do


@pytest.fixture
def model():
    return tiny_models.fresh("llama")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_bit_of_any_weight_changes_the_digest(model, dtype):
    model.to(dtype)
    before = load.digest_of_weights(model)
    for weight in model.parameters():
        stored = weight.data.view(-1).view(torch.uint8)
        for at in (0, stored.numel() // 2, stored.numel() - 1):
            stored[at] ^= 1
            assert load.digest_of_weights(model) != before
            stored[at] ^= 1
    assert load.digest_of_weights(model) == before


def test_swapping_weights_of_two_layers_changes_the_digest(model):
    before = load.digest_of_weights(model)
    first, second = (layer.mlp.up_proj.weight.data for layer in model.model.layers[:2])
    first.copy_(torch.stack([second.clone(), second.copy_(first)])[0])
    assert load.digest_of_weights(model) != before


def test_the_digest_covers_odd_sizes_to_the_end():
    linear = nn.Linear(3, 1, bias=False, dtype=torch.bfloat16)
    before = load.digest_of_weights(linear)
    linear.weight.data[0, 2] += 1
    assert load.digest_of_weights(linear) != before


def test_scales_of_torchao_weights_change_the_digest():
    torchao = pytest.importorskip("torchao.quantization")
    linear = nn.Linear(64, 64)
    torchao.quantize_(linear, torchao.Int8WeightOnlyConfig())
    before = load.digest_of_weights(linear)
    linear.weight.scale.data[0] *= 2
    assert load.digest_of_weights(linear) != before


@pytest.mark.parametrize("pack", [int8_rows.pack, int4_rows.pack])
def test_scales_of_packed_rows_change_the_digest(pack):
    linear = nn.Linear(64, 64)
    pack(linear)
    before = load.digest_of_weights(linear)
    linear.packed_rows.scales[0] *= 2
    assert load.digest_of_weights(linear) != before


def test_fusing_does_not_change_the_fingerprint(model):
    tokenizer = byte_level()
    plain = wrap(copy.deepcopy(model), tokenizer, "m", fuse=False)
    fused = wrap(model, tokenizer, "m")
    assert fused.fused
    assert plain.fingerprint == fused.fingerprint


def test_tokenizer_digests_cover_all_that_affects_ids():
    plain = load.digest_of_tokenizer(byte_level())
    assert plain == load.digest_of_tokenizer(byte_level())
    assert plain != load.digest_of_tokenizer(byte_level(normalizers.Lowercase()))
    fewer = byte_level()
    backend = json.loads(fewer.backend_tokenizer.to_str())
    backend["added_tokens"].pop()
    assert plain != load.digest_of_tokenizer(
        type(fewer)(tokenizer_object=type(fewer.backend_tokenizer).from_str(json.dumps(backend)))
    )


def test_the_digest_of_a_tokenizer_without_backend_is_its_vocabulary():
    one, other = (EmptyTokenizer(vocabulary={"a": index}) for index in (1, 2))
    assert load.digest_of_tokenizer(one) == load.digest_of_tokenizer(EmptyTokenizer(vocabulary={"a": 1}))
    assert load.digest_of_tokenizer(one) != load.digest_of_tokenizer(other)
