"""What kvchat runs, what it refuses, and what it knows about the rotation of keys: one row per architecture."""

from __future__ import annotations

import pytest
import torch
from support import tiny_models
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from kvchat.errors import ModelError
from kvchat.models import attention_hook
from kvchat.models.attention_hook import DenseManager
from kvchat.models.probe import pin_frequencies, reads_chunks, selftest
from kvchat.models.support import refusal

RIGHT = [
    *("llama", "llama-mha", "llama-head32", "llama-linear", "llama-yarn", "llama-llama3", "qwen2", "qwen2-window"),
    *("qwen3", "qwen3_moe", "mistral", "mixtral", "phi", "phi3", "gemma", "gemma2", "gemma3", "gemma3n", "gpt_neox"),
    *("olmo2", "olmo3", "granite", "gpt_oss", "cohere", "cohere2", "glm", "glm4", "smollm3", "stablelm", "starcoder2"),
    *("nemotron", "ministral3", "hunyuan_v1", "ernie4_5", "apertus", "seed_oss", "nanochat", "gpt2", "opt"),
    *("deepseek_v3", "exaone4", "granitemoeshared", "dbrx", "jetmoe"),
]

REFUSED = {
    "gptj": "does not let its attention be replaced",
    "falcon": "does not let its attention be replaced",
    "bloom": "does not let its attention be replaced",
    "mpt": "does not let its attention be replaced",
    "t5": "encoder-decoder",
    "bart": "encoder-decoder",
    "mamba2": "None of its layers attends",
    "llama4": "kind chunked_attention",
    "deepseek_v32": "kind indexed_attention",
    "blt": "how many layers it has",
    "recurrent_gemma": "state in its layers",
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
    with pytest.raises(ModelError, match=r"differ"):
        selftest(tiny_models.model(name))


@pytest.mark.parametrize("name", tiny_models.HYBRID)
def test_hybrids_with_their_state_equal_eager(name):
    assert selftest(tiny_models.model(name), chunked=reads_chunks(tiny_models.model(name))) < 5e-6


@pytest.mark.parametrize(("name", "reason"), [("recurrent_gemma", "not in a cache"), ("minimax", "cache of its own")])
def test_a_state_that_cannot_be_copied_is_refused(name, reason):
    with pytest.raises(ModelError, match=reason):
        reads_chunks(tiny_models.model(name))


def test_chunks_across_longropes_switch_equal_one_long_prefill():
    ids, manager, model = torch.arange(100), DenseManager(), tiny_models.fresh("llama-longrope")
    whole = attention_hook.forward(model, ids, ids, DenseManager(), logits=True)
    pin_frequencies(model)
    for chunk in ids.split(50):
        last = attention_hook.forward(model, chunk, chunk, manager, logits=True)
    torch.testing.assert_close(last, whole, atol=1e-4, rtol=1e-5)
