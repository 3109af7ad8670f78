"""fp8 weights whose blocks do not divide their rows or columns are unpacked as they were packed."""

from __future__ import annotations

import pytest
from support import stored_weights, tiny_models, tiny_multimodal
from support.progress import silent
from support.stored_weights import FP8

from kvchat.models.fuse.modules import sample_logits
from kvchat.models.load import load_model
from kvchat.models.probe import relative_error
from kvchat.protocol.messages import Load


@pytest.mark.parametrize(("name", "rows"), [("llama", 192), ("llama", 257), ("qwen3_moe", 160)])
@pytest.mark.parametrize("quantize", ["none", "int8"])
def test_blocks_that_are_cut_off_have_the_size_that_is_named(tmp_path, name, rows, quantize):
    """Of 192 rows in blocks of 128 the last 64 are the second block."""
    folders = [tmp_path / kind for kind in ("stored", "plain")]
    sizes = {"intermediate_size": rows, "moe_intermediate_size": rows}
    rounded = tiny_models.fresh(name, vocab_size=tiny_multimodal.VOCAB, **sizes)
    tiny_multimodal.save(rounded, folders[0])
    section = FP8 | {"weight_block_size": [128, 128]}
    stored_weights.write(folders[0], stored_weights.fp8(rounded, 128), section)
    tiny_multimodal.save(rounded, folders[1])
    stored, plain = (load_model(Load(str(each), "cpu", "float32", quantize=quantize), silent).model for each in folders)
    assert relative_error(sample_logits(stored), sample_logits(plain)) < 1e-4
