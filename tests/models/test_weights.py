"""Bytes of loaded weights, computed from the names, shapes and dtypes in the headers of their files."""

import os
import struct
from typing import Any

import pytest
import torch
from support import tiny_models, tiny_multimodal
from support.gguf_files import gguf_header

from kvchat.errors import ModelError
from kvchat.models import catalog, gguf_file, stored_tensors, weights
from kvchat.models.description import without_memory
from kvchat.models.stored_tensors import StoredTensor, read_headers
from kvchat.models.support import find
from kvchat.models.weights import EMBEDDING, EXPERT, HEAD, LINEAR, REST, UNPACKABLE, Part, Place, Weights, is_loaded
from kvchat.paths import bundled_model_dir

CPU, GPU = Place("cpu"), Place("cuda", (8, 6))
ROWS, COLUMNS = 2048, 4096
SIZE = ROWS * COLUMNS
LAYERS = [(f"model.layers.{n}.mlp.up_proj.weight", "BF16", (ROWS, COLUMNS)) for n in range(5)]
TABLE = ("model.embed_tokens.weight", "BF16", (2 * ROWS, COLUMNS))
OWN_HEAD = ("lm_head.weight", "BF16", (ROWS, COLUMNS))


def weights_of(*tensors: tuple[Any, ...], **config: Any) -> Weights:
    """The weights of tensors with these names, dtypes, shapes and bytes (by default two per element)."""
    stored = [StoredTensor(*one, *(() if len(one) > 3 else (0,))) for one in tensors]
    return weights.of_checkpoint(config, stored)


@pytest.mark.parametrize(
    ("name", "of_text", "of_multimodal"),
    [
        ("model.language_model.layers.0.mlp.up_proj.weight", True, True),
        ("language_model.lm_head.weight", True, True),
        ("model.visual.blocks.0.attn.qkv.weight", True, False),
        ("vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight", True, False),
        ("model.multi_modal_projector.linear_1.weight", True, False),
        ("model.embed_vision.embedding_projection.weight", True, False),
        ("model.audio_tower.layers.0.ffn.weight", True, False),
        ("h.0.attn.bias", False, False),
        ("transformer.h.0.attn.masked_bias", False, False),
        ("gpt_neox.layers.0.attention.bias", False, False),
        ("h.0.attn.c_attn.bias", True, True),
        ("mtp.layers.0.mlp.up_proj.weight", False, False),
    ],
)
def test_unused_tensors_are_not_loaded(name, of_text, of_multimodal):
    assert (is_loaded(name, False), is_loaded(name, True)) == (of_text, of_multimodal)


@pytest.mark.parametrize(
    ("name", "shape", "kind"),
    [
        ("model.layers.0.mlp.up_proj.weight", (8, 4), LINEAR),
        ("model.layers.0.mlp.shared_experts.up_proj.weight", (8, 4), LINEAR),
        ("model.layers.0.mlp.up_proj.bias", (8,), REST),
        ("model.layers.0.conv.weight", (8, 1, 4), UNPACKABLE),
        ("model.layers.0.mlp.experts.3.up_proj.weight", (8, 4), EXPERT),
        ("model.layers.0.mlp.experts.gate_up_proj", (2, 8, 4), EXPERT),
        ("model.layers.0.mlp.experts.gate_up_proj_bias", (2, 8), REST),
        ("model.layers.0.block_sparse_moe.input_linear.weight", (2, 8, 4), EXPERT),
        ("blk.0.ffn_up_exps.weight", (2, 8, 4), EXPERT),
        ("blk.0.ffn_up.weight", (8, 4), LINEAR),
        ("model.language_model.embed_tokens.weight", (8, 4), EMBEDDING),
        ("token_embd.weight", (8, 4), EMBEDDING),
        ("model.embed_tokens_per_layer.weight", (8, 4), REST),
        ("model.altup_unembed_projections.0.weight", (8, 4), LINEAR),
        ("transformer.wpe.weight", (8, 4), REST),
        ("language_model.lm_head.weight", (8, 4), HEAD),
        ("output.weight", (8, 4), HEAD),
    ],
)
def test_the_kind_of_a_tensor_follows_its_name_and_shape(name, shape, kind):
    assert {part.kind for part in weights_of((name, "BF16", shape)).parts} == {kind}


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        ([("a.q.weight", "F8_E4M3", (8, 8), 64), ("a.q.weight_scale_inv", "F32", (1,), 4)], (8, 8, 68)),
        ([("a.q.weight_packed", "I32", (8, 1), 32), ("a.q.weight_scale", "BF16", (2,), 4)], (8, 8, 36)),
        ([("a.q._weight_qdata", "I8", (8, 8), 64), ("a.q._weight_scale", "F32", (8,), 32)], (0, 0, 96)),
        ([("a.q.qweight", "I32", (1, 8), 32), ("a.q.scales", "F16", (2,), 4)], (0, 0, 36)),
        ([("a.q.weight", "I8", (8, 8), 64), ("a.q.bias", "BF16", (8,), 16)], (8, 8, 64)),
    ],
    ids=["fp8", "compressed-tensors", "torchao", "gptq", "a bias"],
)
def test_packed_tensors_are_recognized(stored, expected):
    parts = weights_of(*stored, quantization_config={"quant_method": "x"}).parts
    assert [part for part in parts if part.packed] == [Part(LINEAR, *expected)]


def test_a_packed_stack_of_experts_counts_as_several_matrices():
    stack = ("a.experts.up_blocks", "U8", (2, 32, 2, 16), 2048), ("a.experts.up_scales", "U8", (2, 32, 2), 128)
    assert weights_of(*stack, quantization_config={"quant_method": "mxfp4"}).parts == {Part(EXPERT, 32, 64, 1088): 2}


@pytest.mark.parametrize(
    ("groups", "columns"),
    [
        ({"a": {"weights": {"num_bits": 8}}}, 4),
        ({"a": {"weights": {"num_bits": 8}}, "b": {"weights": {"num_bits": 4}}}, 8),
        ({"a": {"weights": None}}, 8),
        ([], 8),
    ],
)
def test_packed_columns_follow_the_bits_in_the_config(groups, columns):
    section = {"quant_method": "compressed-tensors", "config_groups": groups}
    (part,) = weights_of(("q.weight_packed", "I32", (8, 1), 32), quantization_config=section).parts
    assert (part.rows, part.columns) == (8, columns)


@pytest.mark.parametrize(
    ("place", "dtype", "head", "expected"),  # the bytes of each quantization in ``CHOICES``
    [
        # 5 matrices in layers, embeddings of two, and a head of one in some rows
        (CPU, "float32", [], [28, 7 * 1.0625, 2 * 1.0625 + 5 * 0.625, 8 + 5 * 0.5625]),
        (CPU, "float32", [OWN_HEAD], [32, 8 + 6 * 1.0625, 8 + 1.0625 + 5 * 0.625, 12 + 5 * 0.5625]),
        (GPU, "bfloat16", [OWN_HEAD], [16, 6 + 5, 6 + 5 * 0.5625, 6 + 5 * 0.53125]),
        (GPU, "float16", [], [14, 4 + 5, 4 + 5 * 0.5625]),
        (Place("cuda", (7, 5)), "bfloat16", [], [14, 4 + 5, 4 + 5 * 0.5625]),
    ],
)  # fmt: skip
def test_loaded_bytes_of_each_quantization(place, dtype, head, expected):
    found = weights_of(*LAYERS, TABLE, *head).by_quantization(dtype, place)
    assert list(found) == list(weights.CHOICES[place.device][: len(expected)])
    assert [nbytes / SIZE for nbytes in found.values()] == pytest.approx(expected, rel=0.002)


def test_a_tied_head_is_not_loaded():
    assert weights_of(*LAYERS, TABLE, OWN_HEAD, tie_word_embeddings=True).parts == weights_of(*LAYERS, TABLE).parts


def test_bytes_read_per_token_leave_out_unused_embeddings():
    untied, tied = weights_of(*LAYERS, TABLE, OWN_HEAD), weights_of(*LAYERS, TABLE)
    for quantize in ("none", "int8", "int4"):
        read = untied.loaded_bytes(quantize, "float32", CPU) - 8 * SIZE
        assert untied.read_bytes(quantize, "float32", CPU) == read
    for quantize in ("none", "int8", "int4"):  # the whole table is also the head
        assert tied.read_bytes(quantize, "float32", CPU) == tied.loaded_bytes(quantize, "float32", CPU)
    assert weights_of(("a.experts.up_proj", "BF16", (4, 8, 8))).read_bytes("none", "float32", CPU) is None


FP8 = [("a.q.weight", "F8_E4M3", (ROWS, COLUMNS), SIZE), ("a.q.weight_scale_inv", "F32", (ROWS,), 4 * ROWS)]
FP8_CONFIG = {"quant_method": "fp8"}


def test_fp8_takes_its_stored_size_on_a_gpu_with_fp8():
    found = weights_of(*FP8, TABLE, quantization_config=FP8_CONFIG)
    assert found.by_quantization("bfloat16", Place("cuda", (8, 9))) == {"fp8": 5 * SIZE + 4 * ROWS}
    assert found.by_default("bfloat16", Place("cuda", (8, 9))) == "none"


def test_unpacked_fp8_is_requantized_except_experts_on_a_gpu():
    found = weights_of(*FP8, TABLE, quantization_config=FP8_CONFIG)
    assert list(found.by_quantization("bfloat16", GPU)) == ["none", "int8", "int4"]
    assert found.loaded_bytes("none", "bfloat16", GPU) == 6 * SIZE
    assert (found.by_default("bfloat16", GPU), found.layer_bits) == ("int8", pytest.approx(8, rel=0.01))
    experts = [(name.replace("a.q", "a.experts.0.q"), *rest) for name, *rest in FP8]
    mixture = weights_of(*experts, quantization_config=FP8_CONFIG)
    assert (mixture.by_default("bfloat16", GPU), mixture.by_default("bfloat16", CPU)) == ("none", "int8")
    assert (mixture.unpackable_share("int8", GPU), mixture.unpackable_share("int8", CPU)) == (1, 0)


def test_torchao_int8_stays_and_a_cpu_packs_the_head():
    section = {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int8WeightOnlyConfig"}}}
    stored = ("a.q._weight_qdata", "I8", (ROWS, COLUMNS), SIZE)
    found = weights_of(stored, OWN_HEAD, quantization_config=section)
    assert (found.method, found.quantization) == ("torchao", "int8")
    assert found.loaded_bytes("none", "float32", CPU) / SIZE == 1 + 1.0625
    assert found.loaded_bytes("none", "float32", GPU) / SIZE == 1 + 4


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3_moe", "gpt_oss", "dbrx", "gpt2", "qwen3_next", "gemma3n"])
def test_loaded_bytes_match_the_model(name, tmp_path):
    model = tiny_models.fresh(name, torch.bfloat16)
    model.save_pretrained(tmp_path)
    found = catalog.at(tmp_path).weights
    expected = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    assert found.loaded_bytes("none", "bfloat16", CPU) == pytest.approx(expected, rel=0.002)


@pytest.mark.parametrize("name", ["gemma3", "qwen3_vl", "qwen3_5", "ernie4_5_vl_moe"])
def test_loaded_bytes_of_multimodal_models_match_the_text_part(name, tmp_path):
    model = tiny_multimodal.fresh(name)
    model.save_pretrained(tmp_path)
    shapes = without_memory(*find(model.config), torch.float32)
    expected = sum(tensor.nbytes for tensor in (*shapes.parameters(), *shapes.buffers()))
    assert catalog.at(tmp_path).weights.loaded_bytes("none", "float32", CPU) == pytest.approx(expected, rel=0.002)


# ---- headers


def test_loaded_bytes_of_the_bundled_model():
    found = catalog.at(bundled_model_dir()).weights
    assert (found.loaded_bytes("none", "bfloat16", CPU), found.dtype) == (2 * 17_308_032, "bfloat16")


def test_a_gguf_file_has_its_most_frequent_type(tmp_path):
    path = tmp_path / "x.gguf"
    layers = ("blk.0.ffn_up.weight", (256, 32), 12), ("blk.0.attn_v.weight", (256, 32), 14)
    norms = ("output_norm", (64,), 0), ("blk.0.attn_norm.weight", (256,), 0)
    path.write_bytes(gguf_header(*layers, *norms, ("token_embd.weight", (256, 8), 12)))
    found = weights.of_gguf(gguf_file.read_model(path))
    assert (found.nbytes, found.dtype, found.mlp) == (path.stat().st_size, "Q4_K", 256 * 32)
    assert found.layer_bits == (4.5 + 6.5625) / 2
    assert found.parts[Part(LINEAR, 32, 256)] == 2
    assert found.is_unpacked(CPU)


@pytest.mark.parametrize("read", [gguf_file.read_model, stored_tensors.tensors, stored_tensors.read_json])
def test_unreadable_files_show_the_error_of_the_system(tmp_path, read):
    with pytest.raises(ModelError, match="Is a directory"):
        read(tmp_path)


@pytest.mark.parametrize(
    "content",
    [b"", b"version https://git-lfs.github.com/spec/v1", struct.pack("<Q", 2) + b"[]", struct.pack("<Q", 2) + b"{}"],
    ids=["empty", "a Git LFS pointer", "a list", "no tensors"],
)
def test_damaged_safetensors_files_are_refused(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match="damaged"):
        read_headers(tmp_path, "x")


def test_truncated_safetensors_files_show_the_missing_bytes(tmp_path):
    tiny_models.fresh("llama").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    os.truncate(file, file.stat().st_size - 100)
    with pytest.raises(ModelError, match="missing at its end: 100"):
        read_headers(tmp_path, "x")
