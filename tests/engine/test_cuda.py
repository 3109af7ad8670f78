"""On a GPU: graphs and the side stream change no bit in any mode, however late a recall arrives.

They also run on the fake CUDA device (tests/support/fake_cuda) in fewer steps and layers. ``test_graphs.py``
makes the same comparisons on the CPU, with a tape for a graph and without streams.
"""

import itertools
import os
import random
from contextlib import nullcontext
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from support.dense_attention import softmax
from support.integrity import check_integrity
from support.reference import coded
from support.tiny_models import CONTEXT
from support.tiny_runner import PARAMS, check_same_steps, load_tiny, mode_of, prefill_logits, token_ids

from kvchat.config.modes import FullParameters
from kvchat.engine.runner import GraphRunner, ModelRunner, geometry_of, traits_of
from kvchat.kv import inspect, transfer
from kvchat.kv.inspect import attended
from kvchat.kv.memory import rates
from kvchat.kv.modes import build, full
from kvchat.kv.ops import host_attention
from kvchat.kv.transfer import SideStream
from kvchat.models import attention_hook
from kvchat.models.load import LoadedModel
from kvchat.models.probe import relative_error

pytestmark = pytest.mark.cuda

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Models that transformers' two attentions compute alike.
PEERS = ["llama", "qwen2-window"]


def later_ids(steps: int, seed: int = 1) -> list[int]:
    """Return tokens to decode: fewer in Triton's interpreter."""
    return token_ids(max(2, steps // 100) if INTERPRETED else steps, seed=seed)


loaded = cache(load_tiny)  # for tests that do not change the model


def llama(dtype: torch.dtype) -> LoadedModel:
    """Return the model to decode with; in Triton's interpreter one layer that may read everything and one after it."""
    return loaded("llama", "cuda", dtype, **({"num_hidden_layers": 2} if INTERPRETED else {}))


def eager(runner: ModelRunner) -> ModelRunner:
    """Make a runner launch every step operation by operation, on one stream."""
    runner.graphs = GraphRunner(runner.kv, None)
    runner.kv.state.transfer.side_streams = (SideStream(torch.device("cpu")),) * 2
    return runner


def pair(
    model: LoadedModel, row: str, params: dict | None = None, tokens: int = 150
) -> tuple[ModelRunner, ModelRunner]:
    """Two runners after the same prompt; the second launches every step operation by operation."""
    one, other = (ModelRunner(model, mode_of(model, row, params)) for _ in range(2))
    for each in (one, eager(other)):
        prefill_logits(each, token_ids(tokens))
    return one, other


def delay_recalls(runner: ModelRunner) -> ModelRunner:
    """Delay every recall by up to a few milliseconds."""
    ops, dice = runner.kv.state.ops, random.Random(0)
    for name in ("move_pages", "move_tokens", "choose", "choose_tokens"):
        setattr(ops, name, delayed(getattr(ops, name), dice))
    return runner


def delayed(operation, dice: random.Random):
    def slow(*args, **kwargs):
        torch.cuda._sleep(dice.randrange(5_000_000))
        return operation(*args, **kwargs)

    return slow


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("row", [*PARAMS, "quest", "raas", "h2o"])  # one comparison mode of each kind
def test_graphs_and_streams_change_no_bit(row, dtype):
    one, other = pair(llama(dtype), row)
    check_same_steps(one, other, later_ids(300))
    assert one.kv.state.ops.name == ("torch" if dtype is torch.float32 else "triton")
    assert not one.graphs.refusal
    assert not one.graphs.prepares


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["qwen3_5", "falcon_h1", "lfm2", "granite_hybrid"])
def test_graphs_change_no_bit_in_hybrid_models(name, dtype):
    one, other = pair(load_tiny(name, "cuda", dtype), "streaming", tokens=100)
    check_same_steps(one, other, later_ids(300))
    for each in (one, other):
        each.truncate(90)
    check_same_steps(one, other, later_ids(300, seed=2))
    assert not one.graphs.refusal
    assert not one.graphs.prepares


def test_coverage_samples_match_dense_attention():
    one, other = pair(llama(torch.bfloat16), "speculative", tokens=200)
    watch = inspect.CoverageWatch(one.kv.state, itertools.count().__next__)  # a sample is as long as COST allows
    for token in later_ids(60, seed=3):
        check_same_steps(one, other, [token])
        watch.sample()
        watch._due = 0.0
    assert not one.graphs.refusal
    assert 0 < watch.lowest <= watch.share < 1
    state, g = one.kv.state, one.kv.state.geometry
    state.host.synchronize()
    for layer in range(g.layers):
        keys = state.host.layers[layer][:, :, 0].transpose(0, 1).flatten(1, 2)[:, : state.total, : g.d_k]
        every = torch.ones(g.kv_heads, state.total, dtype=torch.bool)
        shares = softmax(state.query[layer].cpu(), keys, every, state.specs[layer])
        shares = shares.view(g.kv_heads, g.group, -1).mean(1)
        expected = (shares * attended(state, layer).cpu()).sum(-1)
        assert (inspect.covered(state, layer).cpu() - expected).abs().max() < 1e-4


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_full_mode_is_the_same_whatever_is_resident(dtype):
    """Around the end of a page and of the ring of slots, which holds 64 tokens."""
    model, ids = llama(dtype), token_ids(150)
    runners = [ModelRunner(model, mode_of(model, row)) for row in ("full", "full-resident")]
    for prompt, steps in ((1, 1), (31, 3), (63, 3), (149, 1)):
        for each in runners:
            prefill_logits(each, ids[each.kv.total : prompt])
        for token in ids[prompt : prompt + steps]:
            whole, ring = (each.step(token) for each in runners)
            assert relative_error(ring, whole) < 4 * torch.finfo(dtype).eps, f"{prompt} tokens"
    assert [each.kv.state.slots[0].layout.spills for each in runners] == [False, True]
    assert not any(each.graphs.refusal for each in runners)


@pytest.mark.parametrize(("name", "layers", "share"), [("llama", 2, 1.0), ("gemma2", 4, 0.5)])
def test_staged_pages_change_nothing(name, layers, share, monkeypatch):
    """With graphs, as pages leave the ring, after truncation and after a switch; in layers without a window."""
    monkeypatch.setattr(full, "STAGED_SHARE", share)
    monkeypatch.setattr(transfer, "copy_segments", delayed(transfer.copy_segments, random.Random(0)))
    model = loaded(name, "cuda", torch.bfloat16, num_hidden_layers=layers)
    whole, one, other = (ModelRunner(model, mode_of(model, row)) for row in ("full", "full-resident", "full-resident"))
    everyone = whole, one, eager(other)
    reading_all = [layer for layer, spec in enumerate(one.kv.state.specs) if spec.window is None]
    staged, stage = [], transfer.Transfer.stage

    def record(self, slots, layer):
        staged.append((slots.staged, layer))
        stage(self, slots, layer)

    monkeypatch.setattr(transfer.Transfer, "stage", record)
    acts = (93, "", 4), (160, "", 1), (94, "", 1), (97, "streaming", 1), (98, "full-resident", 1)
    for prompt, mode, steps in acts:
        for each in everyone:
            if each.kv.total > prompt:
                each.truncate(prompt)
            prefill_logits(each, token_ids(prompt)[each.kv.total :] or token_ids(1))
            if mode and each is not whole:
                with torch.inference_mode():
                    each.kv.switch(mode_of(model, mode))
        for token in token_ids(steps, seed=prompt):
            exact, found, same = (each.step(token) for each in everyone)
            assert torch.equal(found, same)
            assert mode == "streaming" or relative_error(found, exact) < 16 * torch.finfo(torch.bfloat16).eps
    assert one.kv.state.transfer.totals == other.kv.state.transfer.totals
    assert {*staged} == {(pages, layer) for pages in (1, 3) for layer in reading_all}
    assert not one.graphs.refusal
    check_integrity(one.kv.state)


@pytest.mark.parametrize(("name", "layers"), [("llama", 2), ("gemma2", 4)])
@pytest.mark.parametrize("share", [0.3, 1.0])
def test_attention_on_the_cpu_is_joined_with_the_rest(name, layers, share, monkeypatch):
    """With pages staged or not, as they leave the ring, after truncation and after a switch."""
    monkeypatch.setattr(full, "STAGED_SHARE", 0.5)
    model = loaded(name, "cuda", torch.bfloat16, num_hidden_layers=layers)
    near = 16 * torch.finfo(torch.bfloat16).eps
    whole, one = ModelRunner(model, mode_of(model, "full")), ModelRunner(model, mode_of(model, "full"))
    shared = {"resident": 64, "cpu": share}
    acts, by_graphs = ((93, shared, 2), (160, None, 2), (94, None, 1), (97, {}, 1), (161, shared, 2)), 0
    for prompt, params, steps in acts:
        for each in (whole, one):
            if each.kv.total > prompt:
                each.truncate(prompt)
            prefill_logits(each, token_ids(prompt)[each.kv.total :] or token_ids(1))
        if params is not None:
            with torch.inference_mode():
                one.kv.switch(mode_of(model, "full", params))
        for token in token_ids(steps, seed=prompt):
            before, read = (each.kv.state.read_pairs for each in (whole, one))
            exact, found = (each.step(token) for each in (whole, one))
            assert relative_error(found, exact) < near
            assert one.kv.state.read_pairs - read == whole.kv.state.read_pairs - before
            spilled, (slots,) = max(0, one.kv.total - 64), one.kv.state.slots
            left = int(share * spilled) if one.kv.mode.spills else 0
            assert left <= len(slots.on_cpu) <= left + 31 * bool(left)
            by_graphs += bool(slots.on_cpu and one.graphs._recorded)
    assert not one.graphs.refusal
    assert by_graphs
    check_integrity(one.kv.state)


@pytest.mark.parametrize("tokens", [range(7, 90), range(96, 97), range(150)], ids=str)
def test_the_cpu_part_is_attention_with_its_logsumexp(tokens):
    model = llama(torch.bfloat16)
    one = ModelRunner(model, mode_of(model, "full-resident"))
    prefill_logits(one, token_ids(150))
    host, g, spec = one.kv.state.host, one.kv.state.geometry, one.kv.state.specs[1]
    assert host_attention.is_ready(g.dtype, waits=True)
    attention = host_attention.HostAttention(host)
    query = torch.randn((g.q_heads, g.d_k), generator=torch.Generator().manual_seed(1)).to("cuda", g.dtype)
    attention.ask(query)
    found = attention.answer(1, SimpleNamespace(on_cpu=tokens), spec).cpu().double()
    stored = (rows[:, tokens.start : tokens.stop].cpu().double() for rows in host.dense(1, 150))
    keys, values = (rows.repeat_interleave(g.group, 0) for rows in stored)
    logits = spec.scaling * (keys @ query.cpu().double()[:, :, None])[..., 0]
    expected = torch.cat(((logits.softmax(-1)[:, None] @ values)[:, 0], logits.logsumexp(-1, keepdim=True)), -1)
    torch.testing.assert_close(found.flatten(0, 1), expected, rtol=1e-5, atol=1e-5)


class CallRecorder:
    """A kernel or function that records the name at each call."""

    def __init__(self, monkeypatch, owner, name, calls):
        self.original, self.note = getattr(owner, name), lambda: calls.append(name)
        monkeypatch.setattr(owner, name, self)

    def __getitem__(self, grid):
        self.note()
        return self.original[grid]

    def __call__(self, *args):
        self.note()
        return self.original(*args)


def test_the_gpu_starts_its_part_before_the_cpu_waits(monkeypatch):
    from kvchat.kv.ops.triton import attend  # triton is not installed everywhere

    monkeypatch.setattr(full, "STAGED_SHARE", 0.5)
    model, calls = load_tiny("llama", "cuda", torch.bfloat16, num_hidden_layers=1), []
    one = ModelRunner(model, mode_of(model, "full", {"resident": 64, "cpu": 0.3}))
    prefill_logits(one, token_ids(160))
    one.step(5)
    for name in ("_attend_part", "_attend_spilled", "_join"):
        CallRecorder(monkeypatch, attend, name, calls)
    for name in ("ask", "answer"):
        CallRecorder(monkeypatch, one.kv.mode._host_attention, name, calls)
    one.step(6)
    assert calls == ["ask", "_attend_part", "_attend_spilled", "_attend_spilled", "answer", "_join"]


def test_measured_rates_and_launch_costs_set_the_cpu_part(monkeypatch):
    monkeypatch.setattr(host_attention, "READ_BYTES", 2**12)
    monkeypatch.setattr(full, "STAGED_SHARE", 0.5)
    model = llama(torch.bfloat16)
    one = ModelRunner(model, mode_of(model, "full-resident"))
    prefill_logits(one, token_ids(160))
    assert host_attention.is_ready(torch.bfloat16, waits=True)
    with torch.inference_mode():
        found = host_attention.measured(one.kv.state.host)
    assert found.link > 0
    assert 1e6 < found.cpu < 1e12
    one.step(5)
    (slots,) = one.kv.state.slots
    assert not slots.on_cpu
    monkeypatch.setattr(host_attention, "measured", lambda host: host_attention.Rates(1e9, 3e9))
    monkeypatch.setattr(rates, "TURN_S", 0.0)
    one.step(6)
    assert slots.staged
    spilled = one.kv.total - 64 - slots.staged * one.kv.state.geometry.page
    assert 31 >= len(slots.on_cpu) - int(0.75 * spilled) >= 0
    monkeypatch.setattr(rates, "TURN_S", 1.0)
    for token in token_ids(2):
        one.step(token)
        assert not slots.on_cpu
    assert not one.graphs.prepares


@pytest.mark.parametrize("way", ["float16", "8-bit pages", "a guess"])
def test_tokens_the_cpu_cannot_attend_to_cross_the_link(way):
    model = llama(torch.float16 if way == "float16" else torch.bfloat16)
    one = ModelRunner(model, mode_of(model, "full", {"resident": 64, "cpu": 1.0, "draft": "window"}))
    with torch.inference_mode():
        one.kv.state.quantize_pages(way == "8-bit pages")
    prefill_logits(one, token_ids(150))
    with one.guessing() if way == "a guess" else nullcontext():
        for token in token_ids(2):
            one.step(token)
            assert not one.kv.state.slots[0].on_cpu
        assert not one.graphs.prepares


def test_pages_staged_by_a_failed_capture_are_not_read(monkeypatch):
    monkeypatch.setattr(full, "STAGED_SHARE", 1.0)
    model = load_tiny("llama", "cuda", torch.bfloat16, num_hidden_layers=2)
    one, other = pair(model, "full-resident", tokens=128)
    record = one.graphs._recorder
    one.graphs._recorder = lambda run: record(lambda: run().item())
    for token in token_ids(2):
        with torch.inference_mode():
            one.kv.state.slots[0].staging.fill_(torch.nan)
        check_same_steps(one, other, [token])
    assert one.graphs.refusal
    assert one.kv.state.slots[0].staged == 2


@pytest.mark.parametrize(("dtype", "cpu"), [(DTYPES[0], 0.0), (DTYPES[0], 0.6), (DTYPES[2], 0.0)], ids=str)
def test_guesses_skip_spilled_tokens_and_are_discarded(dtype, cpu):
    """With graphs; verification and the steps after it match a runner that never guessed."""
    model, ids, near = llama(dtype), token_ids(164), 16 * torch.finfo(dtype).eps
    parameters = FullParameters(resident=64, draft="window", cpu=cpu)
    whole = ModelRunner(model, mode_of(model, "full"))
    one = ModelRunner(model, build(parameters, geometry_of(model), traits_of(model)))
    for each in (whole, one):
        prefill_logits(each, ids[:149])
    for first in (149, 153):
        read = one.kv.state.read_pairs
        with one.guessing():
            guesses = torch.stack([one.step(token) for token in ids[first : first + 4]])
        assert one.kv.total == first
        assert one.kv.state.read_pairs == read
        verified = one.verify(ids[first : first + 4])
        exact = torch.stack([whole.step(token) for token in ids[first : first + 4]])
        assert relative_error(verified, exact) < near
        assert relative_error(guesses, exact) > near
    for token in ids[157:]:
        assert relative_error(one.step(token), whole.step(token)) < near
        assert bool(one.kv.state.slots[0].on_cpu) == bool(cpu)
    assert not one.graphs.refusal
    check_integrity(one.kv.state)


def test_guesses_do_not_wait_for_their_tokens():
    """Nothing is read back between the drafts; all are read at once."""
    model, ids = llama(torch.bfloat16), token_ids(150)
    parameters = FullParameters(resident=64, draft="window")
    runner = ModelRunner(model, build(parameters, geometry_of(model), traits_of(model)))
    prefill_logits(runner, ids[:149])
    with runner.guessing():
        runner.guess(ids[149], 4, torch.argmax)  # warm-up and capture
    drawn = []

    def draw(logits):
        drawn.append(logits.argmax())
        torch.cuda.set_sync_debug_mode("error" if len(drawn) < 4 else "default")
        return drawn[-1]

    with runner.guessing():
        try:
            found = runner.guess(ids[149], 4, draw)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert found == torch.stack(drawn).tolist()
    with runner.guessing():
        one_by_one = [int(runner.step(token).argmax()) for token in (ids[149], *found[:3])]
    assert found == one_by_one
    assert not runner.graphs.refusal
    check_integrity(runner.kv.state)


@pytest.mark.parametrize("row", ["speculative", "full-resident", "freeze"])
def test_graphs_over_8_bit_pages_change_no_bit(row):
    model = llama(torch.float16)
    one = ModelRunner(model, mode_of(model, row))
    other = eager(ModelRunner(model, mode_of(model, row)))
    for each in (one, other):
        with torch.inference_mode():
            each.kv.state.quantize_pages(True)
        prefill_logits(each, token_ids(157))  # the third step fills a page
    check_same_steps(one, other, token_ids(4, seed=1))
    assert type(one.kv.state.ops).__name__ == "EightBitTritonOps"
    assert sum(one.kv.state.host.quantized) == one.kv.total // one.kv.state.geometry.page
    assert not one.graphs.refusal


@pytest.mark.parametrize("row", ["streaming", "speculative", "sync"])
def test_pinned_messages_are_read_and_graphs_change_no_bit(row):
    model, pins = llama(torch.bfloat16), [*range(40, 47), *range(70, 90)]
    one, other = pair(model, row)
    for each in (one, other):
        each.pin(pins)
    check_same_steps(one, other, later_ids(150))
    assert not one.graphs.refusal
    assert all(bool(attended(one.kv.state, layer)[:, pins].all()) for layer in range(model.layers))
    check_integrity(one.kv.state)


@pytest.mark.parametrize("row", ["speculative", "speculative-reuse", "sync", "freeze"])
def test_late_recalls_are_waited_for(row):
    one, other = pair(llama(torch.bfloat16), row)
    check_same_steps(delay_recalls(one), other, later_ids(120))


def test_sparse_first_layer_selects_with_its_own_query(monkeypatch):
    """No earlier layer can select for it, and the selection for the next layer runs in parallel."""
    model, k = load_tiny("llama", "cuda", torch.bfloat16, num_hidden_layers=2), 24
    monkeypatch.setattr(attention_hook, "CLOSE", -1.0)
    assert attention_hook.install(model.model) == frozenset(range(1, model.layers))
    params = {"budget": 8 + k + 32, "sink": 8, "window": 32, "query": "ahead", "first_full": False}
    one, other = pair(model, "speculative", params)
    delay_recalls(one)
    before, turned = None, 0
    for token in later_ids(240):
        check_same_steps(one, other, [token])
        state, g = one.kv.state, one.kv.state.geometry
        now = state.total - 1
        keys = state.host.dense(0, now // g.page * g.page)[0].cpu()
        query = state.query[0].cpu().double().view(g.kv_heads, g.group, g.d_k)
        read = attended(state, 0).cpu()[:, 8 : now - 31]
        for head in range(g.kv_heads):
            codes = torch.cat([coded(tile, 2) for tile in keys[head].split(g.page)])
            weights = (state.scaling(0) * query[head] @ codes.T).softmax(-1).sum(0)[8 : now - 31]
            assert int(read[head].sum()) == k
            assert weights[read[head]].min() >= weights[~read[head]].max() * (1 - 1e-4)
        turned += before is not None and not torch.equal(read[:, : before.shape[1]], before)
        before = read
    assert turned
    assert not one.graphs.refusal


def test_layers_select_ahead_on_two_high_priority_streams(monkeypatch):
    """So that none waits for the copies of the previous layer, or for a whole projection to start."""
    model = load_tiny("llama", "cuda", torch.bfloat16, num_hidden_layers=4)
    monkeypatch.setattr(attention_hook, "CLOSE", -1.0)
    attention_hook.install(model.model)
    params = {"budget": 72, "window": 32, "query": "ahead", "rest": "none"}
    one, streams = ModelRunner(model, mode_of(model, "speculative", params)), []
    prefill_logits(one, token_ids(150))
    choose = one.kv.state.ops.choose_tokens

    def record(*args):
        streams.append(torch.cuda.current_stream())
        return choose(*args)

    monkeypatch.setattr(one.kv.state.ops, "choose_tokens", record)
    one.step(5)
    chosen, before = [stream.cuda_stream for stream in streams], torch.cuda.current_stream()
    assert len(chosen) == 3
    assert chosen[0] == chosen[2] != chosen[1]
    assert all(stream.priority < before.priority for stream in streams)


@pytest.mark.parametrize("row", PARAMS)
def test_mode_switches_between_graph_steps_change_no_bit(row):
    model = llama(torch.bfloat16)
    one, other = pair(model, "full")
    for mode in (row, "full", row, "streaming"):
        with torch.inference_mode():
            for each in (one, other):
                each.kv.switch(mode_of(model, mode))
        check_same_steps(one, other, later_ids(80, seed=len(mode)))
    assert one.kv.total <= CONTEXT  # beyond it streaming rotates the recent keys in its slots


@pytest.mark.parametrize("mode", ["full", "speculative", "streaming", "sync", "freeze"])
@pytest.mark.parametrize("name", PEERS)
def test_logits_match_the_models_own_when_everything_fits(name, mode):
    """Noise is the difference between the model's own eager attention and its own sdpa."""
    model, ids = load_tiny(name, "cuda", torch.bfloat16), token_ids(260)
    one = ModelRunner(model, mode_of(model, mode, ROOMY[mode]))
    ours = [prefill_logits(one, ids[:200]), *(one.step(token) for token in ids[200:])]
    sdpa, plain = own_logits(model.model, ids, "sdpa"), own_logits(model.model, ids, "eager")
    noise = max(float((a - b).abs().max()) for a, b in zip(sdpa, plain, strict=True))
    far = max(float((a - b).abs().max()) for a, b in zip(ours, sdpa, strict=True))
    assert far <= 2 * noise + 1e-3


ROOMY = {
    "full": {},
    "speculative": {"budget": 480, "sink": 32, "window": 64},
    "streaming": {"budget": 480},
    "sync": {"budget": 480},
    "freeze": {"tau": 0.0},
}


def own_logits(model, ids: list[int], attention: str) -> list[torch.Tensor]:
    before = model.config._attn_implementation
    model.set_attn_implementation(attention)
    try:
        with torch.inference_mode():
            logits = model(torch.tensor([ids], device=model.device)).logits[0].float()
    finally:
        model.set_attn_implementation(before)
    return list(logits[199:])


def test_reported_device_bytes_match_the_allocation():
    model = llama(torch.bfloat16)
    for row in PARAMS:
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        one = ModelRunner(model, mode_of(model, row))
        prefill_logits(one, token_ids(300))
        taken = torch.cuda.memory_allocated() - before
        # The rest are vectors in addition to the slots: queries, positions, counters.
        assert one.kv.device_bytes <= taken <= one.kv.device_bytes * 1.02 + 2**20
        del one
