"""Prefill in chunks: chunks that do not fit are halved, and a GPU takes no more memory than planned."""

import pytest
import torch
from support.integrity import check_integrity
from support.tiny_runner import load_tiny, prefill_logits, runner_of

from kvchat.bench.external.baselines import as_written
from kvchat.engine import runner
from kvchat.engine.runner import WithoutAttention, prefill_bytes_per_token
from kvchat.errors import DoesNotFitError
from kvchat.kv import prefill
from kvchat.kv.memory import available
from kvchat.models import attention_hook
from kvchat.models.load import load_model
from kvchat.protocol.messages import Load


def ids_of(n: int) -> list[int]:
    return [3 + i * 7 % 150 for i in range(n)]


def limit_forwards(one, most: int, monkeypatch, from_layer: int = 0) -> list[int]:
    """Make forwards of more than ``most`` tokens run out of memory in layer ``from_layer``; return the sizes tried."""
    attention, tried = one.kv.attention, []

    def limited(layer, query, *args):
        if layer == 0:
            tried.append(query.shape[1])
        if layer >= from_layer and query.shape[1] > most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
        return attention(layer, query, *args)

    monkeypatch.setattr(one.kv, "attention", limited)
    return tried


@pytest.mark.parametrize("mode", ["full", "speculative"])
@pytest.mark.parametrize("from_layer", [0, 3])
def test_chunk_that_runs_out_of_memory_is_halved_until_it_fits(mode, from_layer, monkeypatch):
    model, ids = load_tiny("llama"), ids_of(200)
    params = {"budget": 96, "sink": 8, "window": 32} if mode == "speculative" else {}
    one, undisturbed = runner_of(model, mode, **params), runner_of(model, mode, **params)
    one.least = 16
    tried = limit_forwards(one, 60, monkeypatch, from_layer)
    torch.testing.assert_close(prefill_logits(one, ids), prefill_logits(undisturbed, ids), atol=2e-5, rtol=0)
    assert tried == [200, 100, 50, 50, 50, 50]
    check_integrity(one.kv.state)
    for token in (5, 6, 7):
        torch.testing.assert_close(one.step(token), undisturbed.step(token), atol=2e-5, rtol=0)


def test_prefill_fails_at_the_smallest_chunk_and_loses_nothing(monkeypatch):
    model, ids = load_tiny("llama"), ids_of(200)
    one, undisturbed = runner_of(model), runner_of(model)
    for each in (one, undisturbed):
        prefill_logits(each, ids[:70])
    one.least = 20
    with monkeypatch.context() as patch:
        tried = limit_forwards(one, 10, patch)
        with pytest.raises(DoesNotFitError, match="reading the prompt"):
            prefill_logits(one, ids[70:])
    assert tried == [130, 65, 32, 20]
    assert one.kv.total == 70
    torch.testing.assert_close(prefill_logits(one, ids[70:]), prefill_logits(undisturbed, ids[70:]), atol=2e-5, rtol=0)


def test_planned_chunks_are_checked_before_the_forward(monkeypatch):
    model, ids = load_tiny("llama"), ids_of(100)
    one = runner_of(model)
    one.chunk = None
    monkeypatch.setattr(runner, "prefill_bytes_per_token", lambda model: 1000)
    monkeypatch.setattr(available, "free_bytes", lambda device: 10 * 2**30)
    tried = limit_forwards(one, 10**6, monkeypatch)
    prefill_logits(one, ids)
    assert tried == [100]
    monkeypatch.setattr(available, "free_bytes", lambda device: 0)
    with pytest.raises(DoesNotFitError, match=r"100 tokens after 100"):
        prefill_logits(one, ids)
    assert tried == [100]
    assert one.kv.total == 100


# ---- on a GPU


@pytest.fixture(scope="module")
def on_gpu():
    return load_model(Load("bundled", "cuda"), lambda stage: None)


@pytest.mark.cuda
@pytest.mark.parametrize("chunk", [512, 1024, None])
def test_gpu_memory_of_prefill_stays_within_the_plan(on_gpu, chunk):
    one, ids = runner_of(on_gpu), ids_of(min(3000, on_gpu.context - 8))
    token_bytes = prefill_bytes_per_token(on_gpu)
    prefill_logits(one, ids[:600])  # one-time allocations
    one.chunk = size = chunk or len(ids)
    new = len(ids) - 600
    last = min(size, new)
    planned = prefill.prefill_bytes(one.kv.state.geometry, len(ids) - last, last, token_bytes)
    pieces, peaks = one.prefill(ids[600:]), []
    for _ in range(-(-new // size)):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        next(pieces)
        peaks.append(torch.cuda.max_memory_allocated() - before)
    pieces.close()
    assert max(peaks) <= planned


@pytest.mark.cuda
@pytest.mark.parametrize("chunk", [100, 512, 4096])
def test_prefill_on_a_gpu_matches_the_models_own_logits(on_gpu, chunk):
    """Within twice the difference between the model's own two attention implementations."""
    ids = ids_of(min(3000, on_gpu.context - 8))
    own = {}
    with as_written(on_gpu.model):
        for name in ("sdpa", "eager"):
            on_gpu.model.set_attn_implementation(name)
            tokens = torch.tensor([ids], device="cuda")
            own[name] = on_gpu.model(tokens, use_cache=False, logits_to_keep=1).logits[0, -1].float()
    one = runner_of(on_gpu)
    one.chunk = chunk
    logits = prefill_logits(one, ids)
    noise = float((own["sdpa"] - own["eager"]).norm())
    assert float((logits - own["sdpa"]).norm()) <= 2 * noise + 1e-3 * float(own["sdpa"].norm())


# ---- The forward that measures a prefill's memory


def test_measuring_forward_runs_every_layer_and_stores_nothing():
    model, seen = load_tiny("deepseek_v3"), []

    class Recording(WithoutAttention):
        def attention(self, layer, query, key, value, spec):
            seen.append((layer, super().attention(layer, query, key, value, spec).shape == (4, 12, value.shape[-1])))
            return super().attention(layer, query, key, value, spec)

    ids = torch.arange(12)
    assert attention_hook.forward(model.model, ids, ids, Recording(), logits=False) is None
    assert seen == [(layer, True) for layer in range(4)]
