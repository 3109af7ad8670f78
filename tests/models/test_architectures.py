"""Architectures that kvchat runs or refuses, and the rotation of their keys: one row each."""

import functools
import itertools

import pytest
import torch
from support import tiny_models
from support.grids import WHOLE, sampled
from support.tiny_runner import load_tiny, mode_of, prefill_logits, runner_of, token_ids
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from kvchat.engine.runner import ModelRunner
from kvchat.errors import ModelError
from kvchat.models import attention_hook
from kvchat.models.attention_hook import DenseManager
from kvchat.models.probe import pin_frequencies, reads_chunks, selftest
from kvchat.models.recurrent import EVERY, SNAPSHOTS, TAIL, RecurrentState
from kvchat.models.support import refusal

RIGHT = [
    *("llama", "llama-mha", "llama-head32", "llama-linear", "llama-yarn", "llama-llama3", "qwen2", "qwen2-window"),
    *("qwen3", "qwen3_moe", "mistral", "mixtral", "phi", "phi3", "gemma", "gemma2", "gemma3", "gemma3n", "gpt_neox"),
    *("olmo2", "olmo3", "granite", "gpt_oss", "cohere", "cohere2", "glm", "glm4", "smollm3", "stablelm", "starcoder2"),
    *("nemotron", "ministral3", "hunyuan_v1", "ernie4_5", "apertus", "seed_oss", "nanochat", "gpt2", "opt"),
    *("deepseek_v3", "exaone4", "granitemoeshared", "dbrx", "jetmoe"),
]

REFUSED = {
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


@pytest.mark.parametrize(
    ("name", "dtype"),
    sampled(["llama", "gemma2", "gpt_oss", "deepseek_v3"], [torch.bfloat16, torch.float16]),
    ids=str,
)
def test_half_precision_stays_within_its_tolerance(name, dtype):
    assert selftest(tiny_models.model(name, dtype)) < 0.03


@pytest.mark.parametrize("name", [*RIGHT, *tiny_models.HYBRID])
def test_supported_configurations_are_not_refused(name):
    config = tiny_models.config(name)
    assert refusal(config, MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]) is None


@pytest.mark.parametrize(("name", "reason"), REFUSED.items())
def test_unsupported_configurations_are_refused(name, reason):
    config = tiny_models.config(name)
    assert reason in refusal(config, MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None))


@pytest.mark.parametrize("name", ["llama4", "jamba"])
def test_the_selftest_catches_what_the_config_does_not_show(name):
    with pytest.raises(ModelError, match=r"differ"):
        selftest(tiny_models.model(name))


@pytest.mark.parametrize("name", tiny_models.HYBRID)
def test_hybrids_with_their_recurrent_state_equal_eager(name):
    assert selftest(tiny_models.model(name), chunked=reads_chunks(tiny_models.model(name))) < 5e-6


@pytest.mark.parametrize(("name", "reason"), [("recurrent_gemma", "not in a cache"), ("minimax", "cache of its own")])
def test_a_state_that_cannot_be_copied_is_refused(name, reason):
    with pytest.raises(ModelError, match=reason):
        reads_chunks(tiny_models.model(name))


def test_chunks_across_the_longrope_switch_equal_one_prefill():
    ids, manager, model = torch.arange(100), DenseManager(), tiny_models.fresh("llama-longrope")
    whole = attention_hook.forward(model, ids, ids, DenseManager(), logits=True)
    pin_frequencies(model)
    for chunk in ids.split(50):
        last = attention_hook.forward(model, chunk, chunk, manager, logits=True)
    torch.testing.assert_close(last, whole, atol=1e-4, rtol=1e-5)


# ---- Hybrid models: K/V in the KV manager, recurrent state in transformers, and exact rewinding


PROMPT, NEW = token_ids(150), 14
MODES = {
    "full": {},
    "streaming": {"budget": 256},
    "freeze": {"recovery": False, "K": 250},
    "sync": {"budget": 512},
    "speculative": {"budget": 512},
}


@functools.cache
def model_of(name: str):
    return load_tiny(name)


@functools.cache
def generated(name: str, extra: int = 0) -> list[int]:
    """transformers' own greedy tokens, with its own attention and caches."""
    model = tiny_models.fresh(name)
    model.set_attn_implementation("eager")
    ids = torch.tensor([PROMPT + token_ids(extra, seed=1)])
    output = model.generate(ids, max_new_tokens=NEW, do_sample=False, eos_token_id=None)
    return output[0, ids.shape[1] :].tolist()


def runner_of_mode(name: str, mode: str) -> ModelRunner:
    model = model_of(name)
    runner = ModelRunner(model, mode_of(model, mode, MODES[mode]))
    runner.chunk = 64
    return runner


def greedy(runner: ModelRunner, logits: torch.Tensor, n: int = NEW) -> list[int]:
    tokens = []
    for _ in range(n):
        tokens.append(int(logits.argmax()))
        logits = runner.step(tokens[-1])
    return tokens


@pytest.mark.parametrize(("name", "mode"), sampled(tiny_models.HYBRID if WHOLE else tiny_models.STATES, [*MODES]))
def test_rewound_hybrids_give_the_same_answers(name, mode):
    """Regenerating, continuing a stopped answer, an edited question, and a question after a truncation."""
    runner = runner_of_mode(name, mode)
    assert greedy(runner, prefill_logits(runner, PROMPT)) == generated(name)
    runner.truncate(len(PROMPT) - 1)
    answer = greedy(runner, prefill_logits(runner, PROMPT[-1:]))
    assert answer == generated(name)
    runner.truncate(len(PROMPT) + 5)
    assert greedy(runner, runner.step(answer[5]), NEW - 6) == answer[6:]
    runner.truncate(70)
    assert greedy(runner, prefill_logits(runner, PROMPT[70:])) == generated(name)
    runner.truncate(len(PROMPT))
    assert greedy(runner, prefill_logits(runner, token_ids(20, seed=1))) == generated(name, 20)


@pytest.mark.parametrize("name", ["qwen3_5", "jamba", "falcon_h1", "lfm2"])
def test_a_failed_step_leaves_no_trace(name, monkeypatch):
    runner = runner_of(model_of(name))
    logits = prefill_logits(runner, PROMPT)
    begun = greedy(runner, logits, 5)
    last = model_of(name).model.get_decoder().layers[-1]
    with monkeypatch.context() as patch:
        patch.setattr(type(last), "forward", failing)
        with pytest.raises(ArithmeticError):
            runner.step(7)
        with pytest.raises(ArithmeticError):
            list(runner.prefill([7, 8, 9]))
    assert runner.kv.total == len(PROMPT) + 5
    runner.truncate(runner.kv.total - 1)
    assert begun + greedy(runner, runner.step(begun[-1]), NEW - 5) == generated(name)


def failing(*args, **kwargs):
    raise ArithmeticError("as memory that runs out would")


def test_recomputing_the_state_changes_no_stored_kv():
    runner = runner_of(model_of("qwen3_next"))
    greedy(runner, prefill_logits(runner, PROMPT))
    kept = len(PROMPT) + 9
    before = [runner.kv.state.host.dense(layer, kept) for layer in range(2)]
    runner.truncate(kept)
    assert len(runner.recurrent.unread) == 9
    runner.step(5)
    for layer, pair in enumerate(before):
        for old, new in zip(pair, runner.kv.state.host.dense(layer, kept), strict=True):
            assert torch.equal(old, new)


def test_only_attention_layers_have_kv():
    model = model_of("nemotron_h")
    assert (model.layers, model.model.config.num_hidden_layers) == (2, 4)
    assert runner_of(model).kv.state.geometry.layers == 2


def test_jamba_reads_the_tail_token_by_token():
    assert [name for name in tiny_models.HYBRID if not model_of(name).reads_chunks] == ["jamba"]
    runner = runner_of(model_of("jamba"))
    assert [len(chunk) for chunk, _ in runner.prefill(PROMPT)] == [len(PROMPT) - TAIL, *[1] * TAIL]


def test_snapshots_thin_out_and_the_nearest_is_restored():
    runner = runner_of(model_of("qwen3_5"))
    ids = token_ids(470)
    runner.chunk = 30
    for start in range(0, 470, 47):
        prefill_logits(runner, ids[start : start + 47])
    state = runner.recurrent
    kept = [snapshot.tokens for snapshot in state._snapshots]
    assert len(kept) == SNAPSHOTS
    assert kept[-1] == 470
    assert max(b - a for a, b in itertools.pairwise(kept)) <= 200
    assert state.snapshot_bytes == SNAPSHOTS * state.nbytes > 0
    runner.truncate(kept[3] + 1)
    assert len(state.unread) == 1


def test_snapshots_are_taken_during_a_long_answer():
    runner = runner_of(model_of("lfm2"))
    prefill_logits(runner, PROMPT[:20])
    for token in token_ids(EVERY + 5):
        runner.step(token)
    runner.truncate(runner.kv.total - 3)
    assert len(runner.recurrent.unread) == 2


def test_a_model_without_recurrent_layers_has_no_state():
    state = RecurrentState(tiny_models.config("llama"))
    state.commit([1, 2, 3])
    state.keep()
    state.truncate(1)
    assert (state.exists, state.nbytes, state.snapshot_bytes, state.unread) == (False, 0, 0, [])
    assert state.chunk(100, 64) == 64
