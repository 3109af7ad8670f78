"""A model whose layers are split over two GPUs computes, reads and takes what it does on one."""

from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from support import byte_tokenizer, tiny_models
from support.fake_cuda.device import gpu
from support.integrity import check_integrity
from support.tiny_runner import (
    EmptyTokenizer,
    check_same_steps,
    load_tiny,
    mode_of,
    prefill_logits,
    runner_of,
    token_ids,
)

from kvchat.engine.plan import memory_plan
from kvchat.engine.runner import ModelRunner
from kvchat.engine.session import Session
from kvchat.errors import DoesNotFitError, ModelError, UsageError
from kvchat.kv.memory import rates
from kvchat.kv.transfer import StepTimer
from kvchat.models import attention_hook, reading, split
from kvchat.models.description import describe
from kvchat.models.load import LoadedModel, load_model, wrap
from kvchat.models.probe import relative_error
from kvchat.protocol.messages import Keeping, Load, Sampling, Turn

pytestmark = [pytest.mark.cuda, pytest.mark.fake_cuda]

FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)
ONE, TWO = "The sea was calm and the whale went on. " * 5, "A fox ran over the hill to the old mill. " * 5


@pytest.fixture(autouse=True)
def two(monkeypatch):
    monkeypatch.setattr(gpu, "count", 2)


def halves(name: str = "llama", layers: int = 4) -> LoadedModel:
    """A tiny model with its first half on the first GPU."""
    half = layers // 2
    return load_tiny(name, "cuda:0", places=(FIRST,) * half + (SECOND,) * half, num_hidden_layers=layers)


@cache
def whole_and_halves() -> tuple[LoadedModel, LoadedModel]:
    return load_tiny("llama", "cuda:0", num_hidden_layers=2), halves(layers=2)


@pytest.mark.parametrize("row", ["full-resident", "speculative", "freeze", "sync"])
def test_each_mode_computes_and_reads_the_same_on_two_gpus(row):
    one, two = (ModelRunner(model, mode_of(model, row)) for model in whole_and_halves())
    ids = token_ids(150)
    assert torch.equal(prefill_logits(one, ids), prefill_logits(two, ids))
    check_same_steps(one, two, token_ids(3, seed=1))


def test_non_current_gpu_has_kernels_and_graphs():
    models = (load_tiny("llama", device, torch.bfloat16, num_hidden_layers=2) for device in ("cuda:0", "cuda:1"))
    one, two = (ModelRunner(model, mode_of(model, "speculative")) for model in models)
    ids = token_ids(150)
    assert torch.equal(prefill_logits(one, ids), prefill_logits(two, ids).to(FIRST))
    check_same_steps(one, two, token_ids(3, seed=1))
    assert two.kv.state.ops.name == "triton", "each kernel was tried"
    assert not two.graphs.refusal
    assert not two.graphs.prepares


def test_work_is_timed_on_its_own_device():
    timer, work = StepTimer(SECOND), partial(torch.ones, 8, device=SECOND)
    timer.begin_forward("a kind")
    with timer.copying():
        work()
    timer.end_step("a kind")
    torch.cuda.synchronize(SECOND)
    timer.begin_step("a kind")
    assert timer.seconds > 0
    assert rates.seconds(work, SECOND) > 0


def test_queries_are_estimated_ahead_across_gpus(monkeypatch):
    monkeypatch.setattr(attention_hook, "CLOSE", -1.0)  # with random weights no estimate is close
    one, two = (
        runner_of(model, "speculative", budget=96, sink=4, window=32)
        for model in (load_tiny("llama", "cuda:0"), halves())
    )
    estimated = [[], []]
    for each, layers in zip((one, two), estimated, strict=True):
        assert attention_hook.install(each.model.model) == {1, 2, 3}
        choose = each.kv.mode.estimated
        each.kv.mode.estimated = lambda layer, query, choose=choose, layers=layers: (
            layers.append((layer, query.device)),
            choose(layer, query),
        )
        prefill_logits(each, token_ids(150))
    check_same_steps(one, two, token_ids(2, seed=1))
    assert estimated[0] == estimated[1] == [(layer, FIRST) for layer in (1, 2, 3)] * 2


def test_fused_model_computes_the_same():
    """Wrapping it compares it to transformers' own forward."""
    model = tiny_models.fresh("llama", num_hidden_layers=2)
    split.move(model, FIRST, (FIRST, SECOND))
    split.connect(model, FIRST, (FIRST, SECOND))
    one, two = (
        runner_of(load_tiny("llama", "cuda:0", num_hidden_layers=2)),
        runner_of(wrap(model, EmptyTokenizer(), "llama")),
    )
    assert two.model.fused == "norms, merged projections, rope, fused layers"
    assert not any("fast path" in note for note in two.model.notes)
    one.chunk = two.chunk = 64  # else the memory of a long prompt is measured, which is slow in the interpreter
    assert relative_error(prefill_logits(two, token_ids(20)), prefill_logits(one, token_ids(20))) < 1e-5
    assert relative_error(two.step(7), one.step(7)) < 1e-5


@pytest.mark.parametrize(
    ("name", "layers"),
    [("gpt_oss", 2), ("gemma3", 4), ("deepseek_v3", 2)],  # whose values are narrower than its keys
)
def test_sinks_and_several_rotary_embeddings_work_on_two_gpus(name, layers):
    one, two = (
        runner_of(model) for model in (load_tiny(name, "cuda:0", num_hidden_layers=layers), halves(name, layers))
    )
    assert torch.equal(prefill_logits(one, token_ids(40)), prefill_logits(two, token_ids(40)))
    check_same_steps(one, two, token_ids(2, seed=1))


def test_no_token_is_lost_if_memory_runs_out_on_the_second_gpu(monkeypatch):
    one, two = (runner_of(model, "streaming", budget=64) for model in whole_and_halves())
    for each in (one, two):
        prefill_logits(each, token_ids(100))
    with monkeypatch.context() as patch:
        patch.setattr(gpu.memories[1], "total", gpu.memories[1].allocated + 2**10)
        for failing in (lambda: prefill_logits(two, token_ids(60)), lambda: two.step(5)):
            with pytest.raises(DoesNotFitError):
                failing()
            assert two.kv.total == 100
    for token in token_ids(2, seed=1):
        assert torch.equal(one.step(token), two.step(token))
    check_integrity(two.kv.state)


@cache
def speaking(places: tuple[torch.device, ...] = ()) -> LoadedModel:
    end = byte_tokenizer.SIZE - 1
    model = load_tiny("llama", "cuda:0", places=places, vocab_size=end + 1, num_hidden_layers=2)
    return replace(model, tokenizer=byte_tokenizer.byte_level(), vocab=end + 1, eos_ids=frozenset({end}))


def test_conversations_are_switched_truncated_and_saved_as_on_one_gpu(tmp_path):
    answers, logits = [], []
    for number, places in enumerate([(), (FIRST, SECOND)]):
        keeping = Keeping(2**20, 2**20, str(tmp_path / str(number)))
        session = Session(speaking(places), Load(keeping=keeping))
        greedy, events = Sampling(temperature=0, max_new_tokens=3), []
        for conversation, question, mode in [("a", ONE, "full"), ("b", TWO, "streaming"), ("a", ONE, "freeze")]:
            session.switch(mode)
            events += list(session.answer((Turn("user", question),), greedy, None, conversation))
        session.truncate(session.total - 2)
        logits.append(session.step(5))
        session.close()
        again = Session(speaking(places), Load(keeping=keeping))
        events += list(again.answer((Turn("user", TWO),), greedy, None, "b"))
        named = [getattr(each, "text", getattr(each, "where", type(each).__name__)) for each in events]
        answers.append([each for each in named if each != "Preparing"])  # a graph is prepared on one GPU only
        assert again.snapshot().elsewhere.keys() == {str(place) for place in places} - {str(FIRST)}
        again.close()
    assert answers[0] == answers[1]
    assert torch.equal(*logits)
    assert {"memory", "disk"} <= set(answers[1])


# ---- loading


@pytest.fixture
def folder(tmp_path):
    tiny_models.fresh("llama", vocab_size=byte_tokenizer.SIZE).save_pretrained(tmp_path)
    byte_tokenizer.byte_level().save_pretrained(tmp_path)
    return str(tmp_path)


def set_free(monkeypatch, device: torch.device, size: int) -> None:
    """Leave ``size`` bytes free on a GPU."""
    memory = gpu.memories[device.index]
    monkeypatch.setattr(memory, "allocated", memory.total - size)


@pytest.mark.parametrize("in_place", [False, True])
def test_second_gpu_takes_as_many_layers_as_fit(folder, monkeypatch, in_place):
    """Also where transformers loads each layer straight onto its GPU, as with packed weights."""
    monkeypatch.setattr(reading, "_is_in_place", lambda *_: in_place)
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")  # the fake GPU supports one thread only
    load = Load(folder, "cuda", gpus=2, fast=False)
    described = describe(folder, "cuda", "auto", print, 2)
    (layer, *_), rest = split.layer_bytes(described, "none")
    set_free(monkeypatch, SECOND, int(1.07 * (2.5 * layer + described.activations(split.FORWARD))))
    planned, free = memory_plan(load, 256, print), torch.cuda.mem_get_info(SECOND)[0]
    model = load_model(load, print)
    assert model.devices == (FIRST, SECOND)
    assert [next(each.parameters()).device for each in model.model.model.layers] == [FIRST, FIRST, SECOND, SECOND]
    assert planned.elsewhere["none"] == model.elsewhere == {"cuda:1": 2 * layer}
    assert planned.on_device("none") == rest + 2 * layer
    angles = model.weight_bytes - rest - 4 * layer  # which are in no file
    assert 0 <= angles < 2**10
    assert 2 * layer <= free - torch.cuda.mem_get_info(SECOND)[0] <= 2 * layer + 2**14, "in blocks of 512 bytes"
    assert sum("2 on cuda:0, 2 on cuda:1" in note for note in model.notes) == 1
    one = runner_of(load_model(replace(load, gpus=1), print))
    two = runner_of(model)
    assert torch.equal(prefill_logits(one, token_ids(20)), prefill_logits(two, token_ids(20)))
    assert two.graphs.badges == ("no CUDA graph: the layers are on 2 GPUs",)


def test_4_bit_weights_are_packed_for_their_own_gpu(tmp_path, monkeypatch):
    """Whichever GPU is current: torchao checks the current one."""
    pytest.importorskip("torchao")
    monkeypatch.setattr(gpu, "capabilities", ((7, 5), (8, 0)))
    sizes = {"vocab_size": byte_tokenizer.SIZE, "num_hidden_layers": 1, "hidden_size": 128, "intermediate_size": 128}
    tiny_models.fresh("llama", torch.bfloat16, **sizes).save_pretrained(tmp_path)
    byte_tokenizer.byte_level().save_pretrained(tmp_path)
    model = load_model(Load(str(tmp_path), "cuda:1", "bfloat16", quantize="int4"), print)
    assert (model.weights, model.devices) == ("int4", (SECOND,))
    for device, gpus in (("cuda:0", 1), ("cuda:1", 2)):
        with pytest.raises(UsageError, match=r"cuda:0 has 7\.5"):
            load_model(Load(str(tmp_path), device, quantize="int4", gpus=gpus), print)


def test_model_too_large_for_two_gpus_is_refused(folder, monkeypatch):
    for device in (FIRST, SECOND):
        set_free(monkeypatch, device, 100_000)
    with pytest.raises(DoesNotFitError, match=r"cuda:1.*cuda:0, where 97.66 KiB are free"):
        load_model(Load(folder, "cuda", gpus=2), print)


def test_missing_gpus_and_recurrent_layers_are_refused(folder, tmp_path):
    with pytest.raises(UsageError, match="sees 2"):
        describe(folder, "cuda", "auto", print, 3)
    with pytest.raises(UsageError, match="on the CPU"):
        describe(folder, "cpu", "auto", print, 2)
    tiny_models.fresh("qwen3_5").save_pretrained(tmp_path / "hybrid")
    with pytest.raises(ModelError, match="recurrent"):
        split.shares(describe(str(tmp_path / "hybrid"), "cuda", "auto", print, 2), "none")
