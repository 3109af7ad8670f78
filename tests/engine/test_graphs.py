"""Graph steps equal eager steps bitwise, whatever happens between them. On a CPU a tape replaces the graph."""

import gc
import itertools
from contextlib import contextmanager, nullcontext

import pytest
import torch
from support import tiny_models
from support.fake_cuda.tape import TapeRecorder
from support.grids import WHOLE, sampled
from support.kv_steps import use_gpu_path
from support.tiny_runner import COMPARED, PARAMS, check_same_steps, load_tiny, mode_of, prefill_logits, token_ids
from transformers.cache_utils import LinearAttentionLayer

from kvchat.engine import runner
from kvchat.engine.runner import CudaRecorder, GraphRunner, ModelRunner
from kvchat.engine.session import Session
from kvchat.kv.geometry import GROWTH_HEADROOM, Geometry
from kvchat.models.load import LoadedModel
from kvchat.protocol.messages import Preparing, Sampling, Turn


@pytest.fixture(autouse=True)
def separate_host_pool(monkeypatch):
    """The host pool has its own memory, as with a GPU."""
    monkeypatch.setattr(runner, "Geometry", lambda *sizes, unified, **rest: Geometry(*sizes, **rest))


def changed_by_steps(one: ModelRunner) -> list[torch.Tensor]:
    """The tensors in a graph's key, and the host pool of every layer."""
    pool = map(one.kv.state.host.rows, range(one.kv.state.geometry.layers))
    return [*one.kv.graph_buffers(), *one.recurrent._tensors().values(), *pool]


def pair(model: LoadedModel, row: str, prompt: list[int]) -> tuple[ModelRunner, ModelRunner, TapeRecorder]:
    """Return two runners after the same prompt, one with graphs and one eager, and the recorder."""
    recorder = TapeRecorder(lambda: changed_by_steps(one))
    one, other = ModelRunner(model, mode_of(model, row), recorder), ModelRunner(model, mode_of(model, row))
    for each in (one, other):
        use_gpu_path(each.kv)
        prefill_logits(each, prompt)
    return one, other, recorder


@pytest.mark.parametrize(
    ("name", "row"), [*(("llama", row) for row in (*PARAMS, *COMPARED)), ("gpt_oss", "speculative"), ("gpt_oss", "h2o")]
)
def test_graph_steps_match_eager_steps(row, name):
    model, ids = load_tiny(name, num_hidden_layers=2), token_ids(400)
    one, other, recorder = pair(model, row, ids[:100])
    check_same_steps(one, other, ids[100:112])
    played = recorder.played
    assert played > 6
    with torch.inference_mode():
        one.kv.truncate(106)
        other.kv.truncate(106)
    check_same_steps(one, other, ids[180:184])
    for each in (one, other):
        prefill_logits(each, ids[200:240])
    check_same_steps(one, other, ids[240:252])
    assert recorder.played > played + 7
    assert not one.graphs.refusal


STATES = tiny_models.HYBRID if WHOLE else tiny_models.STATES


@pytest.mark.parametrize(("name", "row"), sampled(STATES, ["full", "speculative", "freeze", "sync"]))
def test_graph_steps_match_eager_steps_in_hybrid_models(name, row):
    """Also after its state was restored, and where tokens were recomputed."""
    model, ids = load_tiny(name), token_ids(200)
    one, other, recorder = pair(model, row, ids[:100])
    check_same_steps(one, other, ids[100:108])
    played = recorder.played
    assert played > 3
    for each in (one, other):
        each.truncate(104)
    check_same_steps(one, other, ids[120:124])
    for each in (one, other):
        prefill_logits(each, ids[130:150])
    check_same_steps(one, other, ids[150:158])
    assert recorder.played > played + 5
    for _ in range(2):  # from nothing
        for each in (one, other):
            each.truncate(0)
        check_same_steps(one, other, ids[:4])
    assert not one.graphs.refusal


def test_recurrent_layers_that_reallocate_their_state_run_eagerly(monkeypatch):
    def moved(layer, state, state_idx=0, **_):
        layer.recurrent_states[state_idx] = state.clone()
        return layer.recurrent_states[state_idx]

    one, other, recorder = pair(load_tiny("qwen3_5"), "full", token_ids(100))
    monkeypatch.setattr(LinearAttentionLayer, "update_recurrent_state", moved)
    check_same_steps(one, other, token_ids(12, seed=1))
    assert (recorder.recorded, recorder.played) == (0, 0)
    assert "recurrent layers" in one.graphs.refusal


@pytest.mark.parametrize("moved", ["recurrent state", "buffer"])
def test_graph_is_not_replayed_after_its_inputs_moved(moved):
    one, other, recorder = pair(load_tiny("qwen3_5"), "full", token_ids(100))
    check_same_steps(one, other, token_ids(4, seed=1))
    recorded = recorder.recorded
    if moved == "buffer":
        one.kv.state.position = one.kv.state.position.clone()
    else:
        for layer in one.recurrent._layers:
            layer.recurrent_states[0] = layer.recurrent_states[0].clone()
    check_same_steps(one, other, token_ids(4, seed=2))
    assert recorder.recorded == recorded + 1


def test_growing_buffers_record_new_graphs(monkeypatch):
    monkeypatch.setitem(GROWTH_HEADROOM, "cpu", 16)
    one, other, recorder = pair(load_tiny("llama"), "full", token_ids(20))
    check_same_steps(one, other, token_ids(60, seed=1))
    assert 2 <= recorder.recorded <= 4
    assert recorder.played >= 50


def test_entering_a_mode_records_new_graphs():
    model = load_tiny("llama")
    one, other, recorder = pair(model, "full", token_ids(120))
    for row in ("speculative", "freeze", "full", "streaming", "sync", "speculative"):
        recorded = recorder.recorded
        with torch.inference_mode():
            for each in (one, other):
                each.kv.switch(mode_of(model, row))
        assert one.graphs.prepares
        check_same_steps(one, other, token_ids(8, seed=recorded))
        assert recorder.recorded > recorded
        assert not one.graphs.prepares


def test_each_kind_of_step_has_a_graph_up_to_a_limit(monkeypatch):
    one, other, recorder = pair(load_tiny("llama"), "sync", token_ids(100))
    check_same_steps(one, other, token_ids(16, seed=1))
    assert recorder.recorded == len(one.graphs._recorded) == 2
    monkeypatch.setattr(runner, "MAX_GRAPHS", 1)
    one, other, recorder = pair(load_tiny("llama"), "sync", token_ids(60))
    check_same_steps(one, other, token_ids(20, seed=1))
    assert recorder.recorded > len(one.graphs._recorded) == 1


def test_uncapturable_steps_run_eagerly_with_a_reason():
    one, other, recorder = pair(load_tiny("llama"), "full", token_ids(50))
    # As a mixture of experts finds out which of its experts have work.
    layer = one.model.model.model.layers[2]
    hook = layer.register_forward_hook(lambda *_: [torch.ones(3).nonzero(), None][1])
    try:
        check_same_steps(one, other, token_ids(10, seed=1))
    finally:
        hook.remove()
    assert (recorder.recorded, recorder.played) == (0, 0)
    assert "not permitted when stream is capturing: nonzero" in one.graphs.refusal


def test_steps_with_a_pageable_host_pool_run_eagerly(monkeypatch):
    one, other, recorder = pair(load_tiny("llama"), "speculative", token_ids(150))
    check_same_steps(one, other, token_ids(8, seed=1))
    played = recorder.played
    assert played
    monkeypatch.setattr(one.kv.state.host, "pageable_reason", "no more memory may be pinned")
    assert not one.graphs.prepares
    check_same_steps(one, other, token_ids(8, seed=2))
    assert recorder.played == played


def test_graphs_continue_after_a_failed_step():
    one, other, _ = pair(load_tiny("llama"), "streaming", token_ids(150))
    check_same_steps(one, other, token_ids(10, seed=1))
    replay = one.graphs._recorded
    kind, (play, result) = next(iter(replay.items()))

    def fails():
        play()
        raise RuntimeError("CUDA error")

    replay[kind] = fails, result
    total = one.kv.total
    with pytest.raises(RuntimeError, match="CUDA error"):
        one.step(5)
    assert one.kv.total == total
    replay[kind] = play, result
    steps = [(one.step(token), other.step(token)) for token in token_ids(10, seed=2)]
    assert all(torch.equal(mine, its) for mine, its in steps), "a result is the caller's: no later step overwrites it"


def test_answer_reports_graph_preparation_and_stays_the_same(model):
    def answer(recorder):
        session = Session(model)
        use_gpu_path(session._kv)
        if recorder:
            session._runner.graphs = GraphRunner(session._kv, TapeRecorder(lambda: changed_by_steps(session._kv)))

        def between(generated):
            if generated == 12:
                session.switch("streaming", budget=64)

        sampling = Sampling(max_new_tokens=24, seed=3)
        events = list(session.answer((Turn("user", "Tell me a story."),), sampling, between))
        return [event.mode for event in events if isinstance(event, Preparing)], events[-1].text

    prepared, text = answer(recorder=True)
    assert prepared == ["full", "streaming"]
    assert answer(recorder=False) == ([], text)


class Streams:
    """What ``CudaRecorder`` needs of torch, without a GPU; ``pools`` and ``on`` record what captures were given."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.current, self.pools, self.on, handles = "main", [], [], itertools.count()
        for name, instead in {
            "CUDAGraph": type("Graph", (), {"replay": lambda self: None}),
            "Stream": lambda device: f"beside {device}",
            "device": lambda device: nullcontext(),
            "current_stream": lambda device: self.current,
            "set_stream": lambda stream: setattr(self, "current", stream),
            "graph_pool_handle": lambda: next(handles),
            "graph": self.capture,
        }.items():
            patch.setattr(torch.cuda, name, instead)

    @contextmanager
    def capture(self, graph, pool, stream, capture_error_mode):
        self.pools.append(pool)
        self.on.append(stream)
        self.current = stream
        try:
            yield
        except Exception:  # noqa: BLE001
            raise torch.AcceleratorError("CUDA error: the capture was invalidated")  # noqa: B904
        self.current = "main"


def test_live_graphs_share_a_memory_pool(monkeypatch):
    streams = Streams(monkeypatch)
    recorder = CudaRecorder(torch.device("cuda:1"))
    first, second = recorder(lambda: torch.ones(1)), recorder(lambda: torch.tensor(gc.isenabled()))
    assert not second[1]
    assert gc.isenabled()
    del first
    third = recorder(lambda: torch.ones(1))
    del second, third
    recorder(lambda: torch.ones(1))
    assert streams.pools == [0, 0, 0, 1]
    assert set(streams.on) == {"beside cuda:1"}


def test_failed_capture_restores_the_stream_and_names_the_cause(monkeypatch):
    one, _, _ = pair(load_tiny("llama"), "full", token_ids(50))
    streams = Streams(monkeypatch)
    one.graphs._recorder = CudaRecorder(torch.device("cuda"))
    step = one.step
    step(3)

    def fails(*_args):
        if streams.current != "main":
            raise ValueError("Triton: no such function")

    hook = one.model.model.model.layers[1].register_forward_hook(fails)
    try:
        step(4)
    finally:
        hook.remove()
    assert one.graphs.refusal == "ValueError: Triton: no such function"
    assert streams.current == "main"
