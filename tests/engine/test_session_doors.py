"""What else callers of the Python API may do wrong: forks in the middle of work, odd arguments, a process that ends."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch
from support.integrity import check_integrity
from support.loads import entering
from support.patience import PATIENCE_S

from kvchat.config import modes
from kvchat.config.modes import MAX_COUNT
from kvchat.engine import session as sessions
from kvchat.engine.session import Session, load, open_session
from kvchat.errors import KvchatError, UsageError
from kvchat.paths import bundled_model_dir
from kvchat.protocol.messages import Finished, Keeping, Load, Sampling, Turn, Variant

GREEDY = Sampling(temperature=0, max_new_tokens=6)
HELLO = (Turn("user", "Hello! My name is Maria."),)
LONG = (Turn("user", "The sea was calm and the whale went on. " * 30),)
BOTH = (Variant("full"), Variant("streaming", {"budget": 128}))
LARGEST = [(mode, name) for mode in modes.mode_names() for name in modes.registered()[mode].model_fields]


# ---- closed


@pytest.mark.parametrize("begin", [lambda s: s.rebuild(), lambda s: s.compare(LONG, BOTH, GREEDY)])
def test_what_goes_on_after_close_says_so(model, begin):
    session = Session(model, entering("streaming", {"budget": 64}))
    list(session.answer(LONG, GREEDY))
    going_on = begin(session)
    next(going_on)
    session.close()
    with pytest.raises(UsageError, match="closed"):
        list(going_on)


def test_an_answer_that_closes_its_session_says_so(model):
    session = Session(model)
    with pytest.raises(UsageError, match="closed"):
        list(session.answer(HELLO, GREEDY, lambda generated: session.close() if generated == 2 else None))


# ---- one at a time


@pytest.mark.parametrize("begin", [lambda s: s.rebuild(), lambda s: s.compare(HELLO, BOTH, GREEDY)])
def test_nothing_else_begins_while_this_is_in_progress(session, begin):
    session.switch("streaming", budget=64)
    list(session.answer(LONG, GREEDY))
    before = session.total
    going_on = begin(session)
    next(going_on)
    for use in (
        lambda: session.chat("More?"),
        lambda: session.step(1),
        lambda: session.truncate(0),
        lambda: session.forget("other"),
        lambda: list(session.resume("other", HELLO)),
        lambda: list(session.compare(HELLO, BOTH, GREEDY)),
    ):
        with pytest.raises(UsageError, match="answer"):
            use()
    going_on.close()
    assert 0 < session.total <= before
    check_integrity(session._kv.state)
    assert list(session.answer(HELLO, GREEDY))[-1].text


# ---- arguments


@pytest.mark.parametrize("value", [5.0, "5", None])
def test_what_is_no_whole_number_is_refused(session, value):
    session.prefill([5, 6, 7])
    for use in (session.step, lambda it: session.prefill([5, it])):
        with pytest.raises(UsageError):
            use(value)
    assert session.total == 3


@pytest.mark.parametrize("ids", [torch.tensor([[5, 6]]), torch.tensor(5), np.array(5), torch.empty(0), iter(()), 5])
def test_what_gives_no_ids_is_refused(session, ids):
    with pytest.raises(UsageError):
        session.prefill(ids)
    assert session.total == 0


def test_ids_may_come_from_anything_that_gives_them(session):
    for ids in (np.array([5, 6]), torch.tensor([5, 6]), range(5, 7), iter([5, 6])):
        session.prefill(ids)
    session.step(np.int64(5))
    session.step(torch.tensor(6))
    assert session._loop.stored.ids == [5, 6] * 5


def test_ids_that_cannot_be_read_to_their_end_store_nothing(session):
    with pytest.raises(ZeroDivisionError):
        session.prefill(5 // n for n in (1, 0))
    with pytest.raises(UsageError, match="There is no token"):
        session.prefill(range(session.model.vocab - 2, session.model.vocab + 1))
    assert session.total == 0


def test_names_that_nothing_has_are_refused(session):
    for use in (
        lambda: session.keep_pages("int4"),
        lambda: load(device="cpu", host_dtype="int4"),
        lambda: load(device="cpu", mode_params={"ful": {}}),
        lambda: load(device="tpu"),
        lambda: load(device="cpu", dtype="int5"),
        lambda: load(device="cpu", quantize="int5"),
        lambda: load("~nobody-has-this-name/model", device="cpu"),
    ):
        with pytest.raises(UsageError):
            use()
    assert session.info.mode == "full"


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (Load(mode="ful"), 'no KV mode "ful"'),
        (Load(mode_params={"ful": {}}), 'no KV mode "ful"'),
        (entering("streaming", {"budget": 64}, mode_params={"streaming": {"budget": 1}}), "budget = 1"),
        (Load(mode_params={"freeze": {"tau": "high"}}), "freeze: tau = 'high'"),
        (Load(given={"sync": {"rhoo": 1}}), 'no parameter "rhoo"'),
        (Load(host_dtype="int4"), 'cannot be stored in "int4"'),
    ],
)
def test_a_wrong_value_is_refused_before_anything_is_loaded(monkeypatch, asked, said):
    monkeypatch.setattr(sessions, "load_model", lambda *_: pytest.fail("loaded"))
    with pytest.raises(UsageError, match=said):
        open_session(asked)


def test_what_is_asked_for_reaches_the_model_and_the_session_whole(monkeypatch, model):
    seen = []
    monkeypatch.setattr(sessions, "load_model", lambda asked, progress: seen.append(asked) or model)
    session = load("there", device="cpu", mode="streaming", fast=False, host_dtype="int8", system="Short.", budget=64)
    assert seen == [entering("streaming", {"budget": 64}, model="there", device="cpu", fast=False, host_dtype="int8")]
    assert (session.info.mode, session.info.params["budget"]) == ("streaming", 64)
    assert session._kv.state.quantizes
    assert session._turns == (Turn("system", "Short."),)


def test_a_model_may_be_a_path():
    session = load(Path(bundled_model_dir()), device="cpu")
    assert "".join(session.chat("Hello", GREEDY))
    session.close()


@pytest.mark.parametrize(("mode", "name"), LARGEST)
def test_a_mode_works_or_is_refused_with_any_number(small_model, mode, name):
    """25 pairs of a mode's parameter and a number were taken, and every step after them overflowed (findings, 17)."""
    for number in (MAX_COUNT, MAX_COUNT + 1, 1e300, 5e-324):
        session = Session(small_model)
        try:
            session.switch(mode, **{name: number})
        except KvchatError:
            assert session.info.mode == "full"
        else:
            session.prefill(range(100, 190))
            session.step(5)
            session.snapshot()


# ---- cancel


@pytest.mark.parametrize("begin", [lambda s: s.rebuild(), lambda s: s.compare(LONG, BOTH, GREEDY)])
def test_cancels_from_another_thread_end_this_and_nothing_else(session, begin):
    session.switch("streaming", budget=64)
    list(session.answer(LONG, GREEDY))
    done, canceled = threading.Event(), count()

    def cancel() -> None:
        while not done.wait(0.002):
            session.cancel()
            next(canceled)

    thread = threading.Thread(target=cancel)
    thread.start()
    try:
        began = time.monotonic()
        while time.monotonic() - began < 0.3 or not next(canceled):
            list(begin(session))
            check_integrity(session._kv.state)
            assert session.total == len(session._loop.stored.ids)
    finally:
        done.set()
        thread.join()
    assert session.info.mode == "streaming"
    last = list(session.answer(HELLO, GREEDY))[-1]
    assert isinstance(last, Finished)
    assert last.reason != "stopped"


# ---- a fork


def outcome(use) -> str:
    """What a fork of this process says of something that is done there; fails where it hangs."""
    reading, writing = os.pipe()
    if not (child := os.fork()):
        try:
            said = repr(use())
        except BaseException as error:  # noqa: BLE001  # whatever it is: a fork that came back here would run the tests
            said = str(error)
        os.write(writing, said.encode()[:4000])
        os._exit(0)
    os.close(writing)
    timer = threading.Timer(PATIENCE_S, os.kill, (child, 9))
    timer.start()
    with open(reading, "rb") as answer:
        said = answer.read().decode()
    timer.cancel()
    assert os.waitpid(child, 0)[1] == 0
    return said


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_a_fork_ends_what_is_in_progress_and_writes_nothing(model, tmp_path, monkeypatch):
    session = Session(model, Load(keeping=Keeping(0, 2**30, str(tmp_path))))
    monkeypatch.setattr(session._prefix_cache._writer, "begin", lambda jobs: pytest.fail("it writes"))
    with monkeypatch.context() as patch:
        patch.setattr(session._prefix_cache, "save", lambda: None)
        answer = session.answer(LONG, GREEDY, None, "one")
        next(answer)
        assert "forked process" in outcome(lambda: list(answer))
        assert [type(event) for event in answer][-1] is Finished
    answer = session.answer(LONG, GREEDY, None, "one")
    next(answer)
    assert outcome(answer.close) == "None"
    assert outcome(session.close) == "None"
    monkeypatch.undo()
    answer.close()


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_a_fork_loads_no_model(session):
    load("bundled", device="cpu").close()
    compared = session.compare(HELLO, BOTH, GREEDY)
    next(compared)
    assert "forked process" in outcome(lambda: list(compared))
    assert "forked process" in outcome(compared.close)
    assert "No model can be loaded" in outcome(lambda: load("bundled", device="cpu"))
    assert outcome(lambda: session.total) == repr(session.total)
    for use in (lambda: list(session.chat("Hello")), lambda: session.switch("streaming"), lambda: session.step(5)):
        assert "forked process" in outcome(use)


# ---- the end of the process

ENDS = """
import sys
from kvchat.engine.worker import Loader
from kvchat.protocol.messages import Keeping, Load, Sampling, Turn
session = Loader().open_session(Load(device="cpu", keeping=Keeping(0, 2**30, sys.argv[1])), lambda stage: None)
turns = (Turn("user", "The sea was calm and the whale went on. " * 30),)
list(session.answer(turns, Sampling(max_new_tokens=4), None, "one"))
answer = session.answer((*turns, Turn("user", "And?")), Sampling(max_new_tokens=4), None, "one")
for _ in range(3):
    next(answer)
"""


def test_a_process_that_closes_nothing_ends_without_a_word(tmp_path):
    """It was aborted while the thread that writes pages was copying one."""
    ran = subprocess.run(
        [sys.executable, "-c", ENDS, str(tmp_path)], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")
