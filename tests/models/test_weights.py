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


def of(*tensors: tuple[Any, ...], **config: Any) -> Weights:
    """The weights of tensors with these names, dtypes, shapes and bytes (by default two per element)."""
    made = [StoredTensor(*one, *(() if len(one) > 3 else (0,))) for one in tensors]
    return weights.of_checkpoint(config, made)


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
def test_what_is_loaded(name, of_text, of_multimodal):
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
def test_the_kinds_of_tensors(name, shape, kind):
    assert {part.kind for part in of((name, "BF16", shape)).parts} == {kind}


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
def test_what_is_packed(stored, expected):
    parts = of(*stored, quantization_config={"quant_method": "x"}).parts
    assert [part for part in parts if part.packed] == [Part(LINEAR, *expected)]


def test_a_packed_stack_of_experts_is_several_matrices():
    stack = ("a.experts.up_blocks", "U8", (2, 32, 2, 16), 2048), ("a.experts.up_scales", "U8", (2, 32, 2), 128)
    assert of(*stack, quantization_config={"quant_method": "mxfp4"}).parts == {Part(EXPERT, 32, 64, 1088): 2}


@pytest.mark.parametrize(
    ("groups", "columns"),
    [
        ({"a": {"weights": {"num_bits": 8}}}, 4),
        ({"a": {"weights": {"num_bits": 8}}, "b": {"weights": {"num_bits": 4}}}, 8),
        ({"a": {"weights": None}}, 8),
        ([], 8),
    ],
)
def test_the_bits_of_packed_weights(groups, columns):
    section = {"quant_method": "compressed-tensors", "config_groups": groups}
    (part,) = of(("q.weight_packed", "I32", (8, 1), 32), quantization_config=section).parts
    assert (part.rows, part.columns) == (8, columns)


@pytest.mark.parametrize(
    ("place", "dtype", "head", "expected"),  # the bytes of each quantization in ``CHOICES``
    [
        # 5 matrices in layers, embeddings of two and perhaps a head of one
        (CPU, "float32", [], [28, 7 * 1.0625, 2 * 1.0625 + 5 * 0.625, 8 + 5 * 0.5625]),
        (CPU, "float32", [OWN_HEAD], [32, 8 + 6 * 1.0625, 8 + 1.0625 + 5 * 0.625, 12 + 5 * 0.5625]),
        (GPU, "bfloat16", [OWN_HEAD], [16, 6 + 5, 6 + 5 * 0.5625, 6 + 5 * 0.53125]),
        (GPU, "float16", [], [14, 4 + 5, 4 + 5 * 0.5625]),
        (Place("cuda", (7, 5)), "bfloat16", [], [14, 4 + 5, 4 + 5 * 0.5625]),
    ],
)  # fmt: skip
def test_linears_are_packed_and_on_a_cpu_the_head_in_8_bits(place, dtype, head, expected):
    found = of(*LAYERS, TABLE, *head).by_quantization(dtype, place)
    assert list(found) == list(weights.CHOICES[place.device][: len(expected)])
    assert [nbytes / SIZE for nbytes in found.values()] == pytest.approx(expected, rel=0.002)


def test_a_head_that_the_configuration_ties_is_not_loaded():
    assert of(*LAYERS, TABLE, OWN_HEAD, tie_word_embeddings=True).parts == of(*LAYERS, TABLE).parts


def test_a_token_reads_one_row_of_the_embeddings_and_of_experts_nothing_is_known():
    untied, tied = of(*LAYERS, TABLE, OWN_HEAD), of(*LAYERS, TABLE)
    for quantize in ("none", "int8", "int4"):
        read = untied.loaded_bytes(quantize, "float32", CPU) - 8 * SIZE
        assert untied.read_bytes(quantize, "float32", CPU) == read
    for quantize in ("none", "int8", "int4"):  # all of the table is the head too
        assert tied.read_bytes(quantize, "float32", CPU) == tied.loaded_bytes(quantize, "float32", CPU)
    assert of(("a.experts.up_proj", "BF16", (4, 8, 8))).read_bytes("none", "float32", CPU) is None


FP8 = [("a.q.weight", "F8_E4M3", (ROWS, COLUMNS), SIZE), ("a.q.weight_scale_inv", "F32", (ROWS,), 4 * ROWS)]
FP8_CONFIG = {"quant_method": "fp8"}


def test_what_is_multiplied_as_it_is_stored_takes_what_it_does_in_the_files():
    found = of(*FP8, TABLE, quantization_config=FP8_CONFIG)
    assert found.by_quantization("bfloat16", Place("cuda", (8, 9))) == {"fp8": 5 * SIZE + 4 * ROWS}
    assert found.by_default("bfloat16", Place("cuda", (8, 9))) == "none"


def test_what_loading_unpacks_is_packed_again_but_not_experts_on_a_gpu():
    found = of(*FP8, TABLE, quantization_config=FP8_CONFIG)
    assert list(found.by_quantization("bfloat16", GPU)) == ["none", "int8", "int4"]
    assert found.loaded_bytes("none", "bfloat16", GPU) == 6 * SIZE
    assert (found.by_default("bfloat16", GPU), found.layer_bits) == ("int8", pytest.approx(8, rel=0.01))
    experts = [(name.replace("a.q", "a.experts.0.q"), *rest) for name, *rest in FP8]
    mixture = of(*experts, quantization_config=FP8_CONFIG)
    assert (mixture.by_default("bfloat16", GPU), mixture.by_default("bfloat16", CPU)) == ("none", "int8")
    assert (mixture.unpackable_share("int8", GPU), mixture.unpackable_share("int8", CPU)) == (1, 0)


def test_int8_of_torchao_stays_so_and_on_a_cpu_its_head_has_8_bits_too():
    section = {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int8WeightOnlyConfig"}}}
    stored = ("a.q._weight_qdata", "I8", (ROWS, COLUMNS), SIZE)
    found = of(stored, OWN_HEAD, quantization_config=section)
    assert (found.method, found.quantization) == ("torchao", "int8")
    assert found.loaded_bytes("none", "float32", CPU) / SIZE == 1 + 1.0625
    assert found.loaded_bytes("none", "float32", GPU) / SIZE == 1 + 4


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3_moe", "gpt_oss", "dbrx", "gpt2", "qwen3_next", "gemma3n"])
def test_they_are_the_tensors_of_the_model(name, tmp_path):
    model = tiny_models.fresh(name, torch.bfloat16)
    model.save_pretrained(tmp_path)
    found = catalog.at(tmp_path).weights
    expected = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    assert found.loaded_bytes("none", "bfloat16", CPU) == pytest.approx(expected, rel=0.002)


@pytest.mark.parametrize("name", ["gemma3", "qwen3_vl", "qwen3_5", "ernie4_5_vl_moe"])
def test_of_a_multimodal_model_they_are_those_of_its_text(name, tmp_path):
    model = tiny_multimodal.fresh(name)
    model.save_pretrained(tmp_path)
    shapes = without_memory(*find(model.config), torch.float32)
    expected = sum(tensor.nbytes for tensor in (*shapes.parameters(), *shapes.buffers()))
    assert catalog.at(tmp_path).weights.loaded_bytes("none", "float32", CPU) == pytest.approx(expected, rel=0.002)


# ---- headers


def test_the_bundled_model():
    found = catalog.at(bundled_model_dir()).weights
    assert (found.loaded_bytes("none", "bfloat16", CPU), found.dtype) == (2 * 17_308_032, "bfloat16")


def test_a_gguf_file_is_of_the_type_of_most_of_its_elements_and_its_bits_are_those_of_its_layers(tmp_path):
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
def test_a_file_that_the_system_does_not_give_is_not_to_be_downloaded_again(tmp_path, read):
    with pytest.raises(ModelError, match="Is a directory"):
        read(tmp_path)


@pytest.mark.parametrize(
    "content",
    [b"", b"version https://git-lfs.github.com/spec/v1", struct.pack("<Q", 2) + b"[]", struct.pack("<Q", 2) + b"{}"],
    ids=["empty", "a pointer to another file", "a list", "no tensors"],
)
def test_damaged_safetensors_files(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match="damaged"):
        read_headers(tmp_path, "x")


def test_a_truncated_safetensors_file(tmp_path):
    tiny_models.fresh("llama").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    os.truncate(file, file.stat().st_size - 100)
    with pytest.raises(ModelError, match="missing at its end: 100"):
        read_headers(tmp_path, "x")
