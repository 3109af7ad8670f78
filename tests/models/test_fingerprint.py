"""Digests tell trainings and tokenizers apart, and say the same of what is the same."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from support import tiny_models
from support.byte_tokenizer import byte_level
from support.tiny_runner import Wordless
from tokenizers import normalizers
from torch import nn

from kvchat.models import load
from kvchat.models.load import wrap
from kvchat.models.quantize import int4_rows, int8_rows


@pytest.fixture
def model():
    return tiny_models.fresh("llama")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_bit_of_any_weight_makes_another_training(model, dtype):
    model.to(dtype)
    before = load.digest_of_weights(model)
    for weight in model.parameters():
        stored = weight.data.view(-1).view(torch.uint8)
        for at in (0, stored.numel() // 2, stored.numel() - 1):
            stored[at] ^= 1
            assert load.digest_of_weights(model) != before
            stored[at] ^= 1
    assert load.digest_of_weights(model) == before


def test_weights_of_two_layers_exchanged_are_another_training(model):
    before = load.digest_of_weights(model)
    first, second = (layer.mlp.up_proj.weight.data for layer in model.model.layers[:2])
    first.copy_(torch.stack([second.clone(), second.copy_(first)])[0])
    assert load.digest_of_weights(model) != before


def test_a_size_that_is_no_multiple_of_a_word_counts_to_its_end():
    linear = nn.Linear(3, 1, bias=False, dtype=torch.bfloat16)
    before = load.digest_of_weights(linear)
    linear.weight.data[0, 2] += 1
    assert load.digest_of_weights(linear) != before


def test_a_packed_weight_counts_with_its_scales():
    torchao = pytest.importorskip("torchao.quantization")
    linear = nn.Linear(64, 64)
    torchao.quantize_(linear, torchao.Int8WeightOnlyConfig())
    before = load.digest_of_weights(linear)
    linear.weight.scale.data[0] *= 2
    assert load.digest_of_weights(linear) != before


@pytest.mark.parametrize(("pack", "constant"), [(int8_rows.pack, "scale"), (int4_rows.pack, "scales")])
def test_rows_packed_here_count_with_their_scales(pack, constant):
    linear = nn.Linear(64, 64)
    pack(linear)
    before = load.digest_of_weights(linear)
    getattr(linear.packed_rows, constant)[0] *= 2
    assert load.digest_of_weights(linear) != before


def test_fused_or_not_it_is_the_same_training(model):
    tokenizer = byte_level()
    plain = wrap(copy.deepcopy(model), tokenizer, "m", fuse=False)
    fused = wrap(model, tokenizer, "m")
    assert fused.fused
    assert plain.fingerprint == fused.fingerprint


def test_tokenizers_are_told_apart_by_all_that_makes_ids():
    plain = load.digest_of_tokenizer(byte_level())
    assert plain == load.digest_of_tokenizer(byte_level())
    assert plain != load.digest_of_tokenizer(byte_level(normalizers.Lowercase()))
    fewer = byte_level()
    backend = json.loads(fewer.backend_tokenizer.to_str())
    backend["added_tokens"].pop()
    assert plain != load.digest_of_tokenizer(
        type(fewer)(tokenizer_object=type(fewer.backend_tokenizer).from_str(json.dumps(backend)))
    )


def test_a_tokenizer_without_a_backend_is_told_by_its_vocabulary():
    one, other = (Wordless(vocabulary={"a": index}) for index in (1, 2))
    assert load.digest_of_tokenizer(one) == load.digest_of_tokenizer(Wordless(vocabulary={"a": 1}))
    assert load.digest_of_tokenizer(one) != load.digest_of_tokenizer(other)
