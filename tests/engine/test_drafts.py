"""Drafts: the same tokens and K/V as without, whatever is drafted and wherever an answer ends."""

import os
import random
import sys
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from itertools import cycle

import pytest
import torch
from support.integrity import check_integrity, stored_kv
from support.loads import load_in
from support.memory_faults import PLACES, MemoryRunsOut
from support.real_models import FILES

from kvchat.bench.texts import passages
from kvchat.engine.sampler import Sampler
from kvchat.engine.session import Session
from kvchat.errors import DoesNotFitError, EngineError, KvchatError, UsageError
from kvchat.kv.modes import drafting, full
from kvchat.kv.modes.drafting import Lookup, Window
from kvchat.models.load import load_model
from kvchat.protocol.messages import Finished, Load, Noted, Sampling, Text, Turn, Variant

TURNS = (Turn("user", "Tell me a story about a dragon and a lighthouse."),)
GREEDY = Sampling(temperature=0, max_new_tokens=80)
DRAWN = Sampling(temperature=0.8, top_k=40, top_p=0.9, min_p=0.01, repetition_penalty=1.1, seed=7, max_new_tokens=80)


@pytest.fixture
def drafted(monkeypatch):
    """Set the text to draft from: at every token, a few of the tokens that follow in it, and wrong ones."""

    def set_answer(ids):
        def draft(self, token, most, ends, guess):
            rng = random.Random(len(self._ids))
            self._add(token)
            at = next((i for i in range(3, len(ids)) if ids[i - 3 : i] == self._ids[-3:]), len(ids))
            wrong = [rng.randrange(100, 200) for _ in range(rng.choice((0, 1, 3)))]
            return [one for one in (ids[at:][: rng.choice((0, 3, 7))] + wrong)[:most] if one not in ends]

        monkeypatch.setattr(Lookup, "draft", draft)

    set_answer([])
    return set_answer


@pytest.fixture(scope="module")
def plain(model):
    """Sessions that answered without drafts, by sampling; tests only read them."""

    @cache
    def plain(sampling=GREEDY):
        session = open_session(model, "off")
        return session, run_answer(session, sampling)

    return plain


@pytest.fixture
def guessing(monkeypatch):
    """Let a window of 24 tokens draft five at a time, however long that takes."""
    monkeypatch.setattr(full, "RECENT", 24)
    monkeypatch.setattr(drafting, "RECENT", 24)
    monkeypatch.setattr(Window, "_length", lambda self, share, draft_s=0.0: 5)


def open_session(model, draft="lookup", **changes):
    return Session(model, load_in("full", {"draft": draft}, **changes))


def run_answer(session, sampling=GREEDY, between=None, turns=TURNS):
    *_, finished = session.answer(turns, sampling, between)
    assert isinstance(finished, Finished)
    return finished


def assert_same_kv(one, other, within=1e-5):
    """``within`` is a share of the largest number in a layer's keys or values."""
    assert one._loop.stored.ids == other._loop.stored.ids
    assert one.total == other.total == len(one._loop.stored.ids)
    check_integrity(one._kv.state)
    for mine, its in zip(stored_kv(one._kv.state), stored_kv(other._kv.state), strict=True):
        assert (mine - its).abs().max() < within * its.abs().max()


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_drafts_give_the_same_answer_in_fewer_forwards(model, drafted, sampling):
    with_drafts, without = open_session(model), open_session(model, "off")
    its = run_answer(without, sampling)
    drafted(without.token_ids)
    forwards, step = [], with_drafts._runner.step
    with_drafts._runner.step = lambda token: forwards.append(token) or step(token)
    *events, mine = with_drafts.answer(TURNS, sampling)
    assert all(event.tokens in (0, 1) for event in events if isinstance(event, Text))
    assert with_drafts.token_ids == without.token_ids
    assert (mine.text, mine.reason) == (its.text, its.reason)
    drafter, tokens = with_drafts._kv.mode.drafter, len(without.token_ids) - (its.reason == "eos")
    assert tokens > 50
    assert 0 < drafter.accepted < drafter.drafted
    assert len(forwards) + drafter.rounds + drafter.accepted == tokens
    assert len(forwards) + drafter.rounds < 0.6 * tokens
    assert mine.stats.generated_tokens == len(without.token_ids)
    assert mine.stats.extras == drafter.figures()
    assert mine.stats.read_share == pytest.approx(1)
    assert_same_kv(with_drafts, without)
    prompts = [each._kv.state.prompt for each in (with_drafts, without)]
    assert prompts[0].span == prompts[1].span, "drafts are not part of it"
    assert torch.equal(prompts[0].rows, prompts[1].rows)
    again = (*TURNS, Turn("assistant", mine.text), Turn("user", "And then?"))
    assert run_answer(with_drafts, sampling, turns=again).text == run_answer(without, sampling, turns=again).text


def test_stop_string_inside_a_round_drops_what_follows(model, drafted, plain):
    first, whole = plain()
    drafted(first.token_ids)
    stop = whole.text[len(whole.text) // 2 :][:6]
    sampling = Sampling(temperature=0, max_new_tokens=120, stop=(stop,))
    with_drafts, (without, its) = open_session(model), plain(sampling)
    assert run_answer(with_drafts, sampling).reason == its.reason == "stop"
    assert with_drafts.token_ids == without.token_ids
    assert_same_kv(with_drafts, without)


def test_answers_end_at_the_token_limit_and_the_context(model, drafted):
    session = open_session(model)
    for tokens in (1, 2, 3, 5, 9):
        run_answer(session, Sampling(temperature=0, max_new_tokens=tokens))
        assert len(session.token_ids) == tokens
    turns, model = (Turn("user", "One two three four. " * 100),), replace(model, context=600)
    session = open_session(model)
    assert run_answer(session, Sampling(temperature=0, max_new_tokens=10_000), turns=turns).reason == "context"
    assert session.total == model.context


def test_cancel_and_mode_switch_happen_between_rounds(model, drafted, plain):
    session, calls = open_session(model), []

    def between(generated):
        calls.append(generated)
        if len(calls) == 5:
            session.switch("streaming", budget=128)
        if len(calls) == 12:
            session.switch("full")
        if len(calls) == 16:
            session.cancel()

    assert run_answer(session, between=between).reason == "stopped"
    assert session.total == len(session._loop.stored.ids)
    check_integrity(session._kv.state)
    assert session._kv.mode.drafter is not None
    assert session.token_ids[: calls[4]] == plain()[0].token_ids[: calls[4]]


@pytest.mark.parametrize("stops", [False, True])
def test_queries_after_a_round_are_of_the_last_token(model, drafted, plain, stops):
    """Another mode selects with them what it reads first."""
    without, whole = plain()
    drafted(without.token_ids)
    sampling = Sampling(temperature=0, max_new_tokens=60, stop=(whole.text[60:66],) if stops else ())

    def queries(session):
        seen = {}
        run_answer(session, sampling, lambda generated: seen.update({generated: session._kv.state.query.clone()}))
        return seen | {-1: session._kv.state.query.clone()}

    session, expected = open_session(model), queries(open_session(model, "off"))
    for generated, query in queries(session).items():
        assert (query - expected[generated]).abs().max() < 1e-3
    assert session._kv.mode.drafter.accepted < session._kv.mode.drafter.drafted


def test_8_bit_pages_are_quantized_once(model, drafted):
    with_drafts, without = (open_session(model, draft, host_dtype="int8") for draft in ("lookup", "off"))
    run_answer(with_drafts)
    run_answer(without)
    assert with_drafts.token_ids == without.token_ids
    assert with_drafts._kv.state.host.quantized == without._kv.state.host.quantized
    assert not with_drafts._kv.state.host.dequantized
    assert_same_kv(with_drafts, without, within=0.1)  # one quantization step


FAULTS = [EngineError("It fails here.", "", ""), MemoryError(), torch.OutOfMemoryError("CUDA out of memory.")]


# The faults and both ways to sample alternate over the places: one except clause catches all faults.
PLACES_OF_A_ROUND = [
    *(("lookup", place, 4) for place in ("verify", "forward_chunk", "agrees", "forget", "end_at")),
    ("window", "_step", 9),  # inside the second round's guesses
]
FAILING = [pytest.param(*at, FAULTS[i % 3], (GREEDY, DRAWN)[i % 2], id=at[1]) for i, at in enumerate(PLACES_OF_A_ROUND)]


@pytest.mark.usefixtures("guessing")
@pytest.mark.parametrize(("draft", "place", "call", "fault", "sampling"), FAILING)
def test_failed_round_disables_drafts_and_the_answer_continues(
    model, drafted, plain, monkeypatch, draft, place, call, fault, sampling
):
    session, sampling = open_session(model, draft), replace(sampling, max_new_tokens=40)
    without, expected = plain(sampling)
    drafted(without.token_ids)
    owner = {"agrees": Sampler, "forget": session._loop}.get(place, session._runner)
    original, calls = getattr(owner, place), []

    def fail(*args, **kwargs):
        calls.append(args)
        if len(calls) == call:
            raise fault
        return original(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(owner, place, fail)
        events = list(session.answer(TURNS, sampling))
    assert len([event for event in events if isinstance(event, Noted)]) == 1
    assert events[-1].text == expected.text
    assert session._kv.mode.drafts_failed
    assert draft == "window" or session._kv.mode.drafter.rounds in (2, 3)
    assert_same_kv(session, without)
    session.switch("full")
    run_answer(session, replace(sampling, max_new_tokens=12))
    assert session._kv.mode.drafter.rounds


def test_window_drafts_over_8_bit_pages_change_nothing(bundled, guessing):
    with_drafts, without = (open_session(bundled, draft, host_dtype="int8") for draft in ("window", "off"))
    mine, _ = run_answer(with_drafts), run_answer(without)
    assert with_drafts.token_ids == without.token_ids
    drafter = with_drafts._kv.mode.drafter
    assert 0.2 * drafter.drafted < drafter.accepted < drafter.drafted
    assert mine.stats.read_share == 1
    assert with_drafts.snapshot().active == with_drafts.total
    assert not with_drafts._kv.state.host.dequantized
    assert_same_kv(with_drafts, without, within=0.2)


def test_failed_drafts_resume_in_auto_when_requested(model, guessing):
    load = Load(mode="auto", given={"full": {"draft": "window"}}, read_bytes_per_s=1e12)
    session = Session(model, load)
    list(session.answer(TURNS, Sampling(max_new_tokens=4)))
    session._kv.mode.drafter.failed = True
    list(session.answer(TURNS, Sampling(max_new_tokens=4)))
    assert session._kv.mode.drafts_failed, "not requested"
    session.switch("", draft="window")
    assert session._kv.mode.drafter
    assert not session._kv.mode.drafts_failed


def test_guesses_are_dropped_while_memory_is_short(model, guessing, plain):
    session, (without, expected) = open_session(model, "window"), plain()
    step, calls = session._runner._step, []
    with ExitStack() as stack:

        def run_out(token, control=False):
            calls.append(token)
            if len(calls) == 9:
                stack.enter_context(MemoryRunsOut(1, short=True))
            return step(token, control)

        session._runner._step = run_out
        with pytest.raises(DoesNotFitError):
            run_answer(session)
    assert session.total == len(session._loop.stored.ids)
    assert run_answer(session).text == expected.text
    assert_same_kv(session, without)


def test_answer_closed_inside_a_round_keeps_shown_tokens(model, drafted, plain):
    without, expected = plain()
    drafted(without.token_ids)
    inside = 0
    for events in range(4, 24, 2):
        session = open_session(model)
        answer = session.answer(TURNS, GREEDY)
        for _ in range(events):
            next(answer)
        at_once = session.total
        answer.close()
        inside += session.total < at_once
        stored, tokens = session._loop.stored.ids, session.token_ids
        assert stored[len(stored) - len(tokens) :] == tokens == without.token_ids[: len(tokens)]
        assert session.total == len(stored)
        check_integrity(session._kv.state)
    assert inside > 2
    assert run_answer(session).text == expected.text
    assert_same_kv(session, without)


TRACED = ("answer.py", "drafting.py", "runner.py", "sampler.py", "manager.py", "full.py", "host_pool.py", "state.py")


class LineFails:
    """Raises at the ``place``-th line in ``TRACED`` that runs inside a round."""

    def __init__(self, place: int) -> None:
        self.place, self.count = place, 0

    def round(self, advance, *args):
        """Run one round and count its lines."""
        sys.settrace(lambda frame, *_: self._line if frame.f_code.co_filename.endswith(TRACED) else None)
        try:
            return (yield from advance(*args))
        finally:
            sys.settrace(None)

    def _line(self, _frame, event, _arg):
        if event == "line":
            self.count += 1
            if self.count == self.place:
                raise EngineError("It fails here.", "", "")
        return self._line


@pytest.mark.parametrize("draft", ["lookup", "window", "auto"])
def test_round_that_fails_at_any_line_loses_nothing(model, drafted, guessing, plain, draft, count):
    short = Sampling(temperature=0, max_new_tokens=24)
    without, expected = plain(short)
    drafted(without.token_ids)

    def fails_at(place, call):
        session, fault, calls, rounds = open_session(model, draft), LineFails(place), [], []
        advance, drafter = session._loop._advance, session._kv.mode.drafter

        def traced(*args):
            calls.append(args)
            before = drafter.rounds
            result = yield from fault.round(advance, *args) if len(calls) == call else advance(*args)
            if drafter.rounds > before:
                rounds.append(len(calls))
            return result

        session._loop._advance = traced
        raised = None
        try:
            run_answer(session, short)
        except KvchatError as error:
            raised = error
        session._loop._advance = advance
        return session, fault, rounds, raised

    _, _, (_, call, *_), _ = fails_at(0, 0)
    _, fault, rounds, _ = fails_at(0, call)
    lines = fault.count
    assert call in rounds
    assert lines > 100
    steps = min(lines, int(min(PLACES, lines)) or 4)
    for place in range(1, lines + 1, -(-lines // steps)):
        session, fault, _, raised = fails_at(place, call)
        assert fault.count >= place
        count["lines that failed"] += 1
        assert session.total == len(session._loop.stored.ids), place
        check_integrity(session._kv.state)
        if raised is None:
            assert session._loop.stored.ids == without._loop.stored.ids, place
        assert run_answer(session, short).text == expected.text, place
        assert_same_kv(session, without)


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_sampler_accepts_drafts_it_would_draw_itself(sampling):
    rows = torch.randn(6, 50, generator=torch.Generator().manual_seed(1))
    one, other = (Sampler(sampling, 50, "cpu") for _ in range(2))
    drawn = [int(one(row)) for row in rows]
    assert other.agrees(rows, [*drawn[:3], (drawn[3] + 1) % 50, drawn[4]]) == 3
    assert [int(other(row)) for row in rows[3:]] == drawn[3:]


def test_automatic_drafts_may_begin_mid_answer(model, guessing, plain):
    session, (without, _) = open_session(model, "off"), plain()
    run_answer(session, between=lambda generated: session.switch("full", draft="auto") if generated == 9 else None)
    assert session.token_ids == without.token_ids
    assert session._kv.mode.drafter.accepted > 0
    assert_same_kv(session, without)


def test_draft_verification_keeps_the_token_distribution(bundled):
    """Chi-square of 4,000 continuations, at a temperature where the bundled model is uncertain."""
    turns = [{"role": "user", "content": "What do you think of the sea?"}]
    ids = bundled.tokenizer.apply_chat_template(turns, add_generation_prompt=True)
    *_, (_, row) = open_session(bundled)._runner.prefill(ids["input_ids"])
    sampler = Sampler(Sampling(seed=5, temperature=3.0, top_p=0.9, top_k=30), len(row), "cpu")
    weights, tokens = sampler.weights(row - row.max())
    chances = torch.zeros(len(row), dtype=torch.float64)
    chances[tokens] = (weights / weights.sum()).double()
    seen, draws = torch.zeros(len(row)), 4_000
    guesser = Sampler(Sampling(seed=6, temperature=4.0), len(row), "cpu")
    for _ in range(draws):
        draft = int(guesser(row))
        token = draft if sampler.agrees(row[None], [draft]) else int(sampler(row))
        seen[token] += 1
    expected = chances * draws
    likely = expected >= 5
    assert not seen[chances == 0].any()
    found, wanted = (torch.cat((x[likely], x[~likely].sum()[None])) for x in (seen.double(), expected))
    statistic = ((found - wanted) ** 2 / wanted.clamp(min=1e-9))[wanted > 5].sum()
    freedom = int((wanted > 5).sum()) - 1
    assert freedom > 5
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5


def test_comparisons_and_recovery_decode_without_drafts(model, drafted):
    session = open_session(model)
    *_, compared = session.compare(TURNS, [Variant("full")], GREEDY)
    assert not compared.runs[0].params.keys() & {"draft", "recovery"}
    assert session._kv.mode.drafter.rounds == 0
    session.switch("full", recovery=True)
    run_answer(session)
    assert session._kv.mode.drafter.rounds == 0
    for params in ({"draft": "window"}, {"recovery": True}):
        with pytest.raises(UsageError, match=next(iter(params))):
            list(session.compare(TURNS, [Variant("full"), Variant("full", params)], GREEDY))


# Prompts, answered with 500 tokens each; the short form has one, sampled, for the bundled model only.
LONG = float(os.environ.get("KVCHAT_TEST_DRAFTS", "0"))
UNPACKED = Load(str(FILES.get("smollm2")), "cpu", dtype="float32", quantize="none")
SUBJECTS = "sea fox king tree boat moon cat hill river house storm bread horse garden clock letter door bear road mouse"


REAL = pytest.mark.real_model("smollm2")


@pytest.mark.slow("four answers to a prompt on each model")
@pytest.mark.parametrize(
    ("name", "sampling"),
    [
        ("bundled", DRAWN),
        *((("bundled", GREEDY),) if LONG else ()),
        *(pytest.param("smollm2", sampling, marks=REAL) for sampling in (GREEDY, DRAWN) if LONG),
    ],
    ids=lambda it: it if isinstance(it, str) else f"{it.temperature:g}",
)
def test_answers_to_many_prompts_match_those_without_drafts(bundled, name, sampling, monkeypatch, count):
    """About a book, so that lookup finds text and a window misses some; no token ends an answer."""
    monkeypatch.setattr(Window, "_length", lambda self, share, draft_s=0.0: 5)  # even if it does not pay
    loaded = replace(bundled if name == "bundled" else load_model(UNPACKED, lambda *_: None), eos_ids=frozenset())
    session, books = Session(loaded, load_in("full", {})), passages((), 560, loaded.tokenizer)
    session._loop.encoder.turn_end = frozenset()
    prompts, tokens = (int(LONG), 500) if LONG else (1, 40)
    for subject, book in zip(SUBJECTS.split()[:prompts], cycle(books)):
        text = loaded.tokenizer.decode(book.ids, skip_special_tokens=True)
        turns = (Turn("user", f"{text}\n\nTell me a long story about the {subject}."),)
        answers, stored = {}, {}
        session.truncate(0)  # the stored prompt serves all four answers
        for draft in ("off", "lookup", "window", "auto"):
            session.switch("full", draft=draft)
            run_answer(session, replace(sampling, max_new_tokens=tokens), turns=turns)
            answers[draft] = session.token_ids
            stored[draft] = stored_kv(session._kv.state)
            assert answers[draft] == answers["off"], (subject, draft)
            assert len(answers[draft]) == tokens
            for mine, its in zip(stored[draft], stored["off"], strict=True):
                assert (mine - its).abs().max() < 1e-5 * its.abs().max()
            drafter = session._kv.mode.drafter
            count[f"{draft} accepted"] += drafter.accepted if drafter else 0
        count["tokens"] += tokens
    assert count["window accepted"] > count["tokens"] / 4
