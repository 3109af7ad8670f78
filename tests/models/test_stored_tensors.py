"""Packed weights of checkpoints that are quantized already, by the names and dtypes of their tensors."""

from __future__ import annotations

from typing import Any

import pytest

from kvchat.models import stored_tensors
from kvchat.models.stored_tensors import Packed, StoredTensor, is_unpacked, packed

Stored = list[tuple[str, str, int, int]]


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        ([("a.q.weight", "F8_E4M3", 64, 64), ("a.q.weight_scale_inv", "F32", 1, 4)], {"a.q": Packed(68, 64)}),
        ([("a.q.weight_packed", "I32", 8, 32), ("a.q.weight_scale", "BF16", 2, 4)], {"a.q": Packed(36, 64)}),
        ([("a.q.weight", "U8", 32, 32), ("a.q.weight.absmax", "F32", 1, 4)], {"a.q": Packed(36, 32)}),
        ([("a.q._weight_qdata", "I8", 64, 64), ("a.q._weight_scale", "F32", 8, 32)], {"a.q": Packed(96, 0)}),
        ([("a.q.qweight", "I32", 8, 32), ("a.q.scales", "F16", 2, 4)], {"a.q": Packed(36, 0)}),
        ([("e.up_blocks", "U8", 32, 32), ("e.up_scales", "U8", 2, 2), ("e.up_bias", "BF16", 8, 16)],
         {"e.up": Packed(34, 64)}),
        ([("a.q.weight", "BF16", 64, 128), ("norm.weight", "F32", 8, 32)], {}),
        ([("a.q.weight", "I8", 64, 64), ("a.q.bias", "BF16", 8, 16), ("top", "F32", 1, 4)], {"a.q": Packed(64, 64)}),
    ],
    ids=["fp8", "compressed-tensors", "bitsandbytes", "torchao", "gptq", "mxfp4", "plain", "a bias"],
)  # fmt: skip
def test_what_is_packed(stored: Stored, expected: dict[str, Packed]) -> None:
    assert packed([StoredTensor(*tensor) for tensor in stored], {}) == expected


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({}, ""),
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True, "bnb_4bit_quant_type": "nf4"}, "bitsandbytes"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "nf4"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}, "bitsandbytes"),
        ({"quant_method": "torchao", "quant_type": {"default": {"_type": "Int8WeightOnlyConfig"}}}, "int8"),
        ({"quant_method": "torchao", "quant_type": {"default": "int4weightonly"}}, "int4"),
        ({"quant_method": "torchao", "quant_type": {"default": {"_type": "Float8WeightOnlyConfig"}}}, "torchao"),
        ({"quant_method": "torchao", "quant_type": "int8"}, "torchao"),
    ],
)
def test_the_kind_of_a_quantized_checkpoint(config: dict[str, Any], kind: str) -> None:
    assert stored_tensors.kind_of(config) == kind


@pytest.mark.parametrize(
    ("config", "elements"),
    [
        ({"config_groups": {"a": {"weights": {"num_bits": 8}}}}, 32),
        ({"config_groups": {"a": {"weights": {"num_bits": 8}}, "b": {"weights": {"num_bits": 4}}}}, 64),
        ({"config_groups": {"a": {"weights": {"num_bits": 0}}}}, 64),
        ({"config_groups": {"a": {"weights": None}}}, 64),
        ({"config_groups": []}, 64),
    ],
)
def test_the_bits_of_packed_weights(config: dict[str, Any], elements: int) -> None:
    assert packed([StoredTensor("q.weight_packed", "I32", 8, 32)], config)["q"].elements == elements


@pytest.mark.parametrize(
    ("method", "capability", "unpacked"),
    [
        ("fp8", None, True),
        ("fp8", (8, 6), True),
        ("fp8", (8, 9), False),
        ("compressed-tensors", (9, 0), True),
        ("mxfp4", None, True),
        ("mxfp4", (9, 0), True),
        ("gptq", (9, 0), False),
    ],
)
def test_what_nothing_multiplies_as_it_is_stored(
    monkeypatch: pytest.MonkeyPatch, method: str, capability: tuple[int, int] | None, unpacked: bool
) -> None:
    monkeypatch.setattr(stored_tensors, "find_spec", lambda name: None)
    assert is_unpacked(method, capability) == unpacked
