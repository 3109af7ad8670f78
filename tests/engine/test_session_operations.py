"""Random operations on sessions, in which memory may run out: what is stored and read stays exact.

A few in the plain suite; many on a dozen architectures in the long form (support/memory_faults.py).
"""

from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import cache
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from support.attended_logits import logits_over_attended
from support.byte_tokenizer import MARKERS, SIZE
from support.integrity import check_integrity, stored_kv
from support.memory_faults import PLACES, MemoryRunsOut
from support.tiny_models import CONTEXT
from support.tiny_runner import PARAMS, load_tiny_with_bytes
from support.toy_model import calibration

from kvchat.engine import calibration as measured
from kvchat.engine.runner import geometry_of
from kvchat.engine.session import Session
from kvchat.errors import DoesNotFitError, UsageError
from kvchat.kv.geometry import GROWTH_HEADROOM
from kvchat.protocol.messages import Finished, Sampling, Turn, Variant

HYBRID = "qwen3_5"
ARCHITECTURES = ["llama", "gemma2", HYBRID]
if PLACES:
    ARCHITECTURES += ["qwen3", "mistral", "phi3", "gemma3", "gpt_oss", "cohere2", "glm4", "olmo2", "deepseek_v3"]
EXAMPLES, STEPS = (int(min(PLACES, 1000)), 40) if PLACES else (2, 20)
ROOM = 60  # the most tokens that an operation and the steps after it add
LONG = 180  # tokens at which a new conversation begins: half of what a model reads may be pinned
MARKED = 13  # the most characters that the template writes around a turn
NEAR = 1e-3
PLACE = st.one_of(st.just(0), st.just(0), st.integers(1, 150), st.integers(1, 2000))  # 0: memory does not run out


tiny = cache(load_tiny_with_bytes)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Treat the tiny models' heads as calibrated, and reserve little headroom."""
    monkeypatch.setattr(measured, "find", lambda name, *_: calibration(geometry_of(tiny(name))))
    for device in GROWTH_HEADROOM:
        monkeypatch.setitem(GROWTH_HEADROOM, device, 16)


class Operations(RuleBasedStateMachine):
    """A session and the turns of its conversation; invariants are checked after each operation."""

    architecture = "llama"
    done: ClassVar[Counter[str]] = Counter()

    @initialize(row=st.sampled_from(list(PARAMS)), tokens=st.integers(1, 200))
    def begin(self, row: str, tokens: int) -> None:
        self.session = Session(tiny(self.architecture))
        self.turns: tuple[Turn, ...] = ()
        self._next = 0
        self.session.prefill(self._new(tokens))
        mode, params = PARAMS[row]
        self.session.switch(mode, **params)

    def teardown(self) -> None:
        self.session.close()

    # ---- operations

    @precondition(lambda self: self.has_room)
    @rule(
        letters=st.integers(1, 40),
        tokens=st.integers(1, 8),
        pinned=st.booleans(),
        stops_at=st.integers(0, 20),
        place=PLACE,
    )
    def answer(self, letters: int, tokens: int, pinned: bool, stops_at: int, place: int) -> None:
        """Add a turn; its answer ends by itself or is closed after some events."""
        before = self.turns if sum(len(turn.content) + MARKED for turn in self.turns) < LONG else ()
        turns = (*before, Turn("user", "".join(map(chr, self._letters(letters))), pinned=pinned))

        def answer() -> None:
            events = self.session.answer(turns, Sampling(temperature=1.0, seed=letters, max_new_tokens=tokens))
            for count, event in enumerate(events, 1):
                if count == stops_at:
                    break
                if isinstance(event, Finished):
                    self.turns = (*turns, Turn("assistant", event.text))
            events.close()

        self._do("answer", answer, place)

    @precondition(lambda self: self.turns)
    @rule(tokens=st.integers(1, 8), back=st.integers(1, 3), place=PLACE)
    def answer_again(self, tokens: int, back: int, place: int) -> None:
        turns = self.turns[: max(1, len(self.turns) + 1 - 2 * back)]
        work = self.session.answer(turns, Sampling(temperature=0, max_new_tokens=tokens))
        self._do("answer again", lambda: exhaust(work), place)

    @precondition(lambda self: self.has_room)
    @rule(tokens=st.integers(1, 12), place=PLACE)
    def step(self, tokens: int, place: int) -> None:
        self._do("step", lambda: [self.session.step(token) for token in self._new(tokens)], place)

    @precondition(lambda self: self.has_room)
    @rule(tokens=st.integers(1, ROOM - 12), place=PLACE)
    def prefill(self, tokens: int, place: int) -> None:
        self._do("prefill", lambda: self.session.prefill(self._new(tokens)), place)

    @rule(share=st.floats(0, 1), place=PLACE)
    def truncate(self, share: float, place: int) -> None:
        self._do("truncate", lambda: self.session.truncate(int(share * self.session.total)), place)

    @rule(row=st.sampled_from(list(PARAMS)), place=PLACE)
    def switch(self, row: str, place: int) -> None:
        mode, params = PARAMS[row]
        before, total = self.session._kv.mode, self.session.total
        if not self._do("switch", lambda: self.session.switch(mode, **params), place):
            assert self.session._kv.mode is before
        assert self.session.total == total

    @rule(budget=st.integers(60, 160), place=PLACE)
    def change_budget(self, budget: int, place: int) -> None:
        self._do("budget", lambda: self.session.switch(budget=budget), place, UsageError)

    @precondition(lambda self: self.has_room)
    @rule(rows=st.lists(st.sampled_from(list(PARAMS)), min_size=2, max_size=3), place=PLACE)
    def compare(self, rows: list[str], place: int) -> None:
        turns = (*self.turns, Turn("user", "So?"))
        variants = [Variant(*PARAMS[row]) for row in rows]
        before, mode = list(self.session._loop.stored.ids), self.session._switcher.parameters
        work = self.session.compare(turns, variants, Sampling(temperature=0, max_new_tokens=3))
        done, known = self._do("compare", lambda: exhaust(work), place), self.session._loop.stored.ids
        # If memory ran out even for restoring, the rest is recomputed later, and the mode may be a variant's.
        assert known == before[: len(known)] if place and not done else known == before
        assert self.session._switcher.parameters == mode or (place and not done)

    @precondition(lambda self: self.session.total)
    @rule(place=PLACE)
    def rebuild(self, place: int) -> None:
        """The K/V, and the next logits in full mode, are then those of one prefill."""
        ids = list(self.session._loop.stored.ids)
        if self._do("rebuild", lambda: exhaust(self.session.rebuild()), place):
            clean = Session(tiny(self.architecture))
            clean.prefill(ids)
            assert all(map(near, stored_kv(self.session._kv.state), stored_kv(clean._kv.state)))
            self.session.switch("full")
            assert near(self.session.step(9), clean.step(9))

    # ---- checked after each

    @invariant()
    def the_next_step_reads_what_it_reports(self) -> None:
        session, token = self.session, 7
        known = session._loop.stored
        assert session.total == len(known.ids) == len(known.reduced)
        logits = session.step(token)
        check_integrity(session._kv.state)
        # A recurrent state already includes the token; where streaming moves pinned keys is internal to it.
        moves = session._kv.mode.name == "streaming" and session._kv.state.pins
        if self.architecture != HYBRID and not moves:
            assert near(logits, logits_over_attended(session._runner, token))

    # ---- inside

    def _do(self, name: str, work: Callable[[], Any], place: int, *refusals: type[Exception]) -> bool:
        """Let memory run out at a place inside an operation; return whether it succeeded."""
        self.done["operations"] += 1
        failing = MemoryRunsOut(place, place + 1) if place else nullcontext()
        try:
            with failing:
                work()
            return True
        except DoesNotFitError:
            assert place, f"{name} without a failure"
            return False
        except refusals:
            return False
        finally:
            if place:
                self.done["failures of memory"] += max(0, min(2, failing.count - place + 1))

    @property
    def has_room(self) -> bool:
        return self.session.total + 2 * ROOM < CONTEXT

    def _new(self, tokens: int) -> list[int]:
        """Ids of bytes in a varying sequence."""
        self._next += tokens
        return [(7 * i + i * i // 5) % (SIZE - len(MARKERS)) for i in range(self._next - tokens, self._next)]

    def _letters(self, number: int) -> list[int]:
        return [ord("a") + token % 26 for token in self._new(number)]


def exhaust(work: Iterable[object]) -> None:
    for _ in work:
        pass


def near(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(((one - other).abs() < NEAR).all())


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_sessions_stay_exact_after_random_operations(name, count):
    class OnArchitecture(Operations):
        architecture, done = name, count

    run_state_machine_as_test(OnArchitecture, settings=settings(max_examples=EXAMPLES, stateful_step_count=STEPS))
    assert count["failures of memory"]
