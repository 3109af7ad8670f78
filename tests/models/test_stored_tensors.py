"""How a configuration says that a checkpoint is quantized, and what of that loading unpacks."""

from __future__ import annotations

from typing import Any

import pytest

from kvchat.models import stored_tensors
from kvchat.models.stored_tensors import is_unpacked


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
