"""Modules are recognized by what they compute; near misses of every kind are not recognized."""

import inspect

import pytest
import torch
from support import tiny_models
from torch import nn

from kvchat.models.fuse.modules import Operations, is_attention, is_layer, is_plain, rms_norm, rotates_halves


def layer_of(name):
    return tiny_models.model(name).model.layers[0]


def parts_of(model):
    """The norms and attention modules of a model."""
    modules = list(model.modules())
    return {m for m in modules if rms_norm(m)}, {m for m in modules if is_attention(m)}


def with_class(module, **members):
    """``module`` as an instance of a subclass with other ``members``."""
    module.__class__ = type("Changed", (type(module),), members)
    return module


# ---- norms


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rms_norms_are_recognized_with_their_epsilon(dtype):
    module = tiny_models.model("llama", dtype).model.norm
    norm = rms_norm(module)
    assert norm.weight is module.weight
    assert norm.eps == module.variance_epsilon


def layer_norm_without_bias():
    norm = nn.LayerNorm(64, bias=False)
    nn.init.normal_(norm.weight)
    return norm


def other_epsilon():
    norm = with_class(tiny_models.fresh("llama").model.norm)
    norm.variance_epsilon = 0.5
    norm.__class__.forward = lambda self, x: nn.functional.rms_norm(x, x.shape[-1:], self.weight, 1e-6)
    return norm


def failing_norm():
    def forward(self, x):
        raise RuntimeError

    return with_class(tiny_models.fresh("llama").model.norm, forward=forward)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_scaled_by_one_plus_weight_are_recognized(dtype):
    norm = tiny_models.model("gemma", dtype).model.norm
    found, x = rms_norm(norm), torch.randn(1, 3, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    assert torch.equal(found.weight, 1 + norm.weight.float())
    torch.testing.assert_close(Operations(None).normed(x, found), norm(x))


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: nn.LayerNorm(64), id="layer_norm"),
        layer_norm_without_bias,
        other_epsilon,
        failing_norm,
        pytest.param(lambda: tiny_models.model("bamba").model.layers[0].mamba.norm, id="gated_norm"),
        lambda: nn.Linear(4, 4),
    ],
)
def test_other_modules_are_not_rms_norms(make):
    assert rms_norm(make()) is None


# ---- attention


def test_separate_projections_can_be_merged():
    assert is_attention(layer_of("llama").self_attn)
    assert is_attention(layer_of("qwen2").self_attn)
    assert not is_attention(layer_of("phi3").self_attn), "merged already"


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda it: it.k_proj.half(), id="other dtype"),
        pytest.param(lambda it: setattr(it, "v_proj", nn.Linear(64, 32, bias=True)), id="another bias"),
        pytest.param(lambda it: setattr(it.q_proj, "forward", lambda x: x), id="another forward"),
        pytest.param(lambda it: with_class(it.q_proj), id="subclass"),
    ],
)
def test_differing_projections_cannot_be_merged(change):
    attention = tiny_models.fresh("llama").model.layers[0].self_attn
    change(attention)
    assert not is_attention(attention)


def test_only_unquantized_linears_are_plain():
    linear = nn.Linear(4, 4)
    assert is_plain(linear)
    linear.weight = nn.Parameter(torch.zeros(4, 4, dtype=torch.int8), requires_grad=False)
    assert not is_plain(linear)
    assert not is_plain(nn.Bilinear(2, 2, 2))


def test_torchao_tensors_are_not_plain():
    """They claim to be floating point and can be sliced, but do not support torch.cat, which merging needs."""
    torchao = pytest.importorskip("torchao.quantization")
    linear = nn.Linear(64, 64)
    torchao.quantize_(linear, torchao.Int8WeightOnlyConfig())
    assert linear.weight.is_floating_point()
    assert linear.weight[:8].shape == (8, 64)
    assert not is_plain(linear)


# ---- layers


def scaled_residual(layer):
    def forward(self, hidden_states, **kwargs):
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
        hidden_states = hidden_states + attended
        return hidden_states + 2 * self.mlp(self.post_attention_layernorm(hidden_states))

    with_class(layer, forward=forward)


def no_residual(layer):
    def forward(self, hidden_states, **kwargs):
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
        return self.mlp(self.post_attention_layernorm(attended + hidden_states))

    with_class(layer, forward=forward)


def test_a_decoder_layer_is_recognized():
    model = tiny_models.model("llama")
    assert is_layer(model.model.layers[0], *parts_of(model))
    assert not is_layer(model.model.layers[0], set(), parts_of(model)[1])


@pytest.mark.parametrize(
    "change",
    [
        scaled_residual,
        no_residual,
        pytest.param(lambda it: setattr(it.mlp, "act_fn", nn.GELU()), id="another activation"),
        pytest.param(lambda it: setattr(it, "extra", nn.Identity()), id="another child"),
        pytest.param(lambda it: setattr(it.self_attn, "gate", nn.Linear(64, 64)), id="another projection"),
    ],
)
def test_a_changed_layer_is_not_recognized(change):
    model = tiny_models.fresh("llama")
    layer = model.model.layers[0]
    change(layer)
    assert not is_layer(layer, *parts_of(model))
    assert is_layer(model.model.layers[1], *parts_of(model))


# ---- rotation


@pytest.mark.parametrize(
    ("name", "halves"), [("llama", True), ("qwen3", True), ("cohere", False), ("ernie4_5", False), ("nanochat", False)]
)
def test_a_rotation_of_halves_is_recognized(name, halves):
    assert rotates_halves(inspect.unwrap(type(layer_of(name).self_attn).forward)) == halves


def test_a_forward_without_rotation_is_not_recognized():
    assert not rotates_halves(nn.Linear.forward)
    assert not rotates_halves(None)
