"""Memory that runs out inside what a session is asked for: a clear error, and the same works afterwards, exactly.

At some places of each operation; at every 50th operation of torch, in every mode, with KVCHAT_TEST_FAULTS=all.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from itertools import product

import pytest
from support.memory_faults import EVERYWHERE, MemoryRunsOut

from kvchat.config.modes import mode_names
from kvchat.engine.session import Session
from kvchat.errors import DoesNotFitError
from kvchat.kv.inspect import check_integrity
from kvchat.protocol.messages import Sampling, Turn

TALE = (Turn("user", "The sea was calm and the whale went on. " * 12 + "Tell me a short story."),)
GREEDY = Sampling(temperature=0, max_new_tokens=12)
SMALL = {mode: {"budget": 192} for mode in ("streaming", "speculative", "sync")}
PLACES, EVERY = 3, 50


def text_of(session: Session) -> str:
    return list(session.answer(TALE, GREEDY))[-1].text


def rebuilt(session: Session) -> int:
    return list(session.rebuild())[-1].tokens


def switched(session: Session) -> str:
    session.switch("sync")
    return text_of(session)


def ids_of(session: Session) -> list[int]:
    return list(session._loop.stored.ids)


OPERATIONS: dict[str, Callable[[Session], object]] = {"answer": text_of, "rebuild": rebuilt, "switch": switched}


def begun(model, mode: str, operation: str) -> Session:
    """A session before the operation: with an answer of streaming's to rebuild, else empty."""
    if operation != "rebuild":
        session = Session(model, mode, SMALL.get(mode, {}))
        if operation == "switch":
            session.prefill([10 + i % 500 for i in range(300)])
        return session
    session = Session(model, "streaming", {"budget": 64, "R": 1, "sigma": 0, "delta": 0})
    list(session.answer(TALE, Sampling(temperature=0, max_new_tokens=40)))
    session.switch(mode, **SMALL.get(mode, {}))
    return session


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "operation"),
    list(product(mode_names(), OPERATIONS))
    if EVERYWHERE
    else [("speculative", "answer"), ("freeze", "rebuild"), ("streaming", "switch")],
)
def test_a_session_goes_on_exactly_wherever_memory_ran_out(model, mode, operation):
    run = OPERATIONS[operation]
    clean = begun(model, mode, operation)
    with MemoryRunsOut() as counting:
        expected = run(clean)
    every = EVERY if EVERYWHERE else counting.count // PLACES
    for place in range(1, counting.count + 1, every):
        for places in ((place,), (place, place + 1)):
            session = begun(model, mode, operation)
            with suppress(DoesNotFitError), MemoryRunsOut(*places):  # a prompt is read in smaller pieces then
                run(session)
            again = run(session)
            check_integrity(session._kv.state)
            if operation == "rebuild":  # what was to be read again and was not is read with the next prompt
                session.prefill(ids_of(clean)[session.total :]) if session.total < clean.total else None
            elif mode == "freeze":  # its timers outlive an answer that failed
                continue
            else:
                assert again == expected, places
            assert session.snapshot().reduced_tokens == clean.snapshot().reduced_tokens, places
            assert ids_of(session) == ids_of(clean)
            for layer in range(clean.info.layers):
                pairs = zip(*(one._kv.state.host.dense(layer, clean.total) for one in (session, clean)), strict=True)
                assert all((mine - its).abs().max() < 1e-3 for mine, its in pairs), places
