"""Results of probing a model: rotations of keys, shapes, windows, pinned frequencies."""

import pytest
import torch
from support import tiny_models
from support.grids import sampled

from kvchat.kv.rope import cos_sin, rotate
from kvchat.models import attention_hook
from kvchat.models.probe import UnknownValues, pin_frequencies, probe, selftest

# (rotated dimensions, interleaved, offset) of each layer's keys; None: the layer has no positions
HALF16 = (16, False, 0)

ROTATIONS = {
    "llama": [HALF16] * 4,
    "llama-head32": [(32, False, 0)] * 4,
    "llama-linear": [HALF16] * 4,
    "llama-yarn": [HALF16] * 4,
    "llama-llama3": [HALF16] * 4,
    "phi": [(8, False, 0)] * 4,
    "phi3": [(8, False, 0)] * 4,
    "gpt_neox": [(4, False, 0)] * 4,
    "stablelm": [(4, False, 0)] * 4,
    "nemotron": [(8, False, 0)] * 4,
    "gemma3": [HALF16] * 4,
    "gpt_oss": [HALF16] * 4,
    "cohere": [(16, True, 0)] * 4,
    "cohere2": [(16, True, 0)] * 3 + [None],
    "glm": [(8, True, 0)] * 4,
    "glm4": [(8, True, 0)] * 4,
    "nanochat": [HALF16] * 4,
    "smollm3": [HALF16] * 3 + [None],
    "deepseek_v3": [(8, False, 16)] * 4,
}

NO_STREAMING = {
    "gpt2": "adds its positions",
    "opt": "adds its positions",
    "llama-dynamic": "change with the length",
    "llama-longrope": "change with the length",
}


@pytest.mark.parametrize(("name", "dtype"), sampled(ROTATIONS, [torch.float32, torch.bfloat16]), ids=str)
def test_the_rotation_of_every_layer_is_found(name, dtype):
    seen = probe(tiny_models.model(name, dtype))
    found = [r and (2 * r.inv_freq.numel(), r.interleaved, r.offset) for r in seen.rotations]
    assert seen.refusal is None
    assert found == ROTATIONS[name]


def test_two_frequency_sets_are_distinguished_and_shared():
    sliding, full, *rest = probe(tiny_models.model("gemma3")).rotations
    assert rest == [sliding, full]
    assert not torch.equal(sliding.inv_freq, full.inv_freq)


@pytest.mark.parametrize(("name", "reason"), NO_STREAMING.items())
def test_models_whose_keys_cannot_be_moved_are_refused_streaming(name, reason):
    seen = probe(tiny_models.model(name))
    assert reason in seen.refusal
    assert seen.rotations == ()
    assert len(seen.specs) == 4


def test_probing_does_not_change_the_frequencies():
    model = tiny_models.model("llama-dynamic")
    before = model.model.rotary_emb.inv_freq.clone()
    probe(model)
    assert torch.equal(model.model.rotary_emb.inv_freq, before)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("llama", (4, 2, 16, 16)),
        ("llama-mha", (4, 4, 16, 16)),
        ("qwen3", (4, 2, 32, 32)),
        ("deepseek_v3", (4, 4, 24, 16)),
    ],
)
def test_shapes_are_observed(name, shape):
    seen = probe(tiny_models.model(name))
    assert (seen.q_heads, seen.kv_heads, seen.d_k, seen.d_v) == shape


@pytest.mark.parametrize(
    ("name", "windows"),
    [("llama", [None] * 4), ("mistral", [8] * 4), ("gemma2", [8, None] * 2), ("cohere2", [8, 8, 8, None])],
)
def test_windows_are_observed(name, windows):
    assert [spec.window for spec in probe(tiny_models.model(name)).specs] == windows


def test_softcap_scaling_and_sinks_are_observed():
    assert {spec.softcap for spec in probe(tiny_models.model("gemma2")).specs} == {2.0}
    assert {spec.scaling for spec in probe(tiny_models.model("granite")).specs} == {0.07}
    assert [spec.sinks.shape for spec in probe(tiny_models.model("gpt_oss")).specs] == [(4,)] * 4


@pytest.mark.parametrize("name", ["llama-dynamic", "llama-longrope"])
def test_pinned_frequencies_no_longer_follow_the_length(name):
    model = tiny_models.fresh(name)
    assert pin_frequencies(model)
    assert probe(model).refusal is None
    assert selftest(model) < 2e-6


def test_constant_frequencies_are_not_pinned():
    assert not pin_frequencies(tiny_models.model("llama-yarn"))


def test_moved_keys_match_the_models_own():
    """Streaming relies on this: a token's stored key, moved, is the key that the model computes at the new position."""
    for name in ROTATIONS:
        near, far = Keys(), Keys()
        for manager, position in ((near, 9), (far, 409)):
            attention_hook.forward(
                tiny_models.model(name), torch.tensor([50]), torch.tensor([position]), manager, logits=False
            )
        for layer, rotation in enumerate(probe(tiny_models.model(name)).rotations):
            moved = rotate(near[layer], rotation, *cos_sin(rotation, 400)) if rotation else near[layer]
            error = (moved - far[layer]).abs().max() / far[layer].abs().max()
            assert error < 3e-5, (name, layer, error)


class Keys(dict):
    """Records each layer's keys; one token attends to itself."""

    def attention(self, layer, query, key, value, spec):
        self[layer] = key
        return value.repeat_interleave(query.shape[0] // key.shape[0], 0)


# ---- Values of meta tensors, which some code asks for; other tensors are not changed


def test_meta_tensors_have_no_nonzero_elements():
    with UnknownValues():
        found = torch.ones(3, 2, device="meta").nonzero()
    assert (found.shape, found.is_meta) == ((0, 2), True)


def test_the_first_part_of_unknown_size_is_everything():
    with UnknownValues():
        sizes = torch.ones(3, device="meta").tolist()
        parts = torch.ones(4, 5, device="meta").split(sizes, dim=0)
    assert [part.shape for part in parts] == [(4, 5), (0, 5), (0, 5)]


def test_values_of_other_tensors_do_not_change():
    with UnknownValues():
        assert torch.tensor([0, 3]).nonzero().tolist() == [[1]]
        assert [len(part) for part in torch.ones(4).split([1, 3])] == [1, 3]
