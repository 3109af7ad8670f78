"""Bytes of weights, told by the shapes of a model without memory."""

from __future__ import annotations

import pytest
import torch
from support import tiny_models, tiny_multimodal

from kvchat.models import support
from kvchat.models.quantize.weight_sizes import linears, packed_bytes, read_bytes, weight_bytes, without_memory
from kvchat.models.stored_tensors import Packed

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(scope="module")
def shapes():
    real = tiny_models.model("llama")
    return without_memory(type(real), real.config, torch.bfloat16)


def test_without_quantization_they_are_the_tensors(shapes):
    assert all(tensor.is_meta for tensor in shapes.parameters())
    assert weight_bytes(shapes, "none", CPU) == sum(t.nbytes for t in (*shapes.parameters(), *shapes.buffers()))


def test_int8_takes_a_byte_a_weight_and_scales(shapes):
    packed = [linear.weight for linear in linears(shapes) if linear is not shapes.get_output_embeddings()]
    saved = weight_bytes(shapes, "none", GPU) - weight_bytes(shapes, "int8", GPU)
    assert saved == sum(weight.numel() - 5 * len(weight) for weight in packed)
    head = shapes.get_output_embeddings().weight
    assert {weight.shape[1] % 32 for weight in packed} == {0}
    of_head = head.numel() * 34 // 32
    assert head is not shapes.get_input_embeddings().weight
    on_cpu = sum(2 * weight.numel() - weight.numel() * 34 // 32 for weight in packed)
    assert weight_bytes(shapes, "none", CPU) - weight_bytes(shapes, "int8", CPU) == on_cpu + head.nbytes - of_head


def test_a_token_reads_all_but_the_embeddings_and_of_experts_nothing_is_known(shapes):
    total = weight_bytes(shapes, "none", CPU)
    assert read_bytes(shapes, total) == total - shapes.get_input_embeddings().weight.nbytes
    assert read_bytes(tiny_models.model("mixtral"), total) is None
    assert read_bytes(tiny_models.model("dbrx"), total) is None


LAYER = "layers.1"


@pytest.mark.parametrize(
    ("made", "name", "stored", "weight"),
    [
        (tiny_models, "llama", [f"model.{LAYER}.mlp.up_proj"], f"model.{LAYER}.mlp.up_proj.weight"),
        (tiny_models, "llama", [f"{LAYER}.mlp.up_proj"], f"model.{LAYER}.mlp.up_proj.weight"),
        (
            tiny_models,
            "qwen3_moe",
            [f"model.{LAYER}.mlp.experts.{i}.{part}_proj" for i in range(4) for part in ("gate", "up")],
            f"model.{LAYER}.mlp.experts.gate_up_proj",
        ),
        (
            tiny_models,
            "gpt_oss",
            [f"model.{LAYER}.mlp.experts.gate_up_proj"],
            f"model.{LAYER}.mlp.experts.gate_up_proj",
        ),
        (
            tiny_multimodal,
            "gemma3",
            [f"language_model.model.{LAYER}.mlp.up_proj", "vision_tower.vision_model.encoder.layers.0.mlp.fc1"],
            f"model.language_model.{LAYER}.mlp.up_proj.weight",
        ),
        (
            tiny_multimodal,
            "qwen2_5_vl",
            [f"model.{LAYER}.mlp.up_proj", "visual.blocks.1.mlp.up_proj"],
            f"model.language_model.{LAYER}.mlp.up_proj.weight",
        ),
        (
            tiny_multimodal,
            "qwen3_5",
            [f"model.language_model.{LAYER}.mlp.up_proj"],
            f"model.{LAYER}.mlp.up_proj.weight",
        ),
    ],
    ids=["its own", "no head", "experts", "fused experts", "a prefix", "none", "another prefix"],
)
def test_packed_weights_are_counted_whatever_the_files_call_them(made, name, stored, weight):
    shapes = without_memory(*support.find(made.config(name)), torch.bfloat16)
    total, held = weight_bytes(shapes, "none", GPU), shapes.get_parameter(weight)
    packed = dict.fromkeys(stored, Packed(10, 0))
    inside = sum("vis" not in name for name in stored)
    assert packed_bytes(shapes, packed) == total - held.nbytes + 10 * inside
