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
    sample_logits(model)  # every layer has been met
    return next(module for module in model.modules() if hasattr(module, "q_proj"))


def fused(attention):
    operations, norms = Operations(None), {one: rms_norm(one) for one in attention.children()}
    merged = MergedLinear(projections(attention), operations)
    return fused_attention(attention, merged, operations, torch.float32, norms)


@pytest.mark.parametrize(
    ("name", "found"),
    {"llama": True, "mistral": True, "qwen2": True, "qwen3": True, "cohere": False, "ernie4_5": False}.items(),
)
def test_found_by_what_they_compute(name, found):
    assert (fused(first_attention(name)) is not None) == found


@pytest.mark.parametrize("pack", [int8_rows.pack, int4_rows.pack], ids=["int8", "int4"])
def test_found_with_packed_weights(pack):
    attention = first_attention("llama", hidden_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=32)
    for linear in (*projections(attention), attention.o_proj):
        pack(linear)
    assert fused(attention) is not None


def test_a_layer_that_does_not_rotate_is_left_alone():
    model = tiny_models.fresh("smollm3")
    sample_logits(model)
    layers = [layer.self_attn for layer in model.model.layers]
    assert [fused(attention) is not None for attention in layers] == [bool(a.use_rope) for a in layers]
    assert {bool(attention.use_rope) for attention in layers} == {True, False}


@pytest.mark.parametrize(
    "other",
    [
        lambda own, x, **given: own(x * 2, **given),
        lambda own, x, **given: (own(x, **given)[0].flip(1), None),
        lambda own, x, position_embeddings, **given: own(x, position_embeddings=position_embeddings[::-1], **given),
        lambda own, x, position_embeddings, **given: own(x, position_embeddings=None, **given),
        lambda own, x, **given: (own(x, **given)[0][:, :1], None),
    ],
    ids=["scaled", "reordered", "angles", "raises", "one token"],
)
def test_a_module_with_lines_of_its_own_stays(other):
    attention = first_attention("llama")
    plain = type(attention)

    class Other(plain):
        def forward(self, hidden_states, **given):
            return other(lambda x, **given: plain.forward(self, x, **given), hidden_states, **given)

    attention.__class__ = Other
    assert fused(attention) is None


def test_norm_and_residual_are_those_of_the_layer():
    attention = first_attention("llama")
    ours, size = fused(attention), attention.q_proj.in_features
    draw = torch.Generator().manual_seed(3)
    hidden = torch.randn((1, 5, size), generator=draw)
    angle = torch.randn((1, 5, attention.head_dim), generator=draw)
    norm = Norm(torch.rand(size, generator=draw), 1e-6)
    with torch.inference_mode():
        normed = torch.nn.functional.rms_norm(hidden, (size,), norm.weight, norm.eps)
        with attention_hook.bound(DenseManager()):
            expected = attention(normed, position_embeddings=(angle.cos(), angle.sin()), attention_mask=None)[0]
        with attention_hook.bound(DenseManager()):
            measured = ours(hidden, (angle.cos(), angle.sin()), norm, hidden)
    torch.testing.assert_close(measured, expected + hidden, atol=1e-5, rtol=1e-5)


def test_masks_caches_and_other_angles_go_the_modules_own_way():
    attention = first_attention("llama")
    ours, hidden = fused(attention), torch.zeros((1, 2, attention.q_proj.in_features))
    angles = torch.zeros((1, 2, attention.head_dim))
    given = {"position_embeddings": (angles, angles), "attention_mask": None, "past_key_values": None}
    assert ours.suits(hidden, given)
    for changed in (
        {"attention_mask": hidden},
        {"past_key_values": object()},
        {"cache": object()},
        {"position_embeddings": None},
        {"position_embeddings": (angles[..., :2], angles[..., :2])},
    ):
        assert not ours.suits(hidden, given | changed)


# ---- One token's layer of packed weights is two loops, and computes what its modules compute


def bundled(**how):
    return load_model(Load("bundled", "cpu", **how), lambda stage: None).model


@pytest.fixture
def called(monkeypatch):
    """The calls of layers that compute one token."""
    calls, own = [], one_token.OneTokenLayer.__call__
    monkeypatch.setattr(one_token.OneTokenLayer, "__call__", lambda *given: calls.append(1) or own(*given))
    return calls


@pytest.mark.parametrize("quantize", ["int4", "int8"])
def test_it_computes_what_the_modules_compute(quantize, called):
    model = bundled(quantize=quantize, dtype="float32")
    called.clear()
    logits = modules.sample_logits(model)
    assert len(called) == modules.CHECKED_STEPS * model.config.num_hidden_layers
    plain = modules.sample_logits(bundled(quantize=quantize, dtype="float32", fast=False))
    torch.testing.assert_close(logits[modules.CHECKED_PROMPT :], plain[modules.CHECKED_PROMPT :], rtol=0, atol=0.02)


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])  # with norms of each head; and before each sum, and GELU
def test_layers_with_more_norms_are_two_loops_too(name, called):
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
def test_other_weights_and_numbers_go_through_the_modules(how, monkeypatch):
    monkeypatch.setattr(one_token.OneTokenLayer, "__call__", lambda *_: pytest.fail("asked"))
    modules.sample_logits(bundled(**how))


class Estimates(DenseManager):
    """Keeps the estimates of its layers' queries."""

    wants_ahead = True

    def __init__(self):
        super().__init__()
        self.found = []

    def estimated(self, layer, query):
        self.found.append((layer, query.clone()))


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_an_estimate_multiplies_the_rows_of_queries_alone_and_is_the_same(name, monkeypatch):
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

    def noted(self, x, weight, *others, **named):
        rows.append(len(weight))
        return project(self, x, weight, *others, **named)

    monkeypatch.setattr(Operations, "project", noted)
    assert modules.fuse(model, None).fused
    rows.clear()
    fused = estimates()
    assert [layer for layer, _ in fused] == [1] * len(ids)
    for (_, one), (_, other) in zip(plain, fused, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
    assert rows[0] == sizes[0]  # before anything of the first layer
    assert rows[1] == sum(sizes)
