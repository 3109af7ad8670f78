"""Comparisons: modes answer from the same K/V, and the session is unchanged afterwards, however they end."""

import copy
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from support.integrity import check_integrity, stored_kv
from support.loads import load_in
from support.memory_faults import MemoryRunsOut
from support.tiny_runner import load_tiny_with_bytes

from kvchat.engine import compare, synthetic_text
from kvchat.engine.compare import compare_logits
from kvchat.engine.prefix_cache import WriteBehind
from kvchat.engine.session import Session
from kvchat.engine.synthetic_text import sentences
from kvchat.errors import DoesNotFitError, UsageError
from kvchat.kv.memory import available
from kvchat.protocol.messages import Compared, Comparing, Keeping, Load, Prefilled, Sampling, Started, Turn, Variant

SAMPLING = Sampling(temperature=0.9, seed=4, max_new_tokens=24)
STORY = (Turn("user", "The sea was calm and the whale went on. " * 20 + "Tell me a short story."),)
NARROW = Variant("streaming", {"budget": 64, "R": 1, "sigma": 0, "delta": 0})
VARIANTS = (Variant("full"), NARROW, Variant("speculative"))


def state_of(session: Session) -> tuple[object, ...]:
    """Everything that a comparison must leave unchanged."""
    state = session._kv.state
    stored = copy.deepcopy(vars(session._loop.stored))
    mode = (session._switcher.parameters, session._switcher.system_tokens, copy.deepcopy(session._switcher.given))
    return stored_kv(state), state.query.clone(), state.control.clone(), stored, mode, list(session.token_ids)


def same(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


@pytest.fixture
def session(model):
    """A conversation whose answer was computed with reduced context."""
    session = Session(model, load_in("streaming", NARROW.params))
    list(session.answer(STORY, SAMPLING))
    assert session.snapshot().reduced_tokens > 0
    return session


def test_comparison_measures_how_modes_differ(session):
    before = state_of(session)
    events = list(session.compare(STORY, (*VARIANTS, Variant("full")), SAMPLING))
    assert isinstance(events[0], Started)
    full, streaming, speculative, again = events[-1].runs
    assert full.agreement is None
    assert ["budget" in run.params for run in (full, streaming, speculative)] == [False, True, True]
    assert again.pieces == full.pieces
    assert again.agreement.first_difference is None
    assert (again.agreement.same_choice, again.agreement.kl_max) == (1.0, 0.0)
    assert again.agreement.tokens == full.stats.generated_tokens - 1
    assert streaming.agreement.first_difference is not None
    shared = streaming.agreement.first_difference
    assert streaming.pieces[:shared] == full.pieces[:shared]
    assert streaming.agreement.kl_mean > 1e-3
    assert streaming.stats.read_share < speculative.stats.read_share <= full.stats.read_share == 1
    assert {event.index for event in events if isinstance(event, Comparing)} == {0, 1, 2, 3}
    assert same(state_of(session), before)


def test_variants_share_a_seed_if_none_is_given(model):
    *_, compared = Session(model).compare(STORY, (Variant("full"), Variant("full")), replace(SAMPLING, seed=None))
    assert compared.runs[0].pieces == compared.runs[1].pieces


def test_first_run_matches_the_modes_own_answer(session, model):
    *_, compared = session.compare(STORY, VARIANTS[:1], SAMPLING)
    *_, finished = Session(model).answer(STORY, SAMPLING)
    assert compared.runs[0].text == finished.text


def test_pinned_question_is_pinned_in_each_compared_mode(model):
    session, own = Session(model), Session(model, load_in("streaming", NARROW.params))
    pinned = (replace(STORY[0], pinned=True),)
    list(own.answer(pinned, SAMPLING))
    seen, step = [], session._loop.step
    session._loop.step = lambda token: seen.append(session._kv.state.pins) or step(token)
    list(session.compare(pinned, VARIANTS, SAMPLING))
    assert set(seen) == {own._kv.state.pins}


def test_reduced_tokens_are_recomputed_for_a_comparison(session):
    """All modes start from exact K/V, also of an earlier answer with reduced context."""
    answer = session.text(0, session.total).rsplit("<|assistant|>", 1)[1]
    turns = (*STORY, Turn("assistant", answer), Turn("user", "Thank you. Who was calm?"))
    before, first = state_of(session), session._loop.stored.first_reduced
    started, *_, compared = session.compare(turns, VARIANTS[:2], SAMPLING)
    assert started.reused_tokens == first < session.total
    assert same(state_of(session), before)
    fresh = list(Session(session.model).compare(turns, VARIANTS[:2], SAMPLING))[-1]
    assert compared.runs[0].pieces == fresh.runs[0].pieces
    assert compared.runs[1].agreement.kl_mean == pytest.approx(fresh.runs[1].agreement.kl_mean, abs=1e-3)


def test_comparison_leaves_the_conversations_metrics_unchanged(model):
    paged = {"unit": "page", "budget": 128, "sink": 16, "window": 32}
    session = Session(model, load_in("speculative", paged))
    list(session.answer(STORY, SAMPLING))

    def metrics():
        shown = session.snapshot()
        return shown.step_bytes, shown.recall_hit_rate, shown.recall_ms_p50, shown.exposed_ms_p95, shown.tokens_per_s

    before = metrics()
    assert before[0] > 0
    for _ in session.compare(STORY, VARIANTS, SAMPLING):
        session.snapshot()  # as the worker does meanwhile
    assert metrics() == before


@pytest.mark.parametrize("end", ["stop while reading", "stop", "close", "fail", "nothing shared"])
def test_comparison_that_ends_early_changes_nothing(session, end, monkeypatch):
    monkeypatch.setattr(compare, "PROGRESS_S", 0.0)
    turns = STORY if end not in ("stop while reading", "nothing shared") else (Turn("user", "Hello! " * 30),)
    before = state_of(session)
    events = session.compare(turns, VARIANTS, SAMPLING)
    if end == "fail":
        monkeypatch.setattr(session._loop, "step", fails_after(40, session._loop.step))
        with pytest.raises(DoesNotFitError, match="memory"):
            list(events)
    else:
        last = None
        for last in events:
            if end == "stop while reading" and isinstance(last, Prefilled):
                session.cancel()
            elif isinstance(last, Comparing) and last.index == 1:
                if end == "close":
                    events.close()
                elif end == "stop":
                    session.cancel()
        if end == "close":
            assert isinstance(last, Comparing)
        else:
            assert isinstance(last, Compared)
            assert len(last.runs) == {"stop while reading": 0, "stop": 2, "nothing shared": 3}[end]
    assert same(state_of(session), before)
    check_integrity(session._kv.state)


def fails_after(steps: int, step):
    left = iter(range(steps))

    def fail(token):
        if next(left, None) is None:
            raise DoesNotFitError("There is no memory.")
        return step(token)

    return fail


def test_writing_resumes_after_a_comparison(bundled, tmp_path, monkeypatch):
    session = Session(bundled, Load(keeping=Keeping(saved_bytes=2**30, folder=str(tmp_path))))
    monkeypatch.setattr(WriteBehind, "begin", lambda writer, jobs: None)  # interrupted before the first page
    list(session.answer(STORY, SAMPLING, None, "a"))
    monkeypatch.undo()
    list(session.compare(STORY, VARIANTS[:1], SAMPLING))
    ids = list(session._loop.stored.ids)
    file = session._prefix_cache._file(tmp_path / "a.kv")
    session._prefix_cache.close(60)
    assert file.rows()["id"].tolist() == ids


def test_refused_mode_is_a_row_and_an_unknown_one_an_error(session, monkeypatch):
    enter = session._switcher.enter

    def refuse(parameters):
        if parameters.name == "sync":
            raise DoesNotFitError("The slots do not fit.")
        return enter(parameters)

    monkeypatch.setattr(session._switcher, "enter", refuse)
    *_, compared = session.compare(STORY, (Variant("sync"), Variant("full"), Variant("full")), SAMPLING)
    assert [run.refusal for run in compared.runs] == ["The slots do not fit.", "", ""]
    assert [run.agreement is None for run in compared.runs] == [True, True, False]
    before = state_of(session)
    with pytest.raises(UsageError, match="no KV mode"):
        list(session.compare(STORY, (Variant("frezee"),), SAMPLING))
    with pytest.raises(UsageError):
        list(session.compare(STORY, VARIANTS, replace(SAMPLING, top_p=7.0)))
    monkeypatch.setattr(available, "host_free", lambda: 1000)
    with pytest.raises(DoesNotFitError):
        list(session.compare((Turn("user", "Hi"),), VARIANTS, SAMPLING))
    assert same(state_of(session), before)


def test_hybrid_model_continues_as_without_a_comparison():
    model, short = load_tiny_with_bytes("qwen3_5"), replace(SAMPLING, max_new_tokens=6)
    one, other = Session(model), Session(model)
    for session in (one, other):
        list(session.answer((Turn("user", "The sea was calm."),), short))
    *_, compared = one.compare((Turn("user", "The whale went on."),), (Variant("full"), NARROW), short)
    assert len(compared.runs) == 2
    assert torch.allclose(one.step(7), other.step(7), atol=1e-5)


@pytest.mark.parametrize(("name", "host_dtype"), [("llama", "model"), ("llama", "int8"), ("qwen3_5", "model")])
def test_conversation_is_recomputed_if_memory_runs_out_on_restoring(name, host_dtype, monkeypatch):
    """torch's own error escaped, ids without K/V stayed, and a hybrid answered differently."""
    model, short = load_tiny_with_bytes(name), replace(SAMPLING, max_new_tokens=2)
    one, other = (Session(model, Load(host_dtype=host_dtype)) for _ in range(2))
    for session in (one, other):
        list(session.answer((Turn("user", "The sea was calm, and the whale went on."),), short))
    put = one._kv.state.host.put

    def fail(*args):
        with MemoryRunsOut(1):
            put(*args)

    with monkeypatch.context() as patch:
        patch.setattr(one._kv.state.host, "put", fail)
        with pytest.raises(DoesNotFitError, match="restoring the conversation"):
            list(one.compare((Turn("user", "The whale went on."),), VARIANTS[:1], short))
    ids = other._loop.stored.ids
    assert one.total < len(ids)
    assert one._loop.stored.ids == ids[: one.total]
    one.prefill(ids[one.total :])
    assert torch.allclose(one.step(7), other.step(7), atol=1e-4 if host_dtype == "model" else 0.1)
    assert one.snapshot().mode == "full"


def test_logits_are_compared_after_the_first():
    """The first logits are the prompt's: the same in all modes by construction."""
    one = [torch.tensor([0.0, 0.0]), torch.tensor([1.0, 0.0]), torch.tensor([0.0, 2.0])]
    other = [torch.tensor([9.0, 0.0]), torch.tensor([0.0, 1.0]), torch.tensor([0.0, 2.0])]
    agreement = compare_logits(3, one, other)
    p = torch.tensor([1.0, 0.0]).softmax(0)
    expected = float((p * (p.log() - p.flip(0).log())).sum())
    assert (agreement.first_difference, agreement.tokens, agreement.same_choice) == (3, 2, 0.5)
    assert agreement.kl_max == pytest.approx(expected, abs=1e-6)
    assert agreement.kl_mean == pytest.approx(expected / 2, abs=1e-6)
    ruled_out = [one[0], torch.tensor([float("-inf"), 0.0])]
    assert compare_logits(None, ruled_out, ruled_out).kl_max == 0
    assert compare_logits(None, one[:2], ruled_out).kl_max is None
    assert compare_logits(None, one[:1], one[:1]).same_choice is None


# ---- A fact hidden in a text: the same for the same seed, stated once, early


def test_hidden_fact_appears_once_and_early(model):
    tokenizer = model.tokenizer
    for seed in "012":
        case = synthetic_text.hide(seed, 600, tokenizer)
        assert case == synthetic_text.hide(seed, 600, tokenizer)
        texts = [turn.content for turn in case.turns]
        assert sum(case.answer in text for text in texts) == 1
        before = next(at for at, text in enumerate(texts) if case.answer in text)
        read = [len(tokenizer.encode(text)) for text in texts]
        assert 600 <= sum(read) < 800
        assert sum(read[before + 1 :]) > 100, "it is not right before the question"
        assert case.turns[-1].content.endswith("?")


def test_single_text_has_the_fact_in_its_first_half(model):
    for seed in "012":
        case = synthetic_text.in_one_text(seed, 600, model.tokenizer)
        assert case == synthetic_text.in_one_text(seed, 600, model.tokenizer)
        (turn,) = case.turns
        assert turn.content.count(case.answer) == 1
        before, after = turn.content.split(case.answer)
        assert len(before) < len(after)
        assert 600 <= len(model.tokenizer.encode(turn.content)) < 720
        assert turn.content.endswith("?")


def test_passage_ends_with_the_sentence_that_reaches_its_length(model):
    for tokens in (0, 1, 30, 300):
        text, sentence, whole = sentences(7), sentences(7), ""
        while len(model.tokenizer.encode(whole)) < tokens:
            whole = f"{whole} {next(sentence)}".strip()
        assert synthetic_text.passage(text, tokens, model.tokenizer) == whole
        assert next(text) == next(sentence), "no further sentence is taken"


def test_long_passage_is_tokenized_only_a_few_times(model):
    encode = Mock(side_effect=model.tokenizer.encode)
    synthetic_text.passage(sentences(0), 20_000, SimpleNamespace(encode=encode))
    assert encode.call_count < 100


def test_needle_text_longer_than_the_context_is_refused(model):
    with pytest.raises(DoesNotFitError):
        Session(model).hide_needle(model.context + 1, 0)
