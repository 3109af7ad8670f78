"""How a configuration says that a checkpoint is quantized, and which formats loading unpacks."""

import pytest
from support import stored_weights, tiny_models, tiny_multimodal
from support.progress import silent
from support.stored_weights import FP8

from kvchat.models import stored_tensors
from kvchat.models.fuse.modules import sample_logits
from kvchat.models.load import load_model
from kvchat.models.probe import relative_error
from kvchat.models.stored_tensors import is_unpacked
from kvchat.protocol.messages import Load


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
def test_the_kind_of_a_quantized_checkpoint_follows_its_config(config, kind):
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
def test_formats_without_a_kernel_are_unpacked(monkeypatch, method, capability, unpacked):
    monkeypatch.setattr(stored_tensors, "find_spec", lambda name: None)
    assert is_unpacked(method, capability) == unpacked


# ---- fp8 weights whose rows or columns are not a multiple of the block size


@pytest.mark.parametrize(("name", "rows"), [("llama", 192), ("llama", 257), ("qwen3_moe", 160)])
@pytest.mark.parametrize("quantize", ["none", "int8"])
def test_partial_fp8_blocks_keep_their_values(tmp_path, name, rows, quantize):
    """Of 192 rows in blocks of 128, the last 64 are the second block."""
    folders = [tmp_path / kind for kind in ("stored", "plain")]
    sizes = {"intermediate_size": rows, "moe_intermediate_size": rows}
    rounded = tiny_models.fresh(name, vocab_size=tiny_multimodal.VOCAB, **sizes)
    tiny_multimodal.save(rounded, folders[0])
    section = FP8 | {"weight_block_size": [128, 128]}
    stored_weights.write(folders[0], stored_weights.fp8(rounded, 128), section)
    tiny_multimodal.save(rounded, folders[1])
    stored, plain = (load_model(Load(str(each), "cpu", "float32", quantize=quantize), silent).model for each in folders)
    assert relative_error(sample_logits(stored), sample_logits(plain)) < 1e-4
