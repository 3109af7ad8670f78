"""What is loaded and what is packed, by the names of tensors."""

from __future__ import annotations

import pytest

from kvchat.models.stored_tensors import Elements, count, is_loaded


@pytest.mark.parametrize(
    ("name", "of_text", "of_multimodal"),
    [
        ("model.language_model.layers.0.mlp.up_proj.weight", True, True),
        ("language_model.lm_head.weight", True, True),
        ("model.layers.0.self_attn.q_proj.weight", True, True),
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
def test_what_is_loaded(name: str, of_text: bool, of_multimodal: bool) -> None:
    assert (is_loaded(name, False), is_loaded(name, True)) == (of_text, of_multimodal)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.layers.0.mlp.up_proj.weight", Elements(linear=7)),
        ("model.layers.0.mlp.shared_experts.up_proj.weight", Elements(linear=7)),
        ("model.layers.0.mlp.up_proj.bias", Elements()),
        ("model.layers.0.mlp.experts.3.up_proj.weight", Elements(experts=7)),
        ("model.layers.0.mlp.experts.gate_up_proj", Elements(experts=7)),
        ("model.layers.0.mlp.experts.gate_up_proj_bias", Elements()),
        ("model.layers.0.block_sparse_moe.input_linear.weight", Elements(experts=7)),
        ("blk.0.ffn_up_exps.weight", Elements(experts=7)),
        ("blk.0.ffn_up.weight", Elements(linear=7)),
        ("model.language_model.embed_tokens.weight", Elements(embedding=7)),
        ("token_embd.weight", Elements(embedding=7)),
        ("model.embed_tokens_per_layer.weight", Elements()),
        ("transformer.wpe.weight", Elements()),
        ("language_model.lm_head.weight", Elements(head=7)),
        ("output.weight", Elements(head=7)),
    ],
)
def test_what_is_packed(name: str, expected: Elements) -> None:
    assert count([(name, 7)]) == expected


def test_a_head_that_is_packed_already_is_not_the_embedding() -> None:
    assert count([("embed_tokens.weight", 7)], packed=["lm_head"]) == Elements(embedding=7, head=0)
