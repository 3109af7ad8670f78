"""A decode step reads nothing back from the device and has the same shapes at every step, as a CUDA graph needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from support.integrity import check_integrity
from support.kv_run import Run
from support.kv_steps import decode_step, forward, use_gpu_path
from support.mode_rows import FIRST, MET, MIXED, ROWS
from support.toy_model import toy
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from kvchat.kv.inspect import attended
from kvchat.kv.manager import KVManager
from kvchat.kv.memory import host_pool
from kvchat.kv.ops import torch_ops
from kvchat.kv.transfer import EVERY, RecallTime, StepTimer

READS = ("_local_scalar_dense", "nonzero", "item", "unique", "masked_select", "equal", "is_nonzero")
UPLOADS = ("lift_fresh",)  # torch.tensor(...) and indexing by a list: copied to the device at every step


class Watch(TorchDispatchMode):
    """Rejects operations that wait for the device; records every operation with its output shapes."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert not name.startswith(READS), f"{name} reads back"
        assert name not in UPLOADS, f"{name} uploads from the host"
        if name.startswith("index"):
            indices = args[1] if isinstance(args[1], list | tuple) else [args[1]]
            masks = [i for i in indices if isinstance(i, torch.Tensor) and i.dtype in (torch.bool, torch.uint8)]
            assert not masks, f"{name} by a mask has a shape that depends on data"
        result = func(*args, **(kwargs or {}))
        results = result if isinstance(result, list | tuple) else [result]
        self.seen.append((name, [tuple(one.shape) for one in results if isinstance(one, torch.Tensor)]))
        return result


def watched(run: Run, ids: list[int]) -> tuple[list, list[torch.Tensor]]:
    """One step of the kv without a model: its operations and outputs."""
    layers = range(run.toy.geometry.layers)
    new = [run.toy.qkv(layer, ids, run.kv.total) for layer in layers]
    with unwatched_room(run.kv), Watch() as watch, decode_step(run.kv), forward(run.kv):
        outputs = [run.kv.attention(i, *new[i], run.toy.specs[i]) for i in layers]
    return watch.seen, outputs


@contextmanager
def unwatched_room(kv: KVManager) -> Iterator[None]:
    """Before a step slots may grow and a mode may read how many it needs; no graph captures that."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv, "_make_room", unwatched(kv._make_room))
        patch.setattr(kv.mode, "prepare_step", unwatched(kv.mode.prepare_step))
        patch.setattr(kv.state, "resize", unwatched(kv.state.resize))
        yield


def unwatched(do: Callable) -> Callable:
    def apart(*args):
        with _disable_current_modes():
            return do(*args)

    return apart


# Besides the usual rows: each way to freeze, to keep slots and to reuse the last selection.
@pytest.mark.parametrize("row", [*MET, "freeze-paper", "freeze-raw", "sync-resident", "freekv-reuse"])
def test_decode_steps_read_nothing_back_and_keep_their_shapes(row):
    kinds = MIXED if row in ("full", "streaming") else ("plain", "window" if row in FIRST.values() else "sinks")
    run, picking = (Run.of_row(row, toy(kinds, page=8)) for _ in range(2))
    use_gpu_path(run.kv)
    for one in (run, picking):
        one.prefill(150)
        one.step()
    shapes, slots = {}, run.kv.state.slots[0].n
    for i in range(26):  # more than twice the longest interval of the modes
        ops, outputs = watched(run, [300 + i])
        phase = run.kv.step.kind
        picking.fresh = 300 + i
        for one, other in zip(outputs, picking.step(), strict=True):
            # The same tokens in other slots: only the order of sums may differ.
            torch.testing.assert_close(one[:, 0], other, atol=2e-6, rtol=0)
        for layer in range(run.toy.geometry.layers):
            assert torch.equal(attended(run.kv.state, layer), attended(picking.kv.state, layer))
        if run.kv.state.slots[0].n == slots:
            assert shapes.setdefault(phase, ops) == ops
        else:
            shapes, slots = {phase: ops}, run.kv.state.slots[0].n
    check_integrity(run.kv.state)


def test_the_watch_detects_readbacks():
    mask = torch.tensor([True, False])
    for read in (lambda: mask.nonzero(), lambda: torch.arange(2)[mask], lambda: int(mask.sum()), lambda: mask[[0, 1]]):
        with pytest.raises(AssertionError), Watch():
            read()


@pytest.mark.parametrize("row", MET)
def test_decode_steps_stay_within_stored_host_memory(row, monkeypatch):
    """Memory that is not committed is not pinned: a GPU that reads it kills the process."""
    mode, params = ROWS[row]
    run = Run(toy(MIXED, page=8), mode, **params)
    use_gpu_path(run.kv)
    run.prefill(150)
    gathered, g = [], run.toy.geometry

    def within(view, index):
        stored = g.pages(run.kv.total + 1) * g.kv_heads * 2 * g.page * g.d // view.shape[1]
        gathered.append(int(index.max()) < stored)
        return host_pool.gather(view, index)

    monkeypatch.setattr(torch_ops, "gather", within)
    run.step(10)
    assert all(gathered)
    assert gathered or mode != "freeze"


# ---- Recall times: by the clock on a CPU, by events on a GPU, hidden and exposed separately


class Clock:
    """A device event; the test sets how long work takes and when it is done."""

    now = 0.0
    done = True

    def __init__(self, enable_timing: bool, external: bool) -> None:
        assert enable_timing
        assert external, "an event of a graph that is not external is never timed"

    def record(self, stream: None) -> None:
        self.at = Clock.now

    def query(self) -> bool:
        return Clock.done

    def elapsed_time(self, end: Clock) -> float:
        return end.at - self.at


@pytest.fixture
def timer(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Clock)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(Clock, "done", True)
    return StepTimer(torch.device("cuda"))


def one_forward(timer: StepTimer, kind: str, exposed: float, hidden: float, waited: float) -> None:
    timer.begin_forward(kind)
    for span, milliseconds in (
        (timer.copying(), exposed),
        (timer.copying(hidden=True), hidden),
        (timer.waiting(), waited),
    ):
        with span:
            Clock.now += milliseconds
    timer.end_step(kind)


def test_corrections_are_exposed_and_speculation_only_while_waiting(timer):
    one_forward(timer, "a", exposed=2.0, hidden=5.0, waited=1.0)
    assert not timer.steps
    timer.begin_step("a")
    (step,) = timer.steps
    assert step == (pytest.approx(0.007), pytest.approx(0.003))


def test_exposed_time_never_exceeds_the_copy_time(timer):
    one_forward(timer, "a", exposed=0.0, hidden=2.0, waited=9.0)
    timer.begin_step("a")
    assert timer.steps[0].exposed == timer.steps[0].total == pytest.approx(0.002)


def test_replayed_graphs_are_timed_by_events_of_their_kind(timer):
    one_forward(timer, "copies", exposed=3.0, hidden=0.0, waited=0.0)
    timer.begin_step("a")
    timer.begin_forward("rests")
    timer.end_step("rests")
    timer.begin_step("a")
    assert len(timer.steps) == 1, "a step that copied nothing has no time"
    timer.end_step("copies")  # a replay: no Python ran in between
    timer.begin_step("a")
    assert [step.total for step in timer.steps] == [pytest.approx(0.003)] * 2
    assert (timer.timed, timer.seconds) == (3, pytest.approx(0.006))


def test_the_host_does_not_wait_for_times(timer, monkeypatch):
    one_forward(timer, "a", exposed=3.0, hidden=0.0, waited=0.0)
    monkeypatch.setattr(Clock, "done", False)
    timer.begin_step("a")
    assert not timer.steps
    monkeypatch.setattr(Clock, "done", True)
    timer.begin_step("a")
    assert not timer.steps, "the events may belong to a later step by now"
    assert timer.timed == 0


def test_only_every_nth_step_is_timed(timer):
    timed = []
    for step in range(3 * EVERY + 1):
        timer.begin_step("a")
        one_forward(timer, f"timed {timer.times}", exposed=float(step), hidden=0.0, waited=0.0)
        timed += [step] * timer.times
    assert timed == [0, 1, EVERY, 2 * EVERY, 3 * EVERY]
    timer.begin_step("a")
    assert [round(1000 * step.total) for step in timer.steps] == timed[1:]
    assert timer.timed == len(timed)


def test_clear_discards_pending_times(timer):
    one_forward(timer, "a", exposed=3.0, hidden=0.0, waited=0.0)
    timer.clear()
    timer.begin_step("a")
    assert not timer.steps


def test_all_recall_on_a_cpu_is_exposed():
    timer = StepTimer(torch.device("cpu"))
    with timer.copying(hidden=True):
        sum(range(1000))
    timer.end_step("a")
    timer.begin_step("a")
    (step,) = timer.steps
    assert isinstance(step, RecallTime)
    assert step.total == step.exposed > 0
