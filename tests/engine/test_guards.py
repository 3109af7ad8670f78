"""What callers of the Python API may do wrong: each a clear error, and nothing stored is lost by it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from support.integrity import check_integrity

from kvchat.config.modes import mode_names
from kvchat.engine import answer as answers
from kvchat.engine.answer import Released
from kvchat.engine.session import Session
from kvchat.errors import UsageError
from kvchat.models.load import LoadedModel
from kvchat.protocol.messages import Finished, Prefilled, Sampling, Started, Turn, Variant

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
        lambda s: list(s.resume("other", HELLO)),
        lambda s: list(s.compare(HELLO, [Variant("full")], GREEDY)),
        lambda s: s.forget("other"),
        lambda s: s.keep_pages("int8"),
        lambda s: s.hide_needle(300, 1),
        lambda s: s.details(),
    ],
)
def test_a_closed_session_says_so(session, use):
    session.close()
    with pytest.raises(UsageError, match="closed"):
        use(session)
    assert session.token_ids == []
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


# ---- Threads that use one session at once: what one of them does is whole, and the others are told so


PROMPT = range(100, 300)
STEPS = 5  # of each thread
PARAMS = {"streaming": {"budget": 128}, "speculative": {"budget": 128}, "sync": {"budget": 128}}
AT_ONCE = "Another thread is using the session"


def in_mode(model: LoadedModel, mode: str) -> Session:
    session = Session(model)
    session.switch(mode, **PARAMS.get(mode, {}))
    return session


def run_at_once(*uses: Callable[[], object]) -> list[BaseException]:
    """Run each in a thread of its own; what they raised."""
    raised: list[BaseException] = []

    def run(use: Callable[[], object]) -> None:
        try:
            use()
        except BaseException as error:  # noqa: BLE001  # whatever it is, it is no thread's to tell
            raised.append(error)

    threads = [threading.Thread(target=run, args=(use,)) for use in uses]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


def until_it_may(use: Callable[[], object]) -> None:
    """Try until no other thread is inside, as fast as it can."""
    while True:
        try:
            use()
        except UsageError as error:
            if AT_ONCE not in str(error):
                raise
        else:
            return


def as_one_thread_would(session: Session, again: Session) -> bool:
    """Whether what is stored reads as if one thread had stored the same tokens."""
    check_integrity(session._kv.state)
    stored = session._loop.stored.ids
    assert session.total == len(stored)
    again.prefill(stored[: len(PROMPT)])
    for token in stored[len(PROMPT) :]:
        again.step(token)
    return torch.allclose(session.step(7), again.step(7), atol=1e-4)


@pytest.mark.parametrize("mode", mode_names())
def test_two_threads_that_step_as_fast_as_they_can_leave_what_one_would(small_model, mode):
    """Integrity was lost in freeze, streaming and sync without a word."""
    session = in_mode(small_model, mode)
    session.prefill(PROMPT)

    def steps(token: int) -> Callable[[], object]:
        return lambda: [until_it_may(lambda: session.step(token)) for _ in range(STEPS)]

    assert run_at_once(steps(5), steps(6)) == []
    assert sorted(session._loop.stored.ids[len(PROMPT) :]) == [5] * STEPS + [6] * STEPS
    assert as_one_thread_would(session, in_mode(small_model, mode))


USES = {
    "step": lambda s: s.step(5),
    "prefill": lambda s: s.prefill([5, 6]),
    "truncate": lambda s: s.truncate(50),
    "switch": lambda s: s.switch("streaming", budget=128),
    "enter": lambda s: s.enter(s._kv.mode.parameters),
    "keep_pages": lambda s: s.keep_pages("int8"),
    "forget": lambda s: s.forget("other"),
    "chat": lambda s: s.chat("Hello"),
    "answer": lambda s: s.answer(HELLO, GREEDY),
    "rebuild": lambda s: s.rebuild(),
    "resume": lambda s: list(s.resume("other", HELLO)),
    "compare": lambda s: s.compare(HELLO, [Variant("full")], GREEDY),
}


@pytest.fixture
def inside(small_model) -> Iterator[Session]:
    """A session in which another thread is in the middle of a step."""
    session, entered, done = Session(small_model), threading.Event(), threading.Event()
    session.prefill(PROMPT)
    forward = session._runner._forward

    def slow() -> torch.Tensor:
        entered.set()
        done.wait()
        return forward()

    session._runner._forward = slow
    thread = threading.Thread(target=session.step, args=(9,))
    thread.start()
    entered.wait()
    yield session
    done.set()
    thread.join()
    session._runner._forward = forward
    assert session._loop.stored.ids == [*PROMPT, 9]
    assert as_one_thread_would(session, Session(small_model))


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_nothing_begins_while_another_thread_is_inside(inside, use):
    with pytest.raises(UsageError, match=AT_ONCE):
        use(inside)
    inside.cancel()


def test_a_comparison_refused_while_another_thread_switches_puts_back_what_it_displaced_after_that(
    small_model, monkeypatch
):
    session = Session(small_model)
    switching, refused, done = threading.Event(), threading.Event(), threading.Event()
    session.prefill(PROMPT)
    compared = session.compare(HELLO, [Variant("full"), Variant("streaming", {"budget": 128})], GREEDY)
    next(compared)
    switch = session._switcher.switch

    def slow(mode: str, params: dict[str, object]) -> int:
        switching.set()
        done.wait()
        return switch(mode, params)

    session._switcher.switch = slow
    thread = threading.Thread(target=session.switch, args=("streaming",), kwargs={"budget": 128})
    thread.start()
    switching.wait()
    at_once = answers._at_once
    monkeypatch.setattr(answers, "_at_once", lambda: refused.set() or at_once())
    comparing = threading.Thread(target=run_at_once, args=(lambda: list(compared),))
    comparing.start()
    refused.wait()
    done.set()
    thread.join()
    comparing.join()
    assert session._loop.stored.ids == list(PROMPT)
    assert as_one_thread_would(session, in_mode(small_model, session.info.mode))


def test_threads_may_take_turns(small_model):
    session = Session(small_model)
    answer = session.answer(HELLO, GREEDY)
    events: list[object] = []
    while run_at_once(lambda: events.append(next(answer))) == []:
        assert run_at_once(lambda: session.switch("streaming", budget=128)) == []
    assert type(events[-1]).__name__ == "Finished"


def test_a_thread_that_is_inside_may_enter_again(small_model):
    session = Session(small_model)
    asked = session.answer(HELLO, GREEDY, lambda generated: session.switch("streaming", budget=128 + 32 * generated))
    assert list(asked)[-1].reason == "length"
