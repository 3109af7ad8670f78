"""A model written to a GGUF file: llama.cpp's order of a head's elements."""

from __future__ import annotations

import torch

from kvchat.bench import baselines


def test_each_pair_of_a_head_becomes_neighbors(tiny_shape):
    config = tiny_shape.model.config
    heads, dim = config.num_attention_heads, config.head_dim
    rows = torch.arange(heads * dim)[:, None].expand(-1, 3)
    paired = baselines.rotated_in_pairs("layers.0.self_attn.q_proj.weight", rows, config)[:, 0].view(heads, -1, 2)
    assert torch.equal(paired[..., 1] - paired[..., 0], torch.full((heads, dim // 2), dim // 2))
    assert baselines.rotated_in_pairs("v_proj.weight", rows, config) is rows
