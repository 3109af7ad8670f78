"""Attention modules that only project, rotate and attend are fused, and no others."""

import pytest
import torch
from support import tiny_models

from kvchat.models import attention_hook
from kvchat.models.attention_hook import DenseManager
from kvchat.models.fuse import modules, one_token
from kvchat.models.fuse.modules import (
    MergedLinear,
    Norm,
    Operations,
    fused_attention,
    projections,
    rms_norm,
    sample_logits,
)
from kvchat.models.load import load_model
from kvchat.models.quantize import int4_rows, int8_rows
from kvchat.models.quantize.rows import body
from kvchat.protocol.messages import Load


def first_attention(name, **sizes):
    model = tiny_models.fresh(name, **sizes)
    sample_logits(model)  # registers every layer
    return next(module for module in model.modules() if hasattr(module, "q_proj"))


def fused(attention):
    operations, norms = Operations(None), {one: rms_norm(one) for one in attention.children()}
    merged = MergedLinear(projections(attention), operations)
    return fused_attention(attention, merged, operations, torch.float32, norms)


@pytest.mark.parametrize(
    ("name", "found"),
    {"llama": True, "mistral": True, "qwen2": True, "qwen3": True, "cohere": False, "ernie4_5": False}.items(),
)
def test_attention_is_fused_by_what_it_computes(name, found):
    assert (fused(first_attention(name)) is not None) == found


@pytest.mark.parametrize("pack", [int8_rows.pack, int4_rows.pack], ids=["int8", "int4"])
def test_attention_with_packed_weights_is_fused(pack):
    attention = first_attention("llama", hidden_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=32)
    for linear in (*projections(attention), attention.o_proj):
        pack(linear)
    assert fused(attention) is not None


def test_layers_without_rotation_are_not_fused():
    model = tiny_models.fresh("smollm3")
    sample_logits(model)
    layers = [layer.self_attn for layer in model.model.layers]
    assert [fused(attention) is not None for attention in layers] == [bool(a.use_rope) for a in layers]
    assert {bool(attention.use_rope) for attention in layers} == {True, False}


@pytest.mark.parametrize(
    "other",
    [
        lambda run, x, **kwargs: run(x * 2, **kwargs),
        lambda run, x, **kwargs: (run(x, **kwargs)[0].flip(1), None),
        lambda run, x, position_embeddings, **kwargs: run(x, position_embeddings=position_embeddings[::-1], **kwargs),
        lambda run, x, position_embeddings, **kwargs: run(x, position_embeddings=None, **kwargs),
        lambda run, x, **kwargs: (run(x, **kwargs)[0][:, :1], None),
    ],
    ids=["scaled", "reordered", "angles", "raises", "one token"],
)
def test_modified_attention_is_not_fused(other):
    attention = first_attention("llama")
    plain = type(attention)

    class Other(plain):
        def forward(self, hidden_states, **kwargs):
            return other(lambda x, **kwargs: plain.forward(self, x, **kwargs), hidden_states, **kwargs)

    attention.__class__ = Other
    assert fused(attention) is None


def test_fused_attention_applies_norm_and_residual():
    attention = first_attention("llama")
    fast, size = fused(attention), attention.q_proj.in_features
    draw = torch.Generator().manual_seed(3)
    hidden = torch.randn((1, 5, size), generator=draw)
    angle = torch.randn((1, 5, attention.head_dim), generator=draw)
    norm = Norm(torch.rand(size, generator=draw), 1e-6)
    with torch.inference_mode():
        normed = torch.nn.functional.rms_norm(hidden, (size,), norm.weight, norm.eps)
        with attention_hook.bound(DenseManager()):
            expected = attention(normed, position_embeddings=(angle.cos(), angle.sin()), attention_mask=None)[0]
        with attention_hook.bound(DenseManager()):
            measured = fast(hidden, (angle.cos(), angle.sin()), norm, hidden)
    torch.testing.assert_close(measured, expected + hidden, atol=1e-5, rtol=1e-5)


def test_fused_attention_rejects_masks_caches_and_other_angles():
    attention = first_attention("llama")
    fast, hidden = fused(attention), torch.zeros((1, 2, attention.q_proj.in_features))
    angles = torch.zeros((1, 2, attention.head_dim))
    kwargs = {"position_embeddings": (angles, angles), "attention_mask": None, "past_key_values": None}
    assert fast.suits(hidden, kwargs)
    for changed in (
        {"attention_mask": hidden},
        {"past_key_values": object()},
        {"cache": object()},
        {"position_embeddings": None},
        {"position_embeddings": (angles[..., :2], angles[..., :2])},
    ):
        assert not fast.suits(hidden, kwargs | changed)


# ---- For one token, a layer of packed weights is two loops that match its modules


def bundled(**how):
    return load_model(Load("bundled", "cpu", **how), lambda stage: None).model


@pytest.fixture
def called(monkeypatch):
    """An entry for each call of a one-token layer."""
    calls, run = [], one_token.OneTokenLayer.__call__
    monkeypatch.setattr(one_token.OneTokenLayer, "__call__", lambda *kwargs: calls.append(1) or run(*kwargs))
    return calls


@pytest.mark.parametrize("quantize", ["int4", "int8"])
def test_one_token_layers_match_the_modules(quantize, called):
    model = bundled(quantize=quantize, dtype="float32")
    called.clear()
    logits = modules.sample_logits(model)
    assert len(called) == modules.CHECKED_STEPS * model.config.num_hidden_layers
    plain = modules.sample_logits(bundled(quantize=quantize, dtype="float32", fast=False))
    torch.testing.assert_close(logits[modules.CHECKED_PROMPT :], plain[modules.CHECKED_PROMPT :], rtol=0, atol=0.02)


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])  # norms per head; norms before each sum, and GELU
def test_one_token_layers_support_more_norms(name, called):
    model = tiny_models.fresh(name, hidden_size=128, intermediate_size=256, head_dim=32)
    for linear in body(model):
        int8_rows.pack(linear)
    plain = modules.sample_logits(model)
    assert modules.fuse(model, None, plain).note == ""
    called.clear()
    logits = modules.sample_logits(model)
    assert len(called) == modules.CHECKED_STEPS * model.config.num_hidden_layers
    torch.testing.assert_close(logits, plain, rtol=0, atol=1e-3)


@pytest.mark.parametrize("how", [{"quantize": "none"}, {"quantize": "int4", "dtype": "bfloat16"}])
def test_other_weights_and_dtypes_use_the_modules(how, monkeypatch):
    monkeypatch.setattr(one_token.OneTokenLayer, "__call__", lambda *_: pytest.fail("called"))
    modules.sample_logits(bundled(**how))


class Estimates(DenseManager):
    """Records the estimated queries of each layer."""

    wants_ahead = True

    def __init__(self):
        super().__init__()
        self.found = []

    def estimated(self, layer, query):
        self.found.append((layer, query.clone()))


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_query_estimates_multiply_only_query_rows(name, monkeypatch):
    model, ids = tiny_models.fresh(name), torch.tensor([3, 1, 4])
    sample_logits(model)
    attention_hook.install(model, known={1})
    sizes = [projection.out_features for projection in projections(model.model.layers[1].self_attn)]

    def estimates():
        with torch.inference_mode(), attention_hook.bound(backend := Estimates()):
            for at, token in enumerate(ids):
                model(token.view(1, 1), position_ids=torch.tensor([[at]]), use_cache=False)
        return backend.found

    plain, rows, project = estimates(), [], Operations.project

    def recording(self, x, weight, *others, **named):
        rows.append(len(weight))
        return project(self, x, weight, *others, **named)

    monkeypatch.setattr(Operations, "project", recording)
    assert modules.fuse(model, None).fused
    rows.clear()
    fused = estimates()
    assert [layer for layer, _ in fused] == [1] * len(ids)
    for (_, one), (_, other) in zip(plain, fused, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
    assert rows[0] == sizes[0]  # the estimate, before the first layer
    assert rows[1] == sum(sizes)
