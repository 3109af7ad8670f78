import math
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support import tiny_models
from support.patience import PATIENCE_S
from torch import nn

from kvchat.errors import EngineError, ModelError
from kvchat.kv.attention import AttentionSpec
from kvchat.models import attention_hook
from kvchat.models.attention_hook import DenseManager, attend, weights


class Recorder:
    """Records the hook's arguments and returns a different number for each head, token and dimension."""

    def __init__(self):
        self.calls = []

    def attention(self, layer, query, key, value, spec):
        self.calls.append((layer, query, key, value, spec))
        heads, n, d_v = query.shape[0], query.shape[1], value.shape[2]
        return torch.arange(heads * n * d_v, dtype=query.dtype).view(heads, n, d_v)


class Layer(nn.Module):
    def __init__(self, layer_idx=0):
        super().__init__()
        self.layer_idx = layer_idx


def call(module, backend=None, mask=None, **kwargs):
    query, key, value = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 3, 8), torch.randn(1, 2, 3, 6)
    with attention_hook.bound(backend or Recorder()):
        return attention_hook.attention(module, query, key, value, mask, **{"scaling": 0.5, "dropout": 0.0, **kwargs})


def ids(n):
    return torch.arange(3, 3 + n)


def test_shapes_of_inputs_and_output():
    recorder = Recorder()
    output, weights = call(Layer(7), recorder)
    layer, query, key, value, _ = recorder.calls[0]
    assert (layer, query.shape, key.shape, value.shape) == (7, (4, 3, 8), (2, 3, 8), (2, 3, 6))
    assert output.shape == (1, 3, 4, 6)
    assert output.is_contiguous()
    assert output[0, 1, 2, 3] == 2 * 3 * 6 + 1 * 6 + 3
    assert weights is None


def test_specs_hold_the_arguments_of_the_call():
    recorder, sinks = Recorder(), torch.randn(4)
    call(Layer(), recorder, scaling=0.25, sliding_window=8, softcap=50.0, s_aux=sinks)
    spec = recorder.calls[0][-1]
    assert (spec.scaling, spec.window, spec.softcap) == (0.25, 8, 50.0)
    assert spec.sinks is sinks


def test_specs_are_built_once_per_layer():
    recorder, first, second = Recorder(), Layer(0), Layer(1)
    for module in (first, second, first):
        call(module, recorder)
    one, other, again = (spec for *_, spec in recorder.calls)
    assert one is again
    assert one is not other


def test_missing_scaling_becomes_the_usual_value():
    recorder = Recorder()
    call(Layer(), recorder, scaling=None)
    assert recorder.calls[0][-1].scaling == 8**-0.5


@pytest.mark.parametrize(
    ("kwargs", "reason"),
    [
        ({"head_mask": 1}, "passes head_mask, which kvchat does not know"),
        ({"b": 1, "a": 2}, "passes a, b, which"),
        ({"mask": torch.zeros(1)}, "its own mask"),
        ({"dropout": 0.1}, "training mode"),
    ],
)
def test_unsupported_arguments_are_refused(kwargs, reason):
    with pytest.raises(ModelError, match=f"Layer .*{reason}"):
        call(Layer(), **kwargs)


def test_unsupported_arguments_of_later_calls_are_refused():
    module = Layer()
    call(module, indices=None)
    with pytest.raises(ModelError, match="indices"):
        call(module, indices=torch.arange(3))


def test_non_causal_attention_is_refused():
    module = Layer()
    module.is_causal = False
    with pytest.raises(ModelError, match="later tokens"):
        call(module)


@pytest.mark.parametrize("layer", [None, -1])  # as in Zamba and in Zamba2
def test_modules_without_a_layer_index_are_refused(layer):
    with pytest.raises(ModelError, match="Layer"):
        call(Layer(layer))


def test_attention_without_a_backend_is_an_error():
    with pytest.raises(EngineError, match="without a KV manager"):
        attention_hook.attention(Layer(), *[torch.zeros(1, 1, 1, 8)] * 3, None)


def test_backends_nest_and_are_restored():
    outer, inner = Recorder(), Recorder()
    with attention_hook.bound(outer):
        call(Layer(), inner)
        attention_hook.attention(Layer(), *[torch.zeros(1, 1, 1, 8)] * 3, None)
    assert (len(outer.calls), len(inner.calls)) == (1, 1)
    with pytest.raises(ValueError, match="inside"), attention_hook.bound(outer):
        raise ValueError("inside")
    with pytest.raises(EngineError):
        attention_hook.attention(Layer(), *[torch.zeros(1, 1, 1, 8)] * 3, None)


def test_models_in_two_threads_do_not_interfere():
    backends = {name: DenseManager() for name in ("llama", "qwen3")}
    alone = {
        name: attention_hook.forward(tiny_models.model(name), ids(9), torch.arange(9), DenseManager(), logits=True)
        for name in backends
    }
    barrier = threading.Barrier(2)

    def run(name):
        for position in torch.arange(9).split(1):
            barrier.wait(timeout=PATIENCE_S)
            model = tiny_models.model(name)
            logits = attention_hook.forward(model, ids(9)[position], position, backends[name], logits=True)
        return logits

    with ThreadPoolExecutor(2) as pool:
        for logits, together in zip(alone.values(), pool.map(run, backends), strict=True):
            torch.testing.assert_close(together, logits, atol=2e-4, rtol=2e-5)


def test_logits_of_the_last_token_are_float32():
    model = tiny_models.model("llama", torch.bfloat16)
    logits = attention_hook.forward(model, ids(5), torch.arange(5), DenseManager(), logits=True)
    assert (logits.shape, logits.dtype) == ((tiny_models.VOCAB,), torch.float32)


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt", "gpt_neox", "gemma3"])
def test_without_logits_the_hook_gets_the_same_keys(name):
    model, with_head, without = tiny_models.model(name), Recorder(), Recorder()
    assert attention_hook.forward(model, ids(4), torch.arange(4), with_head, logits=True) is not None
    assert attention_hook.forward(model, ids(4), torch.arange(4), without, logits=False) is None
    assert len(with_head.calls) == len(without.calls) == 4
    for one, other in zip(with_head.calls, without.calls, strict=True):
        assert torch.equal(one[2], other[2])


# ---- The reference attention, with which everything else is compared, against loops over single numbers


SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])
SPECS = [
    AttentionSpec(0.5),
    AttentionSpec(0.3, window=3),
    AttentionSpec(0.5, softcap=1.5),
    AttentionSpec(0.5, sinks=SINKS),
    AttentionSpec(0.7, window=2, softcap=2.0, sinks=SINKS),
]


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def by_hand(query, key, spec):
    """One exponential at a time."""
    (heads, n, _), total = query.shape, key.shape[1]
    result = torch.zeros(heads, n, total)
    for head in range(heads):
        for row in range(n):
            at, terms = total - n + row, {}
            for position in range(total):
                if position > at or (spec.window is not None and position <= at - spec.window):
                    continue
                score = float(query[head, row] @ key[head * len(key) // heads, position]) * spec.scaling
                score = score if spec.softcap is None else spec.softcap * math.tanh(score / spec.softcap)
                terms[position] = math.exp(score)
            sink = 0.0 if spec.sinks is None else math.exp(float(spec.sinks[head]))
            for position, term in terms.items():
                result[head, row, position] = term / (sum(terms.values()) + sink)
    return result


@pytest.mark.parametrize("n", [1, 4, 7])
@pytest.mark.parametrize("spec", SPECS, ids=["plain", "window", "softcap", "sinks", "all"])
def test_weights_match_plain_loops(spec, n):
    query, key = random(4, n, 8), random(2, 7, 8)
    torch.testing.assert_close(weights(query, key, spec), by_hand(query, key, spec), atol=1e-6, rtol=1e-5)


def test_attention_is_the_weighted_mean_of_the_groups_values():
    query, key, value = random(4, 3, 8), random(2, 5, 8), random(2, 5, 6)
    attended, shares = attend(query.bfloat16(), key.bfloat16(), value.bfloat16(), SPECS[0])
    assert (attended.shape, attended.dtype, shares.dtype) == ((4, 3, 6), torch.bfloat16, torch.float32)
    for head in range(4):
        expected = shares[head] @ value[head // 2].bfloat16().float()
        torch.testing.assert_close(attended[head].float(), expected, atol=1e-2, rtol=1e-2)
