"""Memory that runs out in one of two ranks, anywhere in what a session is asked for: an error, and all go on alike."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import cycle, product
from pathlib import Path

import pytest
import torch
from support import faulty_rank
from support.environment import PYTHONPATH
from support.integrity import check_integrity
from support.memory_faults import PLACES, MemoryRunsOut, places_of

from kvchat import process
from kvchat.engine.session import Session, load
from kvchat.errors import DoesNotFitError, UsageError
from kvchat.protocol.messages import Sampling, Turn

pytestmark = pytest.mark.slow("two processes that load a model each")
MODES = {"full": {}, "streaming": {"budget": 96}, "speculative": {"budget": 128}}
TOKENS, COST = 200, 8  # of a step, in steps of a tiny model
IDS = torch.randint(10, 500, (TOKENS + 40,), generator=torch.Generator().manual_seed(0)).tolist()


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", PYTHONPATH)
        patched.setattr(process, "python", lambda *_: [sys.executable, str(Path(faulty_rank.__file__))])
        opened = load("bundled", device="cpu", dtype="float32", gpus=2, split="heads")
    yield opened
    opened.close()


def told(session: Session, name: str, *given: object) -> str:
    """What the follower refuses."""
    assert session._followers
    try:
        with session._followers.following(name, *given):
            return ""
    except UsageError as error:
        return error.title


def check_alike(session: Session) -> None:
    kv = session._kv
    assert not told(session, "check_alike", kv.total, kv.mode.name, kv.mode.report().params, kv.state.pins)
    check_integrity(kv.state)


def switch(session: Session) -> None:
    mode = next(name for name in MODES if name != session.info.mode)
    session.switch(mode, **MODES[mode])


def pin(session: Session) -> None:
    session._runner.pin(range(20, 60))


def truncate(session: Session) -> None:
    if session.total == TOKENS:
        session.truncate(TOKENS - 30)
    else:  # its last token could not be read again
        session.prefill(IDS[session.total : TOKENS - 30])


OPERATIONS: dict[str, Callable[[Session], None]] = {
    "step": lambda session: session.step(7),  # type: ignore[dict-item,return-value]
    "prefill": lambda session: session.total > TOKENS or session.prefill(IDS[TOKENS:]),  # type: ignore[dict-item]
    "truncate": truncate,
    "switch": switch,
    "pin": pin,
}


def begun(session: Session, mode: str) -> None:
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
def test_all_ranks_go_on_alike_wherever_memory_runs_out(session, operation, mode, rank, count):
    run = OPERATIONS[operation]
    begun(session, mode)
    told(session, "run_out", 0)
    with MemoryRunsOut(0) as counting:
        run(session)
    operations = (counting.count, int(told(session, "tell_count")))[rank]
    told(session, "run_out")
    total, entered, expected = session.total, session.info.mode, session.step(9)
    titles = set()
    for places in places_of(operations, f"{operation} {mode} {rank}", COST):
        begun(session, mode)
        told(session, "run_out", *(places if rank else ()))
        try:
            with nullcontext() if rank else MemoryRunsOut(*places):
                run(session)
            told(session, "run_out")
        except DoesNotFitError as error:
            told(session, "run_out")
            titles.add(error.title)
            assert session.total >= TOKENS - 31
            assert session.info.mode == mode
            check_alike(session)
            run(session)
        check_alike(session)
        assert (session.total, session.info.mode) == (total, entered)
        measured = session.step(9)
        if entered == "full":
            assert (measured - expected).abs().max() < 1e-4
        count["failures of memory"] += 1
    assert all(title.startswith("Memory ran out") for title in titles)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("where", [0.3, 0.9])
def test_an_answer_that_ran_out_of_memory_is_given_when_asked_again(session, rank, where):
    turns, sampling = (Turn("user", "Tell me a story about a whale. " * 20),), Sampling(temperature=0, max_new_tokens=8)
    session.switch("full")
    session.truncate(0)
    told(session, "run_out", 0)
    with MemoryRunsOut(0) as counting:
        *_, expected = session.answer(turns, sampling)
    operations = (counting.count, int(told(session, "tell_count")))[rank]
    session.truncate(0)
    place = round(where * operations)
    told(session, "run_out", *((place,) if rank else ()))
    with nullcontext() if rank else MemoryRunsOut(place), pytest.raises(DoesNotFitError, match="Memory ran out"):
        list(session.answer(turns, sampling))
    told(session, "run_out")
    check_alike(session)
    *_, finished = session.answer(turns, sampling)
    assert finished.text == expected.text


@pytest.mark.parametrize("end", ["commit_step", "commit_prefill"])
def test_a_forward_that_one_rank_cannot_commit_is_undone_in_all(session, monkeypatch, end):
    def fail(*_: object) -> None:
        raise MemoryError

    begun(session, "full")
    with monkeypatch.context() as patched:
        patched.setattr(session._kv, end, fail)
        with pytest.raises(DoesNotFitError, match="Memory ran out"):
            session.step(7) if end == "commit_step" else session.prefill(IDS[TOKENS:])
    assert session.total == TOKENS
    check_alike(session)
    session.step(7)
    check_alike(session)
