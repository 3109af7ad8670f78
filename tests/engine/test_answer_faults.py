"""Memory that runs out during an answer: asked again, the model gives the same answer from the same K/V."""

from contextlib import suppress

import pytest
from support.integrity import check_integrity, stored_kv
from support.loads import load_in
from support.memory_faults import PLACES, MemoryRunsOut, places_of

from kvchat.config.modes import mode_names
from kvchat.engine.session import Session
from kvchat.errors import DoesNotFitError
from kvchat.protocol.messages import Sampling, Turn

TALE = (Turn("user", "The sea was calm and the whale went on. " * 12 + "Tell me a short story."),)
GREEDY = Sampling(temperature=0, max_new_tokens=12)
SMALL = {mode: {"budget": 192} for mode in ("streaming", "speculative", "sync")}
COST = 3  # of an answer, in steps of a tiny model
MODES = mode_names() if PLACES else ["speculative"]  # test_session_faults has all


def answer_text(session: Session) -> str:
    return list(session.answer(TALE, GREEDY))[-1].text


@pytest.mark.slow("three answers for each place")
@pytest.mark.parametrize("mode", MODES)
def test_retried_answer_is_the_same_wherever_memory_ran_out(model, mode, count):
    clean = Session(model, load_in(mode, SMALL.get(mode, {})))
    with MemoryRunsOut() as counting:
        expected = answer_text(clean)
    for places in places_of(counting.count, mode, COST):
        session = Session(model, load_in(mode, SMALL.get(mode, {})))
        with suppress(DoesNotFitError), MemoryRunsOut(*places):  # a prompt is then processed in smaller chunks
            answer_text(session)
        count["failures of memory"] += len(places)
        assert answer_text(session) == expected, places
        check_integrity(session._kv.state)
        assert session.snapshot().reduced_tokens == clean.snapshot().reduced_tokens, places
        assert session._loop.stored.ids == clean._loop.stored.ids
        for layer in range(clean.info.layers):
            assert session.attended(layer).sum() == clean.attended(layer).sum(), places
        for mine, its in zip(stored_kv(session._kv.state), stored_kv(clean._kv.state), strict=True):
            assert (mine - its).abs().max() < 1e-3, places
