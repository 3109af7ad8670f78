"""Memory that runs out anywhere inside a session's operations: a clear error, and the session stays exact.

Every operation of every mode on several architectures fails at sampled places, once and twice in a row; at more
places in the long form (support/memory_faults.py). Tests marked cuda run on the fake CUDA device.
"""

from collections.abc import Callable
from functools import cache
from itertools import cycle, product
from typing import NamedTuple

import pytest
import torch
from support.attended_logits import logits_over_attended
from support.integrity import check_integrity, stored_kv
from support.loads import load_in
from support.memory_faults import PLACES, MemoryRunsOut, places_of
from support.tiny_runner import PARAMS, load_tiny, token_ids
from support.toy_model import calibration

from kvchat.engine import calibration as measured
from kvchat.engine.runner import geometry_of
from kvchat.engine.sampler import Sampler
from kvchat.engine.session import Session
from kvchat.errors import DoesNotFitError
from kvchat.kv.geometry import GROWTH_HEADROOM
from kvchat.kv.manager import SlotsState, explained
from kvchat.models.load import LoadedModel
from kvchat.protocol.messages import Sampling

TWO_LAYERS = {"num_hidden_layers": 2}
HYBRID = "qwen3_5"
ARCHITECTURES: dict[str, dict[str, object]] = {
    "llama": TWO_LAYERS,
    "gemma2": TWO_LAYERS,
    "deepseek_v3": TWO_LAYERS,
    HYBRID: {"num_hidden_layers": 3, "layer_types": ["linear_attention", *["full_attention"] * 2]},
}
FAKE_CUDA_COST = 8  # of a step there, in CPU steps
TOKENS, KEPT, LATER = 170, 140, token_ids(400, seed=3)


@cache
def tiny(name: str, device: str) -> LoadedModel:
    return load_tiny(name, device, **ARCHITECTURES[name])


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Treat the tiny models' heads as calibrated, and reserve little headroom."""
    monkeypatch.setattr(measured, "find", lambda name, *_: calibration(geometry_of(tiny(name, "cpu"))))
    for device in GROWTH_HEADROOM:
        monkeypatch.setitem(GROWTH_HEADROOM, device, 16)


# ---- the operations


class Conversation(NamedTuple):
    """A conversation in a mode; its operations may be repeated after they failed."""

    session: Session
    row: str

    def step(self) -> None:
        self.session.step(7)

    def fill(self) -> None:
        """The step after a prompt was closed before the mode filled its slots."""
        self.session._kv._slots = SlotsState.STALE
        self.session.step(7)

    def prefill(self) -> None:
        if ids := LATER[self.session.total : TOKENS + 24]:
            self.session.prefill(ids)

    def truncate(self) -> None:
        if self.session.total >= KEPT:
            self.session.truncate(KEPT)
        else:  # its last token could not be recomputed
            self.session.prefill(LATER[self.session.total : KEPT])

    def switch(self) -> None:
        rows = list(PARAMS)
        mode, params = PARAMS[rows[(rows.index(self.row) + 1) % len(rows)]]
        self.session.switch(mode, **params)

    def rebuild(self) -> None:
        if self.session.total == TOKENS:
            list(self.session.rebuild())
        else:  # what could not be recomputed comes with the next prompt
            self.session.prefill(LATER[self.session.total : TOKENS])


OPERATIONS: dict[str, Callable[[Conversation], None]] = {
    "step": Conversation.step,
    "slots grow": Conversation.step,
    "host pool grows": Conversation.step,
    "fill": Conversation.fill,
    "prefill": Conversation.prefill,
    "truncate": Conversation.truncate,
    "switch": Conversation.switch,
    "rebuild": Conversation.rebuild,
}
EAGER = ("streaming", {"budget": 64, "R": 1, "sigma": 0, "delta": 0})


def start(model: LoadedModel, row: str, operation: str) -> Conversation:
    """A session in a mode, with stored tokens, right before an operation."""
    mode, params = EAGER if operation == "rebuild" else PARAMS[row]
    session = Session(model, load_in(mode, params))
    session.prefill(LATER[: TOKENS - 4])
    session._runner.chunk = 16 if operation == "prefill" else 64
    for token in LATER[TOKENS - 4 : TOKENS]:
        session.step(token)
    if operation == "rebuild":
        session.switch(PARAMS[row][0], **PARAMS[row][1])
    room = {
        "slots grow": lambda: session._kv.state.capacity,
        "host pool grows": lambda: session._kv.state.host.capacity,
    }
    while operation in room and session.total < room[operation]():
        session.step(7)
    return Conversation(session, row)


# ---- the tests


def fail_at_each_place(device: str, architecture: str, row: str, operation: str) -> int:
    """Run out of memory at each place inside an operation; return how often it did."""
    model, run, injected = tiny(architecture, device), OPERATIONS[operation], 0
    clean = start(model, row, operation)
    with MemoryRunsOut() as counting:
        run(clean)
    total, logits = clean.session.total, clean.session.step(9)
    cost = 1 if device == "cpu" else FAKE_CUDA_COST
    for places in places_of(counting.count, f"{architecture} {row} {operation}", cost):
        conversation = start(model, row, operation)
        before = Before(conversation, operation)
        try:
            with MemoryRunsOut(*places):
                run(conversation)
        except DoesNotFitError:
            before.check()
            run(conversation)
        injected += 1
        assert conversation.session.total == total, places
        check_last_step(conversation.session, conversation.session.step(9), logits)
    return injected


class Before:
    """What a session stored before an operation; ``check`` asserts that it survived a failure.

    Except the tokens that ``truncate`` drops, the one that it recomputes, and what ``rebuild`` replaces.
    """

    def __init__(self, conversation: Conversation, operation: str) -> None:
        self._session, self._mode = conversation.session, conversation.session._kv.mode
        self._stored = stored_kv(self._session._kv.state)
        kept = {"truncate": KEPT - 1, "rebuild": self._session._loop.stored.first_reduced}
        self._kept = kept.get(operation, self._session.total)

    def check(self) -> None:
        session, kept = self._session, self._kept
        assert session._kv.mode is self._mode
        assert session._kv._prefill is None, "its staged keys and values are freed"
        assert kept <= session.total == len(session._loop.stored.ids)
        for was, now in zip(self._stored, stored_kv(session._kv.state), strict=True):
            assert torch.equal(was[:, :kept], now[:, :kept])
        session.snapshot()


def check_last_step(session: Session, logits: torch.Tensor, clean: torch.Tensor) -> None:
    """A step read what it reports; in full mode its logits are those of a session without failures."""
    check_integrity(session._kv.state)
    if session.model.name != HYBRID:  # its recurrent state already includes the token
        assert (logits - logits_over_attended(session._runner, 9)).abs().max() < 1e-4
    if session._kv.mode.name == "full":
        assert (logits - clean).abs().max() < 1e-4


ROWS = list(product(PARAMS, OPERATIONS))
# Each mode class once in the short form: two rows differ from others in parameters only.
ONE_PER_CLASS = [case for case in ROWS if case[0] not in ("speculative-reuse", "freeze-paper")]
CASES = list(product(ARCHITECTURES, ROWS)) if PLACES else list(zip(cycle(ARCHITECTURES), ONE_PER_CLASS, strict=False))


@pytest.mark.parametrize(("architecture", "case"), CASES)
def test_nothing_is_lost_wherever_memory_runs_out(architecture, case, count):
    count["failures of memory"] += fail_at_each_place("cpu", architecture, *case)


@pytest.mark.cuda
@pytest.mark.parametrize("case", ROWS if PLACES else [("speculative", "switch")])
def test_nothing_is_lost_wherever_memory_runs_out_on_a_gpu(case, count):
    count["failures of memory"] += fail_at_each_place("cuda", "llama", *case)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_failed_draft_round_still_stores_its_token(device, count):
    """In a ring of slots, as on a GPU: rejected drafts leave it, and the tokens that they displaced come back."""

    def start():
        session = Session(tiny("llama", device), load_in("full", {"resident": 64, "draft": "lookup"}))
        session.prefill(LATER[:TOKENS])
        session._kv.mode.drafter.draft = lambda *_: [11, 12, 13]
        return session, Sampler(Sampling(temperature=0), session.model.vocab, session.model.device)

    def advance(session, sampler):
        notes, advance = [], session._loop._advance(7, sampler, 3)
        with explained(session._kv, "answering"), session._loop._all_noted():
            while True:
                try:
                    notes.append(next(advance))
                except StopIteration as end:
                    return notes, end.value[0]

    clean, sampler = start()
    with MemoryRunsOut() as counting:
        assert advance(clean, sampler) == ([], [])
    logits = clean.step(9)
    for places in places_of(counting.count, "drafts", 1 if device == "cpu" else FAKE_CUDA_COST):
        session, sampler = start()
        before = stored_kv(session._kv.state)
        try:
            with MemoryRunsOut(*places):
                notes, accepted = advance(session, sampler)
            assert (len(notes), accepted) == (1, [])
            assert session._kv.mode.drafts_failed
        except DoesNotFitError:
            assert len(places) > 1, "the step had no memory either"
            assert session.total == len(session._loop.stored.ids) == TOKENS
            session.step(7)
        count["failures of memory"] += 1
        assert session.total == len(session._loop.stored.ids) == TOKENS + 1
        assert all(
            torch.equal(was, now[:, :TOKENS]) for was, now in zip(before, stored_kv(session._kv.state), strict=True)
        )
        check_last_step(session, session.step(9), logits)


def test_failed_head_calibration_is_retried(monkeypatch):
    monkeypatch.setattr(measured, "find", lambda *_: None)
    session = Session(tiny("llama", "cpu"))
    session.prefill(LATER[:300])
    with monkeypatch.context() as patch:
        patch.setattr(measured, "on_prompt", out_of_memory)
        session.switch("sync", budget=80, m=3)
        session.prefill(LATER[300:310])
    assert (session.info.mode, session._kv.mode.needs_calibration) == ("sync", True)
    session.prefill(LATER[310:320])
    assert not session._kv.mode.needs_calibration


def out_of_memory(*_args: object) -> None:
    raise torch.OutOfMemoryError("no memory left")
