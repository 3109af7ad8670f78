"""llama.cpp as a baseline: it decodes the same model, or says what is missing."""

from __future__ import annotations

import re

import pytest
import torch

from kvchat.bench.beside import baselines
from kvchat.bench.beside.baselines import LlamaCpp
from kvchat.bench.decoding import prose
from kvchat.errors import UsageError
from kvchat.models.load import load_model
from kvchat.protocol.messages import Load


def test_its_greedy_tokens_are_those_of_generate():
    pytest.importorskip("xllamacpp")
    pytest.importorskip("gguf")
    bundled = load_model(Load("bundled", "cpu", "float32"), lambda stage: None)
    ids = prose(bundled.tokenizer, 100)
    with baselines.as_written(bundled.model):
        expected = bundled.model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False, pad_token_id=0)
    peer = LlamaCpp(bundled, None, ids, 16)
    try:
        for _ in range(2):  # the second time its K/V is there
            assert peer.measure([0] * 12).ms > 0
            assert re.findall(r"<(\d+)>", peer.answer) == [str(token) for token in expected[0, 100:].tolist()]
    finally:
        peer.close()


@pytest.mark.parametrize("absent", ["xllamacpp", "gguf"])
def test_without_its_packages_the_reason_is_told(tiny_shape, monkeypatch, absent):
    monkeypatch.setattr(baselines, "find_spec", lambda name: None if name == absent else object())
    with pytest.raises(UsageError, match=rf"package {absent} is not installed.*install .*xllamacpp"):
        baselines.build("llama.cpp", tiny_shape, None, [1, 2, 3], 4).measure([0] * 5)


def test_a_process_that_ends_is_told(tiny_shape, monkeypatch):
    monkeypatch.setattr(baselines, "find_spec", lambda name: object())
    monkeypatch.setattr(baselines, "write", lambda model, file: None)
    monkeypatch.setattr(baselines.process.sys, "executable", "false")
    peer = baselines.build("llama.cpp", tiny_shape, None, [1, 2, 3], 4)
    with pytest.raises(UsageError, match=r"llama.cpp ended.*code 1"):
        peer.measure([0] * 5)
    peer.close()
    peer.close()


# ---- A model written to a GGUF file: llama.cpp's order of a head's elements


def test_each_pair_of_a_head_becomes_neighbors(tiny_shape):
    config = tiny_shape.model.config
    heads, dim = config.num_attention_heads, config.head_dim
    rows = torch.arange(heads * dim)[:, None].expand(-1, 3)
    paired = baselines.rotated_in_pairs("layers.0.self_attn.q_proj.weight", rows, config)[:, 0].view(heads, -1, 2)
    assert torch.equal(paired[..., 1] - paired[..., 0], torch.full((heads, dim // 2), dim // 2))
    assert baselines.rotated_in_pairs("v_proj.weight", rows, config) is rows
