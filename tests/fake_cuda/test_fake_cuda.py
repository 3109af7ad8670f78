"""The fake CUDA device refuses what CUDA refuses and reports races."""

import gc
import mmap
from functools import cache

import pytest
import torch
import triton
import triton.language as tl
from support import byte_tokenizer, tiny_models
from support.fake_cuda.device import TOTAL, Refused, gpu
from support.fake_cuda.races import Race
from support.integrity import check_integrity
from support.tiny_runner import load_tiny, mode_of, prefill_logits, runner_of, token_ids

from kvchat.engine.runner import GraphRunner, ModelRunner
from kvchat.errors import DoesNotFitError
from kvchat.kv.geometry import GROWTH_HEADROOM
from kvchat.kv.memory import pinned
from kvchat.kv.transfer import SideStream
from kvchat.models.fuse import modules
from kvchat.models.load import LoadedModel, load_model
from kvchat.models.probe import relative_error
from kvchat.models.quantize import int4_rows, quantization
from kvchat.protocol.messages import Load

pytestmark = [pytest.mark.cuda, pytest.mark.fake_cuda]


@pytest.fixture
def side():
    return torch.cuda.Stream()


@cache
def llama(dtype: torch.dtype) -> LoadedModel:
    """One layer that may read everything and one after it: the interpreter is slow."""
    return load_tiny("llama", "cuda", dtype, num_hidden_layers=2)


def ones(n: int = 8) -> torch.Tensor:
    return torch.ones(n, device="cuda")


@triton.jit
def _add_one(x, first, N: tl.constexpr):
    at = first + tl.arange(0, N)
    tl.store(x + at, tl.load(x + at) + 1)


def test_operands_on_two_devices_are_refused():
    with pytest.raises(Refused, match="same device, add: cuda:0 and cpu"):
        ones() + torch.ones(8)
    assert (ones() + torch.tensor(1.0)).tolist() == [2.0] * 8


def test_a_graph_runs_when_replayed_not_when_captured():
    total, graph = ones(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        total.add_(1)
        doubled = total * 2
    assert total.tolist() == [1.0] * 8
    for _ in range(2):
        graph.replay()
    assert (total.tolist(), doubled.tolist()) == ([3.0] * 8, [6.0] * 8)


def test_a_graph_copies_pinned_memory_when_replayed():
    source, target, graph = torch.zeros(8, pin_memory=True), ones(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        target.copy_(source, non_blocking=True)
    source.fill_(3)
    assert target.tolist() == [1.0] * 8
    graph.replay()
    assert target.tolist() == [3.0] * 8


SYNCHRONIZING = [
    *(torch.Tensor.item, torch.Tensor.cpu, torch.nonzero, lambda x: torch.ones(1).to(x)),
    *(lambda x: x.copy_(torch.ones(1), non_blocking=True), lambda x: x.to("cpu", non_blocking=True)),
]


@pytest.mark.parametrize("synchronizes", SYNCHRONIZING)
def test_synchronizing_during_a_capture_is_refused(synchronizes):
    one = ones(1)
    with (
        pytest.raises(Refused, match="not permitted when stream is capturing"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        synchronizes(one)
    assert one.item() == 1


def test_reading_what_another_stream_writes_is_a_race(side):
    shared = ones()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        shared.mul_(3)
    with pytest.raises(Race, match="wrote in launch"):
        shared.sum()
    torch.cuda.current_stream().wait_stream(side)
    assert shared.sum().item() == 24


def test_writing_what_another_stream_reads_is_a_race(side):
    shared = ones()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        shared.sum()
    with pytest.raises(Race, match="read in launch"):
        shared.zero_()
    torch.cuda.synchronize()
    shared.zero_()


@pytest.mark.parametrize("read", [torch.Tensor.float, torch.Tensor.numpy], ids=["torch", "numpy"])
def test_reading_an_unfinished_copy_on_the_host_is_a_race(read):
    here, sent = torch.empty(8, pin_memory=True), torch.cuda.Event()
    half = torch.empty(8, dtype=torch.bfloat16, pin_memory=True)
    for target in (here, half):
        target.copy_(torch.ones(8, dtype=target.dtype, device="cuda"), non_blocking=True)
    sent.record()
    asked = here if read is torch.Tensor.numpy else half
    with pytest.raises(Race, match="on host reads what"):
        read(asked)
    sent.synchronize()
    assert read(asked).tolist() == [1.0] * 8


def test_freeing_memory_still_in_use_is_a_hazard(side):
    before, shared = gpu.allocated, ones(1000)
    assert gpu.allocated == before + 4096
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        kept = shared.sum()
    del shared
    (hazard,) = gpu.hazards
    assert "memory of 0 is freed while launch" in hazard
    gpu.hazards.clear()
    torch.cuda.synchronize()
    assert kept.item() == 1000


def test_a_capture_with_unjoined_streams_is_refused(side):
    def forked():
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            ones()

    with pytest.raises(Refused, match="unjoined work"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        forked()


def test_a_copy_across_two_segments_is_refused():
    region, registrar = pinned.PinnedRegion(2 * mmap.PAGESIZE), pinned.CudaRegistrar(torch.device("cuda", 0))
    for size in (mmap.PAGESIZE, 2 * mmap.PAGESIZE):
        region.commit(size)
        region.pin(registrar)
    assert all(len(piece.cuda()) == mmap.PAGESIZE for piece in region.segments(0, region.size))
    with pytest.raises(Refused, match="across two segments"):
        region.bytes.cuda()
    region.unpin()
    assert not gpu.pinned


def test_a_recall_that_is_not_waited_for_is_a_race(monkeypatch):
    model = llama(torch.bfloat16)
    one = ModelRunner(model, mode_of(model, "speculative-reuse"))
    one.graphs = GraphRunner(one.kv, None)
    prefill_logits(one, token_ids(150))
    one.step(1)
    monkeypatch.setattr(SideStream, "join", lambda self: None)
    with pytest.raises(Race):
        list(map(one.step, token_ids(4)))
    del one
    gc.collect()
    gpu.hazards.clear()  # its memory is freed while unfinished work may use it


def test_a_conversation_frees_all_its_memory():
    model = llama(torch.float32)
    gc.collect()
    before = gpu.allocated, dict(gpu.pinned)
    one = ModelRunner(model, mode_of(model, "full"))
    prefill_logits(one, token_ids(100))
    for mode in ("speculative", "freeze", "sync", "streaming"):
        with torch.inference_mode():
            one.kv.switch(mode_of(model, mode))
        for token in token_ids(4):
            one.step(token)
    assert gpu.pinned != before[1]
    del one
    gc.collect()
    assert (gpu.allocated, gpu.pinned) == before


@pytest.mark.parametrize("tau", [0.7, 2.0])
def test_corrected_pages_are_counted_once(tau):
    """A correction replaces what was already counted: the hit rate was computed over twice as much (audit, 3)."""
    model = llama(torch.float32)
    one = runner_of(model, "speculative", budget=128, sink=8, window=32, tau=tau)
    prefill_logits(one, token_ids(300))
    slots, transfer = one.kv.state.slots[-1], one.kv.state.transfer
    one.step(1)
    before = transfer.totals.wanted
    for token in token_ids(6, seed=1):
        one.step(token)
    tokens = (model.layers - 1) * model.kv_heads * slots.layout.pages * slots.geometry.page
    assert transfer.totals.wanted - before == 6 * tokens


def test_unwritten_memory_is_nan():
    left = torch.empty(4, device="cuda")
    assert left.isnan().all()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = torch.ones(4, device="cuda")
        unwritten = torch.empty(4, device="cuda")
    kept.zero_()
    graph.replay()
    assert (kept.tolist(), unwritten.isnan().all().item()) == ([1.0] * 4, True)


def test_captured_events_are_recorded_by_the_replay(monkeypatch):
    begin, end = (torch.cuda.Event(enable_timing=True, external=True) for _ in "be")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        begin.record()
        ones()
        end.record()
    with pytest.raises(Refused, match="must be recorded"):
        begin.elapsed_time(end)
    graph.replay()
    end.synchronize()
    assert begin.elapsed_time(end) > 0
    monkeypatch.setattr(gpu, "behind", True)
    assert not end.query()
    with pytest.raises(Refused, match="not ready"):
        begin.elapsed_time(end)


def test_events_complete_at_random_and_end_races():
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in "be")
    assert end.query(), "none was recorded"
    asked = []
    for _ in range(32):
        here = torch.empty(8, pin_memory=True)
        begin.record()
        here.copy_(ones(), non_blocking=True)
        end.record()
        answers = 0
        while not end.query():
            answers += 1
            with pytest.raises(Refused, match="not ready"):
                begin.elapsed_time(end)
            with pytest.raises(Race, match="on host reads what"):
                here.numpy()
        assert begin.query(), "it came first"
        assert begin.elapsed_time(end) > 0
        assert here.numpy().tolist() == [1.0] * 8
        asked.append(answers)
    assert min(asked) == 0
    assert max(asked) > 1
    end.record()
    torch.cuda.synchronize()
    assert end.query()


def test_steps_with_unfinished_events_are_not_timed(monkeypatch):
    model = llama(torch.float32)
    one = ModelRunner(model, mode_of(model, "speculative"))
    prefill_logits(one, token_ids(150))
    monkeypatch.setattr(gpu, "behind", True)
    for token in token_ids(6, seed=1):
        one.step(token)
    assert not one.kv.state.transfer.timer.steps
    assert not one.graphs.refusal


def test_a_conversation_continues_after_a_prompt_that_does_not_fit(monkeypatch):
    model = llama(torch.float32)
    one = ModelRunner(model, mode_of(model, "streaming"))
    prefill_logits(one, token_ids(100))
    monkeypatch.setattr(gpu, "total", gpu.allocated + 2**15)
    with pytest.raises(DoesNotFitError):
        prefill_logits(one, token_ids(100, seed=1))
    monkeypatch.setattr(gpu, "total", TOTAL)
    prefill_logits(one, token_ids(100, seed=1))
    for token in token_ids(3, seed=2):
        one.step(token)
    assert one.kv.total == 203
    check_integrity(one.kv.state)


@pytest.mark.parametrize("row", ["speculative", "freeze", "sync"])
def test_recall_in_graphs_is_timed_by_events(row, monkeypatch):
    monkeypatch.setattr(gpu, "go_on", lambda stream: gpu.through.update({stream: gpu.recorded}))
    model = llama(torch.float32)
    one = ModelRunner(model, mode_of(model, row))
    prefill_logits(one, token_ids(150))
    for token in token_ids(12, seed=1):
        one.step(token)
    steps = one.kv.state.transfer.timer.steps
    assert not one.graphs.refusal
    assert len(steps) > 1
    assert all(0 <= step.exposed <= step.total for step in steps)


@pytest.mark.parametrize("row", ["speculative", "full-resident"])
def test_kernels_and_graphs_work_with_other_device_addresses(row, monkeypatch):
    """As in WSL2. The address changes whenever the pool grows, and older graphs are not replayed."""
    monkeypatch.setattr(gpu, "elsewhere", True)
    monkeypatch.setitem(GROWTH_HEADROOM, "cuda", 32)  # it grows soon
    model = llama(torch.bfloat16)
    one, eager = ModelRunner(model, mode_of(model, row)), ModelRunner(model, mode_of(model, row))
    eager.graphs = GraphRunner(eager.kv, None)
    host = one.kv.state.host
    for each in (one, eager):
        prefill_logits(each, token_ids(host.capacity - 2))
    addresses = set()
    for token in token_ids(5, seed=1):
        assert torch.equal(one.step(token), eager.step(token))
        addresses.add(host.rows(0).data_ptr())
    assert len(addresses) == 2, "it grew"
    assert min(addresses) > host.layers[0].data_ptr()
    assert host.pinned
    assert one.kv.state.ops.name == "triton"
    assert len(one.graphs._recorded) >= 2
    check_integrity(one.kv.state)


def test_an_answer_continues_when_pinning_fails_and_graphs_return(monkeypatch):
    monkeypatch.setitem(GROWTH_HEADROOM, "cuda", 32)  # it grows soon
    model = llama(torch.bfloat16)
    one = ModelRunner(model, mode_of(model, "speculative"))
    host, tokens = one.kv.state.host, iter(token_ids(400, seed=1))
    prefill_logits(one, token_ids(host.capacity - 6))
    one.step(next(tokens))
    monkeypatch.setattr(gpu, "pinnable", sum(gpu.pinned.values()))
    held = dict(gpu.pinned)
    while host.pinned:
        one.step(next(tokens))
    assert "out of memory" in host.badges[0]
    assert held.items() <= gpu.pinned.items(), "pinned memory stays pinned"
    full, stored = host.capacity, one.kv.total
    monkeypatch.setattr(gpu, "pinnable", 2**40)
    prefill_logits(one, [next(tokens) for _ in range(full - one.kv.total - 2)])  # as steps would, but faster
    assert host.capacity == full
    while host.capacity == full:
        one.step(next(tokens))
    assert host.pinned, "pinning was tried again when it grew"
    assert not host.badges
    for _ in range(3):
        one.step(next(tokens))
    assert one.kv.state.ops.name == "triton"
    assert one.graphs._recorded
    assert one.kv.total > stored
    check_integrity(one.kv.state)


def test_a_kernel_cannot_access_unpinned_memory():
    region, registrar = pinned.PinnedRegion(4 * mmap.PAGESIZE), pinned.CudaRegistrar(torch.device("cuda", 0))
    region.commit(mmap.PAGESIZE)
    region.pin(registrar)
    seen = torch.as_tensor(pinned.CudaArray(region), device="cuda")
    _add_one[(1,)](seen, mmap.PAGESIZE - 8, N=8)
    with pytest.raises(Refused, match="illegal memory access"):
        _add_one[(1,)](seen, mmap.PAGESIZE - 7, N=8)


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_quantized_weights_are_fused_like_16_bit_ones(tmp_path, monkeypatch, kind):
    pytest.importorskip("torchao")
    sizes = {"vocab_size": byte_tokenizer.SIZE, "num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 256}
    tiny_models.fresh("llama", torch.bfloat16, **sizes).save_pretrained(tmp_path)
    byte_tokenizer.byte_level().save_pretrained(tmp_path)
    asked, launches, logits = Load(str(tmp_path), "cuda", "bfloat16", quantize=kind), {}, {}
    with monkeypatch.context() as patch:
        patch.setattr(quantization, "multiply_on_gpu", lambda model: None)
        patch.setattr(modules, "fuse", lambda *_: modules.FusionReport())
        plain = load_model(asked, lambda stage: None)
    fused = load_model(asked, lambda stage: None)
    for way, model in (("torchao's", plain), ("ours", plain), ("fused", fused)):
        if way == "ours":
            quantization.multiply_on_gpu(plain.model)
        assert model.weights == kind
        assert int4_rows.unpacked_elements(model.model) == tiny_models.fresh("llama", **sizes).num_parameters()
        one = ModelRunner(model, mode_of(model, "streaming"))
        one.graphs = GraphRunner(one.kv, None)
        one.chunk = 64  # otherwise a long prompt is timed, which is slow in the interpreter
        read = prefill_logits(one, token_ids(40))
        before = gpu.order.number
        logits[way] = torch.stack([read, one.step(1)])
        launches[way] = gpu.order.number - before
    assert (fused.fused, fused.notes) == ("norms, merged projections, rope, fused layers", ())
    assert torch.equal(logits["torchao's"], logits["ours"])
    assert relative_error(logits["fused"], logits["ours"]) < 0.05
    assert launches["fused"] < 0.65 * launches["torchao's"], launches
