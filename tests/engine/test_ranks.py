"""The bundled model's heads split over two processes on the CPU: they compute what one computes, and end together."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from itertools import cycle, product
from pathlib import Path

import pytest
import torch
from support import recording_rank, tiny_models
from support.environment import PYTHONPATH, environ
from support.integrity import check_integrity
from support.memory_faults import PLACES, MemoryRunsOut, places_of
from support.patience import PATIENCE_S, wait_until
from support.recording_rank import RankRecord
from support.streams import read_event

from kvchat import process
from kvchat.engine.ranks.leader import Followers
from kvchat.engine.session import Session, load, open_session
from kvchat.errors import DoesNotFitError, ModelError, UsageError
from kvchat.kv.geometry import PAGE
from kvchat.kv.manager import SlotsState
from kvchat.kv.modes.speculative import SINK
from kvchat.kv.ops import key_codes
from kvchat.models.description import describe
from kvchat.models.probe import relative_error
from kvchat.models.ranks import heads
from kvchat.protocol import wire
from kvchat.protocol.client import ENGINE
from kvchat.protocol.messages import (
    Chat,
    Command,
    Compared,
    Finished,
    Load,
    Loaded,
    Sampling,
    Stop,
    Switched,
    Text,
    Turn,
    Variant,
)

pytestmark = pytest.mark.slow("processes that each load a model")
TALE = (Turn("user", "Tell me a long story about a whale, a lighthouse and two brothers. " * 12),)
GREEDY = Sampling(temperature=0, max_new_tokens=40)
ASKED = Load("bundled", "cpu", "float32", gpus=2, split="heads")
MODES = {"full": {}, "streaming": {"budget": 96}, "speculative": {"budget": 128}}
PROMPT, STEPS = 400, 24
TOKENS, COST = 150, 8  # of a step, in steps of a tiny model
IDS = torch.randint(10, 500, (TOKENS + 40,), generator=torch.Generator().manual_seed(0)).tolist()


def is_running(pid: int) -> bool:
    """True if the process runs; a zombie does not."""
    status = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False).stdout
    return status.strip()[:1] not in ("", "Z")


@pytest.fixture(scope="module")
def one():
    session = load("bundled", device="cpu", dtype="float32")
    yield session
    session.close()


@pytest.fixture(scope="module")
def two():
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", PYTHONPATH)
        patched.setattr(process, "python", lambda *_: [sys.executable, str(Path(recording_rank.__file__))])
        session = load("bundled", device="cpu", dtype="float32", gpus=2, split="heads")
    assert session._followers
    pids = [each.pid for each in session._followers._processes]
    yield session
    session.close()
    assert not any(map(is_running, pids))


def run_answer(session: Session, sampling: Sampling = GREEDY, **options: object) -> Finished:
    *_, finished = session.answer(TALE, sampling, **options)  # type: ignore[arg-type]
    assert isinstance(finished, Finished)
    return finished


def test_failed_load_leaves_no_rank_running(monkeypatch):
    """Must come first: a process leads one group of ranks at a time."""
    pids: list[int] = []
    begin = Followers.meet

    def meet(self, described):
        rank = begin(self, described)
        pids.extend(each.pid for each in self._processes)
        return rank

    def fail(*_):
        raise ModelError("It cannot be read.")

    monkeypatch.setattr(Followers, "meet", meet)
    monkeypatch.setattr(heads, "cut", fail)
    with pytest.raises(ModelError, match="It cannot be read"):
        open_session(ASKED)
    assert len(pids) == 1
    assert not is_running(pids[0])


# ---- what the ranks compute


def test_each_rank_has_half_of_the_heads(one, two):
    assert (two.info.kv_heads, two.info.layers) == (one.info.kv_heads // 2, one.info.layers)
    assert two.info.parameters == one.info.parameters
    assert two.snapshot().weight_bytes < 0.8 * one.snapshot().weight_bytes
    assert two.info.kv_bytes_per_token == one.info.kv_bytes_per_token // 2


@pytest.mark.parametrize("mode", MODES)
def test_logits_and_read_tokens_match_one_process(one, two, mode):
    """Except, in speculative mode, tokens whose key is on the edge between two codes; see below."""
    ids = one.tokenize(TALE)
    assert two.tokenize(TALE) == ids
    for session in (one, two):
        session.truncate(0)
        session.switch(mode, **MODES[mode])
    assert relative_error(two.prefill(ids), one.prefill(ids)) < 1e-5
    for token in ids[:12]:
        expected, measured = one.step(token), two.step(token)
        assert relative_error(measured, expected) < (1e-5 if mode != "speculative" else 1e-2)
        for layer in range(one.info.layers):
            read, theirs = one.attended(layer)[:2], two.attended(layer)
            assert (read != theirs).sum() <= (0 if mode != "speculative" else 4)


def test_modes_may_be_switched_mid_answer(one, two):
    def transcript(session):
        session.switch("full")
        session.truncate(0)
        order, entered = {8: "streaming", 16: "speculative", 24: "full", 32: "streaming"}, []

        def between(generated):
            if mode := order.pop(generated, ""):
                switched = session.switch(mode, **MODES[mode])
                assert isinstance(switched, Switched)
                entered.append(switched.mode)

        return run_answer(session, between=between).text, entered

    assert transcript(two) == transcript(one)


@pytest.mark.parametrize("draft", ["lookup", "window"])
def test_drafts_give_the_same_answer_on_two_ranks(one, two, draft):
    for session in (one, two):
        session.truncate(0)
        session.switch("full", draft=draft)
    assert run_answer(two).text == run_answer(one).text
    for session in (one, two):
        session.switch("full", draft="off")


def test_stop_pin_and_comparison_match_one_process(one, two):
    def transcript(session):
        session.truncate(0)
        session.switch("streaming", budget=96)
        stopped = run_answer(session, between=lambda generated: session.cancel() if generated == 5 else None)
        turns = (Turn("user", TALE[0].content, pinned=True), Turn("assistant", stopped.text), Turn("user", "Go on."))
        *_, pinned = session.answer(turns, GREEDY)
        total = session.total
        variants = [Variant("full"), Variant("speculative", {"budget": 128})]
        *_, compared = session.compare(turns, variants, GREEDY)
        assert isinstance(compared, Compared)
        assert session.total == total
        *_, last = session.answer((*turns, Turn("assistant", pinned.text), Turn("user", "And then?")), GREEDY)
        return [stopped.reason, stopped.text, pinned.text, [run.text for run in compared.runs], last.text]

    assert transcript(two) == transcript(one)


def test_modes_that_select_across_heads_are_refused(two):
    two.switch("full")
    for mode, params in [("freeze", {}), ("sync", {}), ("speculative", {"unit": "page"}), ("h2o", {})]:
        with pytest.raises(UsageError, match="2 of them"):
            two.switch(mode, **params)
    assert two.info.mode == "full"
    assert {price.mode for price in two.prices() if price.refusal} == {"freeze", "sync"}
    assert run_answer(two).text


def send_order(session: Session, name: str, *args: object) -> str:
    """Send the follower an order; return the title of its refusal, or ""."""
    assert session._followers
    try:
        with session._followers.following(name, *args):
            return ""
    except UsageError as error:
        return error.title


def test_heads_select_the_same_tokens_as_one_process(one, two, tmp_path):
    """Except for keys on the edge between two codes.

    Sums over ranks round keys differently, by 1.2e-6 of the largest. One or two of 450,000 codes then change, such as
    of a key that is 2.4999997 or 2.5000013 steps above the lowest of its page. Its token weighs a tenth more or less,
    and 3 of 768 sets differ by a token. So each process is checked against its own keys: its index encodes them, and
    it selected the tokens of the highest weight in float64 (those left out weigh at least 2.9e-5 less).
    """
    ids, found = (one.tokenize(TALE) * 3)[: PROMPT + STEPS], []
    for session in (one, two):
        session.truncate(0)
        session.switch("speculative", **MODES["speculative"])
        logits, recorded = [session.prefill(ids[:PROMPT])], RankRecord()
        for token in ids[PROMPT:]:
            logits.append(session.step(token))
            recorded.record_step(session._kv.state)
            if session is two:
                send_order(two, "record_step")
        recorded.end(session._kv)
        found.append((torch.stack(logits), recorded))
    send_order(two, "save", str(tmp_path / "record"))
    (expected, whole), (measured, first) = found
    parts = first, torch.load(tmp_path / "record", weights_only=False)
    together = torch.cat([part.keys for part in parts], 1)[:, :, :PROMPT]
    assert relative_error(together, whole.keys[:, :, :PROMPT]) < 1e-5
    for each in (whole, *parts):
        check_selection(each)
    sets = zip(whole.read, *(part.read for part in parts), strict=True)
    same = [torch.equal(torch.cat(theirs, 1), its) for its, *theirs in sets]
    matching = same.index(False) if False in same else len(same)
    assert matching > 2
    for step in range(matching + 1):
        assert relative_error(measured[step], expected[step]) < 1e-5


def check_selection(recorded: RankRecord) -> None:
    """The index encodes the keys, and the tokens read weigh most by it in float64."""
    layers, heads, total, d = recorded.keys.shape
    full = total // PAGE
    for layer in range(1, layers):
        index = recorded.index[layer - 1, :, :full]
        assert torch.equal(key_codes.encode(recorded.keys[layer], PAGE, 2)[:, :full], index)
        keys = key_codes.decode(index, d, PAGE, 2, torch.float32).double()
        for step, queries in enumerate(torch.stack(recorded.queries)[:, layer].double()):
            known, end = (PROMPT + step) // PAGE * PAGE, PROMPT + step + 1 - PAGE  # the window is a page
            scores = queries.view(heads, -1, d) @ keys[:, :known].transpose(1, 2) * d**-0.5
            weights = scores.softmax(-1).mean(1)[:, SINK:end]
            is_read = recorded.read[step][layer, :, SINK:end]
            assert (is_read.sum(-1) == MODES["speculative"]["budget"] - SINK - PAGE).all()
            least, most = weights.where(is_read, torch.inf).amin(-1), weights.where(~is_read, 0).amax(-1)
            assert (most <= least * (1 + 1e-6)).all()


# ---- memory that runs out anywhere in one rank: an error, and all ranks stay in sync


def check_in_sync(session: Session) -> None:
    kv = session._kv
    assert not send_order(session, "check_in_sync", kv.total, kv.mode.name, kv.mode.report().params, kv.state.pins)
    if kv._slots is not SlotsState.DIRTY:  # then a refill failed, and the next step begins with another
        check_integrity(kv.state)


def switch(session: Session) -> None:
    mode = next(name for name in MODES if name != session.info.mode)
    session.switch(mode, **MODES[mode])


def pin(session: Session) -> None:
    session._runner.pin(range(20, 60))


def truncate(session: Session) -> None:
    if session.total == TOKENS:
        session.truncate(TOKENS - 30)
    elif session.total < TOKENS - 30:  # its last token could not be recomputed
        session.prefill(IDS[session.total : TOKENS - 30])


OPERATIONS: dict[str, Callable[[Session], None]] = {
    "step": lambda session: session.step(7),  # type: ignore[dict-item,return-value]
    "prefill": lambda session: session.total > TOKENS or session.prefill(IDS[TOKENS:]),  # type: ignore[dict-item]
    "truncate": truncate,
    "switch": switch,
    "pin": pin,
}


def start(session: Session, mode: str) -> None:
    session.switch("full")
    session.truncate(0)
    session.switch(mode, **MODES[mode])
    session._runner.chunk = 64
    session.prefill(IDS[: TOKENS - 4])
    for token in IDS[TOKENS - 4 : TOKENS]:
        session.step(token)


CASES = list(product(OPERATIONS, MODES)) if PLACES else list(zip(OPERATIONS, cycle(MODES), strict=False))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("operation", "mode"), CASES)
def test_ranks_stay_in_sync_wherever_memory_runs_out(two, operation, mode, rank, count):
    run = OPERATIONS[operation]
    start(two, mode)
    send_order(two, "run_out", 0)
    with MemoryRunsOut(0) as counting:
        run(two)
    operations = (counting.count, int(send_order(two, "count_operations")))[rank]
    send_order(two, "run_out")
    total, entered, expected = two.total, two.info.mode, two.step(9)
    titles = set()
    for places in places_of(operations, f"{operation} {mode} {rank}", COST):
        start(two, mode)
        send_order(two, "run_out", *(places if rank else ()))
        try:
            with nullcontext() if rank else MemoryRunsOut(*places):
                run(two)
            send_order(two, "run_out")
        except DoesNotFitError as error:
            send_order(two, "run_out")
            titles.add(error.title)
            assert two.total >= TOKENS - 31
            assert two.info.mode == mode
            check_in_sync(two)
            run(two)
        check_in_sync(two)
        assert (two.total, two.info.mode) == (total, entered)
        measured = two.step(9)
        if entered == "full":
            assert (measured - expected).abs().max() < 1e-4
        count["failures of memory"] += 1
    assert all(title.startswith("Memory ran out") for title in titles)


@pytest.mark.parametrize(("rank", "where"), [(0, 0.9), (1, 0.3)])
def test_answer_that_ran_out_of_memory_can_be_retried(two, rank, where):
    turns, sampling = (Turn("user", "Tell me a story about a whale. " * 20),), Sampling(temperature=0, max_new_tokens=8)
    two.switch("full")
    two.truncate(0)
    send_order(two, "run_out", 0)
    with MemoryRunsOut(0) as counting:
        *_, expected = two.answer(turns, sampling)
    operations = (counting.count, int(send_order(two, "count_operations")))[rank]
    two.truncate(0)
    place = round(where * operations)
    send_order(two, "run_out", *((place,) if rank else ()))
    with nullcontext() if rank else MemoryRunsOut(place), pytest.raises(DoesNotFitError, match="Memory ran out"):
        list(two.answer(turns, sampling))
    send_order(two, "run_out")
    check_in_sync(two)
    *_, finished = two.answer(turns, sampling)
    assert finished.text == expected.text


@pytest.mark.parametrize("end", ["commit_step", "commit_prefill"])
def test_uncommitted_forward_is_undone_on_all_ranks(two, monkeypatch, end):
    def fail(*_):
        raise MemoryError

    start(two, "full")
    with monkeypatch.context() as patched:
        patched.setattr(two._kv, end, fail)
        with pytest.raises(DoesNotFitError, match="Memory ran out"):
            two.step(7) if end == "commit_step" else two.prefill(IDS[TOKENS:])
    assert two.total == TOKENS
    check_in_sync(two)
    two.step(7)
    check_in_sync(two)


# ---- refusals


def test_unsplittable_models_are_refused(tmp_path):
    with pytest.raises(ModelError, match=r"4 KV heads and 8 query heads, which 3 GPUs.*--gpus 2 or --gpus 4"):
        load("bundled", device="cpu", gpus=3, split="heads")
    with pytest.raises(ModelError, match="Packed"):
        load("bundled", device="cpu", gpus=2, split="heads", quantize="int8")
    for name, reason in [("qwen3_5", "recurrent"), ("gpt_oss", "plan")]:
        tiny_models.fresh(name).save_pretrained(tmp_path / name)
        with pytest.raises(ModelError, match=reason):
            heads.check(describe(str(tmp_path / name), "cpu", "auto", print), "none", 2, force=False)
    with pytest.raises(UsageError, match="2 GPUs are not available"):
        load("bundled", gpus=2, split="heads")


def test_second_group_in_one_process_is_refused(two):
    with pytest.raises(UsageError, match="Close"):
        open_session(ASKED)
    assert run_answer(two).text


# ---- the end


class EngineProcess:
    """The engine's process, with a model in two ranks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder  # for temporary files
        ours = (*ENGINE[:-1], str(os.getpid()))
        self.process = subprocess.Popen(
            ours,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environ(TMPDIR=str(folder)),
            bufsize=0,
        )
        self.send(ASKED)
        self.until(Loaded)
        self.follower = self.find_follower()

    def find_follower(self) -> int:
        command = ["pgrep", "-f", "kvchat.engine.ranks", "-P", str(self.process.pid)]
        return int(subprocess.run(command, capture_output=True, check=True).stdout)

    def send(self, command: Command) -> None:
        assert self.process.stdin
        self.process.stdin.write(wire.encode(command))

    def until(self, kind: type) -> object:
        assert self.process.stdout
        while (event := read_event(self.process.stdout)) is not None:  # type: ignore[arg-type]
            if isinstance(event, kind):
                return event
        raise AssertionError("the engine ended")

    def wait_for_end(self) -> tuple[int, str]:
        self.process.wait(PATIENCE_S)
        _, errors = self.process.communicate()
        wait_until(lambda: not is_running(self.follower))
        assert not list(self.folder.glob("kvchat-ranks-*")), "their rendezvous folder is removed"
        return self.process.returncode, errors.decode()


@pytest.fixture
def engine(tmp_path):
    started = EngineProcess(tmp_path)
    yield started
    started.process.kill()
    started.process.communicate()


def test_killed_engine_leaves_no_rank_running(engine):
    engine.send(Chat(TALE, Sampling(max_new_tokens=4000)))
    engine.until(Text)
    engine.process.kill()
    assert engine.wait_for_end()[0] == -signal.SIGKILL


def test_reload_ends_old_ranks_and_a_dead_rank_ends_the_engine(engine):
    engine.send(Chat(TALE, Sampling(max_new_tokens=4000)))
    engine.until(Text)
    engine.send(Stop())
    finished = engine.until(Finished)
    assert isinstance(finished, Finished)
    assert finished.reason == "stopped"
    first = engine.follower
    engine.send(ASKED)
    engine.until(Loaded)
    assert not is_running(first)
    engine.follower = engine.find_follower()
    engine.send(Chat(TALE, Sampling(max_new_tokens=4000)))
    engine.until(Text)
    os.kill(engine.follower, signal.SIGKILL)
    code, errors = engine.wait_for_end()
    assert code == 1
    assert "rank 1 of 2 ended (-9)" in errors
