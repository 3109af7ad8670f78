"""What callers of the Python API may do wrong: each a clear error, and nothing stored is lost by it."""

from __future__ import annotations

import multiprocessing
import threading
import time

import pytest
from support.patience import PATIENCE_S

from kvchat.engine.answer import Released
from kvchat.engine.session import Session, load
from kvchat.errors import KvchatError, UsageError
from kvchat.protocol.messages import Finished, Prefilled, Sampling, Started, Turn

GREEDY = Sampling(temperature=0, max_new_tokens=6)
HELLO = (Turn("user", "Hello! My name is Maria."),)


@pytest.mark.parametrize(
    "use",
    [
        lambda s: list(s.chat("Hello")),
        lambda s: list(s.answer(HELLO, GREEDY)),
        lambda s: list(s.rebuild()),
        lambda s: s.switch("streaming"),
        lambda s: s.prefill([1]),
        lambda s: s.step(1),
        lambda s: s.truncate(0),
        lambda s: s.prices(),
        lambda s: s.attended(0),
        lambda s: s.text(0, 1),
        lambda s: s.snapshot(),
        lambda s: s.total,
        lambda s: s.info,
        lambda s: s.model,
        lambda s: s.withdrawable,
    ],
)
def test_a_closed_session_says_so(session, use):
    session.close()
    with pytest.raises(UsageError, match="closed"):
        use(session)
    session.cancel()
    session.close()


def test_an_answer_that_goes_on_after_close_says_so(session):
    answer = session.chat("Hello", GREEDY)
    next(answer)
    session.close()
    with pytest.raises(UsageError, match="closed"):
        list(answer)


def test_a_misspelled_name_is_no_closed_session():
    with pytest.raises(AttributeError, match="spelled"):
        Released().spelled  # noqa: B018


@pytest.mark.parametrize(
    "use",
    [
        lambda s: s.chat("More?"),
        lambda s: s.answer(HELLO, GREEDY),
        lambda s: s.rebuild(),
        lambda s: s.prefill([1]),
        lambda s: s.step(1),
        lambda s: s.truncate(0),
    ],
)
def test_nothing_else_begins_while_an_answer_is_in_progress(session, model, use):
    pieces = session.chat("Hello", GREEDY)
    text = next(pieces)
    with pytest.raises(UsageError, match="answer"):
        use(session)
    session.switch("streaming")
    text += "".join(pieces)
    assert text == "".join(Session(model).chat("Hello", GREEDY))
    session.truncate(0)


def test_of_two_answers_asked_for_the_first_to_begin_is_given(session):
    first, second = session.chat("One?", GREEDY), session.chat("Two?", GREEDY)
    next(second)
    with pytest.raises(UsageError, match="in progress"):
        next(first)
    list(second)
    assert [turn.content for turn in session._turns if turn.role == "user"] == ["Two?"]


def test_a_closed_or_forgotten_answer_makes_room_for_the_next(session):
    answer = session.chat("One?", GREEDY)
    next(answer)
    answer.close()
    next(session.chat("Two?", GREEDY))
    assert "".join(session.chat("Three?", GREEDY))
    assert [turn.content for turn in session._turns if turn.role == "user"] == ["One?", "Two?", "Three?"]


def test_no_ids_are_refused(session):
    with pytest.raises(UsageError):
        session.prefill([])


@pytest.mark.parametrize("token", [-1, 10**6, 2**70])
def test_ids_and_layers_that_do_not_exist_are_refused(session, token):
    for use in (session.step, lambda it: session.prefill([5, it]), session.attended):
        with pytest.raises(UsageError, match="There is no"):
            use(token)
    assert session.total == 0


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature="hot"),
        Sampling(top_k=1.5),
        Sampling(stop=5),
        Sampling(stop=(1,)),
        Sampling(max_new_tokens=None),
        Sampling(seed=object()),
    ],
)
def test_sampling_of_wrong_types_is_refused(session, sampling):
    with pytest.raises(UsageError):
        list(session.answer(HELLO, sampling))


def test_numbers_given_as_text_are_numbers(session):
    events = list(session.answer(HELLO, Sampling(temperature=0, max_new_tokens="3")))
    assert events[-1].stats.generated_tokens == 3


@pytest.mark.parametrize("mode", ["no such mode"])
def test_an_unknown_mode_is_refused(session, mode):
    with pytest.raises(UsageError):
        session.switch(mode)
    with pytest.raises(UsageError, match="mode"):
        session.switch("full", mode="full", self=1)


# ---- cancel


@pytest.mark.parametrize("begun", [False, True])
def test_an_answer_is_canceled_from_the_moment_it_was_asked_for(session, begun):
    answer = session.answer(HELLO, GREEDY)
    if begun:
        assert isinstance(next(answer), Started)
    session.cancel()
    events = list(answer)
    assert not any(isinstance(event, Prefilled) for event in events)
    assert (events[-1].reason, events[-1].text) == ("stopped", "")
    assert list(session.answer(HELLO, GREEDY))[-1].text


def test_a_cancel_without_an_answer_stops_nothing(session):
    session.cancel()
    assert list(session.answer(HELLO, GREEDY))[-1].reason != "stopped"


def test_cancels_from_another_thread_at_any_moment_end_answers_and_nothing_else(session):
    done = threading.Event()

    def cancel() -> None:
        while not done.wait(0.003):
            session.cancel()

    thread = threading.Thread(target=cancel)
    thread.start()
    try:
        began = time.monotonic()
        while time.monotonic() - began < 0.5:
            last = list(session.answer(HELLO, Sampling(temperature=0, max_new_tokens=200)))[-1]
            assert isinstance(last, Finished)
    finally:
        done.set()
        thread.join()
    assert list(session.answer(HELLO, GREEDY))[-1].reason != "stopped"


# ---- a fork


def in_a_fork(session: Session, queue: multiprocessing.Queue[str]) -> None:
    for use in (lambda: list(session.chat("Hello")), lambda: session.switch("streaming"), lambda: session.step(5)):
        try:
            use()
        except KvchatError as error:
            queue.put(error.title)


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_a_fork_after_loading_is_refused_and_does_not_hang():
    session, context = load("bundled", device="cpu"), multiprocessing.get_context("fork")
    queue: multiprocessing.Queue[str] = context.Queue()
    process = context.Process(target=in_a_fork, args=(session, queue))
    process.start()
    assert all("forked" in queue.get(timeout=PATIENCE_S) for _ in range(3))
    process.join(PATIENCE_S)
    assert process.exitcode == 0
    session.close()
