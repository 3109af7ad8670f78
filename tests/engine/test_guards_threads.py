"""Threads that use one session at once: what one of them does is whole, and the others are told so."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from kvchat.config.modes import mode_names
from kvchat.engine import answer as answers
from kvchat.engine.session import Session
from kvchat.errors import UsageError
from kvchat.kv.inspect import check_integrity
from kvchat.models.load import LoadedModel
from kvchat.protocol.messages import Sampling, Turn, Variant

PROMPT = range(100, 300)
STEPS = 5  # of each thread
PARAMS = {"streaming": {"budget": 128}, "speculative": {"budget": 128}, "sync": {"budget": 128}}
HELLO = (Turn("user", "Hello! My name is Maria."),)
GREEDY = Sampling(temperature=0, max_new_tokens=6)
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
