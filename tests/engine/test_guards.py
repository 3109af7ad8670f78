"""Misuse of the Python API: each mistake is a clear error, and nothing stored is lost."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from itertools import count, product
from pathlib import Path

import numpy as np
import pytest
import torch
from support.integrity import check_integrity
from support.loads import load_in
from support.patience import PATIENCE_S

from kvchat.config import modes
from kvchat.config.modes import MAX_COUNT, mode_names
from kvchat.engine import answer as answers
from kvchat.engine import session as sessions
from kvchat.engine.answer import Released
from kvchat.engine.session import Session, load, open_session
from kvchat.errors import KvchatError, UsageError
from kvchat.models.load import LoadedModel
from kvchat.paths import bundled_model_dir
from kvchat.protocol.messages import Finished, Keeping, Load, Prefilled, Sampling, Started, Turn, Variant

GREEDY = Sampling(temperature=0, max_new_tokens=6)
HELLO = (Turn("user", "Hello! My name is Maria."),)


BOTH = (Variant("full"), Variant("streaming", {"budget": 128}))
CHANGES = {
    "step": lambda s: s.step(5),
    "prefill": lambda s: s.prefill([5, 6]),
    "truncate": lambda s: s.truncate(0),
    "switch": lambda s: s.switch("streaming", budget=128),
    "keep_pages": lambda s: s.keep_pages("int8"),
    "forget": lambda s: s.forget("other"),
    "chat": lambda s: list(s.chat("Hello")),
    "answer": lambda s: list(s.answer(HELLO, GREEDY)),
    "rebuild": lambda s: list(s.rebuild()),
    "resume": lambda s: list(s.resume("other", HELLO)),
    "compare": lambda s: list(s.compare(HELLO, BOTH, GREEDY)),
}
QUERIES = (
    *(lambda s: s.prices(), lambda s: s.attended(0), lambda s: s.text(0, 1), lambda s: s.snapshot()),
    *(lambda s: s.total, lambda s: s.info, lambda s: s.model, lambda s: s.withdrawable),
    *(lambda s: s.hide_needle(300, 1), lambda s: s.details()),
)


def test_closed_session_raises_a_clear_error(session):
    session.close()
    for use in (*CHANGES.values(), *QUERIES):
        with pytest.raises(UsageError, match="closed"):
            use(session)
    assert session.token_ids == []
    session.cancel()
    session.close()


def test_misspelled_attribute_raises_attribute_error():
    with pytest.raises(AttributeError, match="spelled"):
        Released().spelled  # noqa: B018


def test_first_answer_to_begin_wins(session):
    first, second = session.chat("One?", GREEDY), session.chat("Two?", GREEDY)
    next(second)
    with pytest.raises(UsageError, match="in progress"):
        next(first)
    list(second)
    assert [turn.content for turn in session._turns if turn.role == "user"] == ["Two?"]


def test_closed_or_dropped_answer_allows_the_next(session):
    session.cancel()  # which stops nothing
    answer = session.chat("One?", GREEDY)
    next(answer)
    answer.close()
    next(session.chat("Two?", GREEDY))
    assert "".join(session.chat("Three?", GREEDY))
    assert len(session.token_ids) == GREEDY.max_new_tokens
    assert [turn.content for turn in session._turns if turn.role == "user"] == ["One?", "Two?", "Three?"]


def test_invalid_ids_and_layers_are_refused(session):
    for token in (-1, 10**6, 2**70):
        for use in (session.step, lambda it: session.prefill([5, it]), session.attended):
            with pytest.raises(UsageError, match="There is no"):
                use(token)
    for value in (5.0, "5", None):  # not whole numbers
        for use in (session.step, lambda it: session.prefill([5, it])):
            with pytest.raises(UsageError):
                use(value)
    for ids in (torch.tensor([[5, 6]]), torch.tensor(5), np.array(5), torch.empty(0), iter(()), 5):
        with pytest.raises(UsageError):
            session.prefill(ids)
    with pytest.raises(ZeroDivisionError):
        session.prefill(5 // n for n in (1, 0))
    assert session.total == 0


def test_wrong_sampling_types_are_refused_and_numbers_parsed(session):
    wrong = {"temperature": "hot", "top_k": 1.5, "stop": 5, "max_new_tokens": None, "seed": object()}
    for given in (*({name: value} for name, value in wrong.items()), {"stop": (1,)}, {"stop": ("",)}):
        with pytest.raises(UsageError):
            list(session.answer(HELLO, Sampling(**given)))
    events = list(session.answer(HELLO, Sampling(temperature=0, max_new_tokens="3")))
    assert events[-1].stats.generated_tokens == 3


# ---- cancel


@pytest.mark.parametrize("begun", [False, True])
def test_cancel_stops_an_answer_before_its_prefill(session, begun):
    answer = session.answer(HELLO, GREEDY)
    if begun:
        assert isinstance(next(answer), Started)
    session.cancel()
    events = list(answer)
    assert not any(isinstance(event, Prefilled) for event in events)
    assert (events[-1].reason, events[-1].text) == ("stopped", "")
    assert list(session.answer(HELLO, GREEDY))[-1].text


# ---- Threads that use one session at once: one completes its call, and the others get an error


PROMPT = range(100, 300)
STEPS = 5  # of each thread
PARAMS = {"streaming": {"budget": 128}, "speculative": {"budget": 128}, "sync": {"budget": 128}}
AT_ONCE = "Another thread is using the session"


def in_mode(model: LoadedModel, mode: str) -> Session:
    session = Session(model)
    session.switch(mode, **PARAMS.get(mode, {}))
    return session


def run_at_once(*uses: Callable[[], object]) -> list[BaseException]:
    """Run each in its own thread; return what they raised."""
    raised: list[BaseException] = []

    def run(use: Callable[[], object]) -> None:
        try:
            use()
        except BaseException as error:  # noqa: BLE001  # whatever it is, the test reports it
            raised.append(error)

    threads = [threading.Thread(target=run, args=(use,)) for use in uses]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


def retry_while_busy(use: Callable[[], object]) -> None:
    """Retry, as fast as possible, until no other thread is inside."""
    while True:
        try:
            use()
        except UsageError as error:
            if AT_ONCE not in str(error):
                raise
        else:
            return


def matches_one_thread(session: Session, again: Session) -> bool:
    """True if what is stored reads as if one thread had stored the same tokens."""
    check_integrity(session._kv.state)
    stored = session._loop.stored.ids
    assert session.total == len(stored)
    again.prefill(stored[: len(PROMPT)])
    for token in stored[len(PROMPT) :]:
        again.step(token)
    return torch.allclose(session.step(7), again.step(7), atol=1e-4)


@pytest.mark.parametrize("mode", mode_names())
def test_two_stepping_threads_match_one_thread(model, mode):
    """Freeze, streaming and sync lost their integrity silently."""
    session = in_mode(model, mode)
    session.prefill(PROMPT)

    def steps(token):
        for _ in range(STEPS):
            retry_while_busy(lambda: session.step(token))

    assert run_at_once(lambda: steps(5), lambda: steps(6)) == []
    assert sorted(session._loop.stored.ids[len(PROMPT) :]) == [5] * STEPS + [6] * STEPS
    assert matches_one_thread(session, in_mode(model, mode))


def test_calls_are_refused_while_another_thread_is_inside(model):
    session, entered, done = Session(model), threading.Event(), threading.Event()
    session.prefill(PROMPT)
    forward = session._runner._forward
    session._runner._forward = lambda: (entered.set(), done.wait(), forward())[-1]
    thread = threading.Thread(target=session.step, args=(9,))
    thread.start()
    entered.wait()
    try:
        for use in (*CHANGES.values(), lambda s: s.enter(s._kv.mode.parameters)):
            with pytest.raises(UsageError, match=AT_ONCE):
                use(session)
        session.cancel()
    finally:
        done.set()
        thread.join()
    session._runner._forward = forward
    assert session._loop.stored.ids == [*PROMPT, 9]
    assert matches_one_thread(session, Session(model))


def test_refused_comparison_is_undone_after_a_concurrent_switch(model, monkeypatch):
    session = Session(model)
    switching, refused, done = threading.Event(), threading.Event(), threading.Event()
    session.prefill(PROMPT)
    compared = session.compare(HELLO, [Variant("full"), Variant("streaming", {"budget": 128})], GREEDY)
    next(compared)
    switch = session._switcher.switch

    def slow(mode, params):
        switching.set()
        done.wait()
        return switch(mode, params)

    session._switcher.switch = slow
    thread = threading.Thread(target=session.switch, args=("streaming",), kwargs={"budget": 128})
    thread.start()
    switching.wait()
    try:
        in_use = answers._in_use
        monkeypatch.setattr(answers, "_in_use", lambda: refused.set() or in_use())
        comparing = threading.Thread(target=run_at_once, args=(lambda: list(compared),))
        comparing.start()
        assert refused.wait(PATIENCE_S)
    finally:  # else the thread would hold the session, for which later tests would wait
        done.set()
        thread.join()
    comparing.join()
    assert session._loop.stored.ids == list(PROMPT)
    assert matches_one_thread(session, in_mode(model, session.info.mode))


def test_threads_may_take_turns(model):
    session = Session(model)
    answer = session.answer(HELLO, GREEDY)
    events: list[object] = []
    while run_at_once(lambda: events.append(next(answer))) == []:
        assert run_at_once(lambda: session.switch("streaming", budget=128)) == []
    assert type(events[-1]).__name__ == "Finished"
    # A thread that is inside may enter again.
    nested = session.answer(HELLO, GREEDY, lambda generated: session.switch("streaming", budget=128 + 32 * generated))
    assert list(nested)[-1].reason == "length"


# ---- Other misuse of the Python API: forks in the middle of work, odd arguments, a process that ends


LONG = (Turn("user", "The sea was calm and the whale went on. " * 30),)


# ---- closed


@pytest.mark.parametrize(
    "begin", [lambda s: s.chat("Hello", GREEDY), lambda s: s.rebuild(), lambda s: s.compare(LONG, BOTH, GREEDY)]
)
def test_generators_raise_after_close(model, begin):
    session = Session(model, load_in("streaming", {"budget": 64}))
    list(session.answer(LONG, GREEDY))
    in_progress = begin(session)
    next(in_progress)
    session.close()
    with pytest.raises(UsageError, match="closed"):
        list(in_progress)


def test_answer_that_closes_its_session_raises(model):
    session = Session(model)
    with pytest.raises(UsageError, match="closed"):
        list(session.answer(HELLO, GREEDY, lambda generated: session.close() if generated == 2 else None))


# ---- one at a time


@pytest.mark.parametrize(
    "begin", [lambda s: s.answer(LONG, GREEDY), lambda s: s.rebuild(), lambda s: s.compare(HELLO, BOTH, GREEDY)]
)
def test_other_calls_are_refused_while_one_is_in_progress(session, begin):
    session.switch("streaming", budget=64)
    list(session.answer(LONG, GREEDY))
    before = session.total
    in_progress = begin(session)
    next(in_progress)
    for use in ("chat", "answer", "rebuild", "prefill", "step", "truncate", "forget", "resume", "compare"):
        with pytest.raises(UsageError, match="answer"):
            CHANGES[use](session)
    in_progress.close()
    assert 0 < session.total <= before
    check_integrity(session._kv.state)
    assert list(session.answer(HELLO, GREEDY))[-1].text


# ---- arguments


def test_ids_may_come_from_any_iterable(session):
    for ids in (np.array([5, 6]), torch.tensor([5, 6]), range(5, 7), iter([5, 6])):
        session.prefill(ids)
    session.step(np.int64(5))
    session.step(torch.tensor(6))
    assert session._loop.stored.ids == [5, 6] * 5
    assert {type(token) for token in session._loop.stored.ids} == {int}


def test_unknown_names_are_refused(session):
    for use in (lambda: session.keep_pages("int4"), lambda: load("~nobody-has-this-name/model", device="cpu")):
        with pytest.raises(UsageError):
            use()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (Load(mode="ful"), 'no KV mode "ful"'),
        (Load(mode_params={"ful": {}}), 'no KV mode "ful"'),
        (load_in("streaming", {"budget": 64}, mode_params={"streaming": {"budget": 1}}), "budget = 1"),
        (Load(mode_params={"freeze": {"tau": "high"}}), "freeze: tau = 'high'"),
        (Load(given={"sync": {"rhoo": 1}}), 'no parameter "rhoo"'),
        (Load(host_dtype="int4"), 'cannot be stored in "int4"'),
    ],
)
def test_invalid_values_are_refused_before_loading(monkeypatch, options, message):
    monkeypatch.setattr(sessions, "load_model", lambda *_: pytest.fail("loaded"))
    with pytest.raises(UsageError, match=message):
        open_session(options)


def test_load_arguments_reach_the_model_and_the_session(monkeypatch, model):
    seen = []
    monkeypatch.setattr(sessions, "load_model", lambda request, progress: seen.append(request) or model)
    session = load("there", device="cpu", mode="streaming", fast=False, host_dtype="int8", system="Short.", budget=64)
    assert seen == [load_in("streaming", {"budget": 64}, model="there", device="cpu", fast=False, host_dtype="int8")]
    assert (session.info.mode, session.info.params["budget"]) == ("streaming", 64)
    assert session._kv.state.quantizes
    assert session._turns == (Turn("system", "Short."),)


@pytest.mark.parametrize("mode", mode_names())
def test_modes_work_or_are_refused_with_any_number(model, mode):
    """25 pairs of a parameter and a number were accepted, and every step after them overflowed (findings, 17)."""
    for name, number in product(modes.registered()[mode].model_fields, (MAX_COUNT, MAX_COUNT + 1, 1e300, 5e-324)):
        session = Session(model)
        try:
            session.switch(mode, **{name: number})
        except KvchatError:
            assert session.info.mode == "full"
        else:
            session.prefill(range(100, 190))
            session.step(5)
            session.snapshot()


# ---- cancel


@pytest.mark.parametrize(
    "begin",
    [
        lambda s: s.answer(HELLO, Sampling(temperature=0, max_new_tokens=200)),
        lambda s: s.rebuild(),
        lambda s: s.compare(LONG, BOTH, GREEDY),
    ],
)
def test_cancel_from_another_thread_ends_only_the_running_call(session, begin):
    session.switch("streaming", budget=64)
    list(session.answer(LONG, GREEDY))
    done, canceled = threading.Event(), count()

    def cancel():
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


def outcome_in_fork(use) -> str:
    """The result or error of a call in a fork of this process; fails if it hangs."""
    reading, writing = os.pipe()
    if not (child := os.fork()):
        try:
            text = repr(use())
        except BaseException as error:  # noqa: BLE001  # whatever it is: a fork that came back here would run the tests
            text = str(error)
        os.write(writing, text.encode()[:4000])
        os._exit(0)
    os.close(writing)
    timer = threading.Timer(PATIENCE_S, os.kill, (child, 9))
    timer.start()
    with open(reading, "rb") as answer:
        text = answer.read().decode()
    timer.cancel()
    assert os.waitpid(child, 0)[1] == 0
    return text


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_fork_ends_calls_in_progress_and_writes_nothing(model, tmp_path, monkeypatch):
    session = Session(model, Load(keeping=Keeping(0, 2**30, str(tmp_path))))
    monkeypatch.setattr(session._prefix_cache._writer, "begin", lambda jobs: pytest.fail("it writes"))
    with monkeypatch.context() as patch:
        patch.setattr(session._prefix_cache, "save", lambda: None)
        answer = session.answer(LONG, GREEDY, None, "one")
        next(answer)
        assert "forked process" in outcome_in_fork(lambda: list(answer))
        assert [type(event) for event in answer][-1] is Finished
    answer = session.answer(LONG, GREEDY, None, "one")
    next(answer)
    assert outcome_in_fork(answer.close) == "None"
    assert outcome_in_fork(session.close) == "None"
    monkeypatch.undo()
    answer.close()


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_fork_cannot_load_or_use_a_model(session):
    other = load(Path(bundled_model_dir()), device="cpu")
    assert "".join(other.chat("Hello", GREEDY))
    other.close()
    compared = session.compare(HELLO, BOTH, GREEDY)
    next(compared)
    assert "forked process" in outcome_in_fork(lambda: list(compared))
    assert "forked process" in outcome_in_fork(compared.close)
    assert "No model can be loaded" in outcome_in_fork(lambda: load("bundled", device="cpu"))
    assert outcome_in_fork(lambda: session.total) == repr(session.total)
    for use in (lambda: list(session.chat("Hello")), lambda: session.switch("streaming"), lambda: session.step(5)):
        assert "forked process" in outcome_in_fork(use)


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


def test_process_that_closes_nothing_ends_silently(tmp_path):
    """It was aborted while the thread that writes pages was copying one."""
    ran = subprocess.run(
        [sys.executable, "-c", ENDS, str(tmp_path)], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")
