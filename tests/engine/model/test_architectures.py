"""What kvchat runs, what it refuses, and what it knows about the rotation of keys: one row per architecture."""

from __future__ import annotations

import pytest
import torch
from support import tiny_models
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from kvchat.engine.model import attention_hook
from kvchat.engine.model.dense_attention import DenseManager
from kvchat.engine.model.probe import pin_frequencies, probe
from kvchat.engine.model.self_test import reads_chunks, selftest
from kvchat.engine.model.supported import refusal
from kvchat.errors import ModelError
from kvchat.kv.rope import cos_sin, rotate

RIGHT = [
    *("llama", "llama-mha", "llama-head32", "llama-linear", "llama-yarn", "llama-llama3", "qwen2", "qwen2-window"),
    *("qwen3", "qwen3_moe", "mistral", "mixtral", "phi", "phi3", "gemma", "gemma2", "gemma3", "gemma3n", "gpt_neox"),
    *("olmo2", "olmo3", "granite", "gpt_oss", "cohere", "cohere2", "glm", "glm4", "smollm3", "stablelm", "starcoder2"),
    *("nemotron", "ministral3", "hunyuan_v1", "ernie4_5", "apertus", "seed_oss", "nanochat", "gpt2", "opt"),
    *("deepseek_v3", "exaone4"),
]

REFUSED = {
    "gptj": "does not let its attention be replaced",
    "falcon": "does not let its attention be replaced",
    "bloom": "does not let its attention be replaced",
    "mpt": "does not let its attention be replaced",
    "t5": "encoder-decoder",
    "bart": "encoder-decoder",
    "mamba2": "No layer of it attends",
    "llama4": "kind chunked_attention",
}

# (turning dimensions, interleaved, offset) of each layer's keys; None: the layer has no positions
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


@pytest.mark.parametrize("name", RIGHT)
def test_chunked_prefill_decode_and_second_turn_equal_eager(name):
    assert selftest(tiny_models.model(name)) < 2e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "deepseek_v3"])
def test_half_precision_stays_within_its_tolerance(name, dtype):
    assert selftest(tiny_models.model(name, dtype)) < 0.03


@pytest.mark.parametrize("name", [*RIGHT, *tiny_models.HYBRID])
def test_nothing_in_the_configuration_speaks_against_what_runs(name):
    config = tiny_models.config(name)
    assert refusal(config, MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]) is None


@pytest.mark.parametrize(("name", "reason"), REFUSED.items())
def test_refused_before_a_weight_is_read(name, reason):
    config = tiny_models.config(name)
    assert reason in refusal(config, MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None))


@pytest.mark.parametrize("name", ["llama4", "jamba"])
def test_the_selftest_catches_what_the_configuration_would_not_tell(name):
    with pytest.raises(ModelError, match=r"differ from transformers' own by"):
        selftest(tiny_models.model(name))


@pytest.mark.parametrize("name", tiny_models.HYBRID)
def test_hybrids_with_their_state_equal_eager(name):
    assert selftest(tiny_models.model(name), chunked=reads_chunks(tiny_models.model(name))) < 5e-6


@pytest.mark.parametrize(("name", "reason"), [("recurrent_gemma", "not in a cache"), ("minimax", "cache of its own")])
def test_a_state_that_cannot_be_copied_is_refused(name, reason):
    with pytest.raises(ModelError, match=reason):
        reads_chunks(tiny_models.model(name))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("name", "expected"), ROTATIONS.items())
def test_rotation_of_every_layer(name, expected, dtype):
    seen = probe(tiny_models.model(name, dtype))
    found = [r and (2 * r.inv_freq.numel(), r.interleaved, r.offset) for r in seen.rotations]
    assert seen.refusal is None
    assert found == expected


def test_two_frequency_sets_are_told_apart_and_shared():
    sliding, full, *rest = probe(tiny_models.model("gemma3")).rotations
    assert rest == [sliding, full]
    assert not torch.equal(sliding.inv_freq, full.inv_freq)


@pytest.mark.parametrize(("name", "reason"), NO_STREAMING.items())
def test_keys_that_cannot_be_moved(name, reason):
    seen = probe(tiny_models.model(name))
    assert reason in seen.refusal
    assert seen.rotations == ()
    assert len(seen.specs) == 4


def test_probing_leaves_the_short_frequencies_in_place():
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


def test_other_specs_are_observed():
    assert {spec.softcap for spec in probe(tiny_models.model("gemma2")).specs} == {2.0}
    assert {spec.scaling for spec in probe(tiny_models.model("granite")).specs} == {0.07}
    assert [spec.sinks.shape for spec in probe(tiny_models.model("gpt_oss")).specs] == [(4,)] * 4


@pytest.mark.parametrize("name", ["llama-dynamic", "llama-longrope"])
def test_pinned_frequencies_no_longer_follow_the_length(name):
    model = tiny_models.fresh(name)
    assert pin_frequencies(model)
    assert probe(model).refusal is None
    assert selftest(model) < 2e-6


def test_nothing_is_pinned_where_frequencies_stay():
    assert not pin_frequencies(tiny_models.model("llama-yarn"))


def test_chunks_across_longropes_switch_equal_one_long_prefill():
    ids, manager, model = torch.arange(100), DenseManager(), tiny_models.fresh("llama-longrope")
    whole = attention_hook.forward(model, ids, ids, DenseManager(), logits=True)
    pin_frequencies(model)
    for chunk in ids.split(50):
        last = attention_hook.forward(model, chunk, chunk, manager, logits=True)
    torch.testing.assert_close(last, whole, atol=1e-4, rtol=1e-5)


def test_moved_keys_are_the_models_own():
    """What streaming relies on: the stored key of a token, moved, is the key the model makes at the new position."""
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
    """Notes each layer's keys; one token attends to itself."""

    def attention(self, layer, query, key, value, spec):
        self[layer] = key
        return value.repeat_interleave(query.shape[0] // key.shape[0], 0)
