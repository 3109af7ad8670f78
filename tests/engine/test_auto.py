"""auto with a model that decodes: conversations that grow in slow and small memory, both simulated."""

import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch
from support import byte_tokenizer
from support.loads import load_in
from support.step_clock import StepClock
from support.tiny_runner import load_tiny

from kvchat.config import modes
from kvchat.config.modes import registered
from kvchat.engine import metrics, runner
from kvchat.engine.mode_switcher import ModeSwitcher
from kvchat.engine.runner import geometry_of
from kvchat.engine.session import Session
from kvchat.engine.synthetic_text import passage, sentences
from kvchat.errors import DoesNotFitError, UsageError
from kvchat.kv.attention import PREFILL_WORKSPACE
from kvchat.kv.auto import APART, NEW
from kvchat.kv.geometry import GROWTH_HEADROOM, Geometry
from kvchat.kv.manager import KVManager
from kvchat.kv.memory import available, rates
from kvchat.kv.modes.full import Full
from kvchat.kv.ops import cpu_ops, host_attention
from kvchat.kv.prefill import CHUNKS, staging_bytes
from kvchat.models.load import LoadedModel
from kvchat.protocol.messages import Finished, Load, Noted, Sampling, Switched, Turn, Variant

OVERHEAD = 1.2  # of a step over reading its bytes: auto has to measure it
ANSWER = Sampling(temperature=0, max_new_tokens=48)
TARGET_S = 0.1


@dataclass(kw_only=True)
class SlowMemory(StepClock):
    """Steps take as long as reading weights, K/V and index; ``busy`` slows all of it down."""

    rate: float
    busy: float = 1.0

    def seconds(self, read: float, moved: int) -> float:
        mode = self.session._kv.mode
        index = mode.index.data.nbytes if mode.name == "speculative" else 0
        return self.busy * OVERHEAD * (self.session.model.weight_bytes + read + index) / self.rate


def rate_for(model: LoadedModel, tokens: int) -> float:
    """The bytes/s at which full mode takes ``TARGET_S`` for a token once ``tokens`` are stored."""
    per_token = model.layers * model.kv_heads * (model.d_k + model.d_v) * model.dtype.itemsize
    return OVERHEAD * (model.weight_bytes + tokens * per_token) / TARGET_S


def slow_session(model: LoadedModel, monkeypatch, tokens: int, **given) -> tuple[Session, SlowMemory]:
    """A session in auto, which finds full mode too slow beyond ``tokens`` tokens."""
    rate = rate_for(model, tokens)
    session = Session(model, Load(mode="auto", read_bytes_per_s=rate, given=given))
    return session, SlowMemory(session=session, rate=rate).install(monkeypatch)


def speculative_session(model: LoadedModel, monkeypatch) -> tuple[Session, list[Turn]]:
    """A session in which auto has entered speculative mode."""
    (session, _), turns = slow_session(model, monkeypatch, 400), list[Turn]()
    for seed in range(2):
        ask(session, turns, story(700, seed))
    assert session._kv.mode.name == "speculative"
    return session, turns


def story(tokens: int, seed: int) -> str:
    text, parts = sentences(seed), list[str]()
    while sum(part.count(" ") + 1 for part in parts) < tokens * 0.78:
        parts.append(next(text))
    return " ".join(parts)


def ask(session: Session, turns: list[Turn], text: str) -> tuple[list[Switched | Noted], Finished]:
    """Ask, and add the answer to ``turns``; return auto's changes and the Finished event."""
    turns.append(Turn("user", text))
    events = list(session.answer(turns, ANSWER))
    finished = events[-1]
    assert isinstance(finished, Finished)
    turns.append(Turn("assistant", finished.text))
    return [event for event in events if isinstance(event, Switched | Noted)], finished


def test_auto_reads_less_as_a_conversation_grows(model, monkeypatch):
    session, memory = slow_session(model, monkeypatch, 2000)
    assert (session.info.mode, session.info.auto) == ("full", session.snapshot().auto)
    turns, seen, changes = list[Turn](), list[tuple[int, str, int | None]](), list[Switched | Noted]()
    for seed in range(9):
        memory.steps.clear()
        new, finished = ask(session, turns, story(100 if seed == 0 else 600, seed))
        changes += new
        seen.append((session.total, session._kv.mode.name, session._kv.mode.report().params.get("budget")))
        if finished.stats.generated_tokens > 40:
            assert sum(memory.steps[-8:]) / 8 <= 1.2 * TARGET_S, seen
    chosen = [mode for _, mode, _ in seen]
    first = chosen.index("speculative")
    assert set(chosen[:first]) == {"full"}
    assert set(chosen[first:]) == {"speculative"}, "it never goes back"
    assert 1200 < seen[first][0] < 2600
    budgets = [budget for _, _, budget in seen[first:]]
    assert budgets == sorted(budgets, reverse=True)
    assert min(budgets) >= 256
    assert len(changes) == len(set(budgets)), "each change is reported once"
    assert all("because full would take" in event.auto for event in changes if isinstance(event, Switched))
    assert session.snapshot().auto.startswith(f"auto: speculative {budgets[-1]}, ")


def test_explicit_modes_override_auto_until_auto_is_requested(model, monkeypatch):
    session, turns = speculative_session(model, monkeypatch)
    with pytest.raises(UsageError):
        session.switch("streaming", budget=1)
    assert session.snapshot().auto, "a refused switch does not end auto"
    switched = session.switch("full")
    assert (switched.auto, session.snapshot().auto, session.info.auto) == ("", "", "")
    changes, finished = ask(session, turns, "And then?")
    assert not changes
    assert finished.stats.read_share == 1
    back = session.switch("auto")
    assert (back.before, back.mode) == ("full", "speculative")
    assert back.auto == session.snapshot().auto
    assert session.switch(pin_system=True).auto == back.auto, "a parameter alone does not end auto"
    quick = session.switch("auto", tokens_per_s=0.5)
    assert (quick.mode, quick.given["auto"]) == ("full", {"pin_system": True, "tokens_per_s": 0.5})
    with pytest.raises(UsageError):
        session.switch("auto", tokens_per_s=0)
    assert session.snapshot().auto
    session.enter(modes.parse("streaming", {"budget": 256}))
    assert not session.snapshot().auto
    with pytest.raises(UsageError, match="auto"):
        session.enter(modes.parse("auto", {}))


def test_slow_answer_changes_mode_at_most_every_64_tokens(model, monkeypatch):
    session, memory = slow_session(model, monkeypatch, 3000)
    turns = list[Turn]()
    ask(session, turns, story(1500, 0))
    assert session._kv.mode.name == "full"
    turns.append(Turn("user", "Tell me a long story."))

    def gets_busy(generated):
        memory.busy = 2.5 if generated >= 30 else 1.0

    events = session.answer(turns, Sampling(temperature=0, max_new_tokens=300), gets_busy)
    at = [len(session.token_ids) for event in events if isinstance(event, Switched)]
    assert at
    assert 30 + metrics.RATE_TOKENS <= at[0] <= 30 + 3 * metrics.RATE_TOKENS
    assert all(later - before >= APART for before, later in pairwise(at))
    assert session._kv.mode.name == "speculative"


def test_pages_are_quantized_when_ram_gets_short(model, monkeypatch):
    slowest = {"auto": {"tokens_per_s": 0.1}}  # so that no busy machine is too slow for full mode
    session = Session(model, Load(mode="auto", mode_params=slowest, read_bytes_per_s=1e12))
    token = session.info.kv_bytes_per_token
    limit = 3000 * token
    monkeypatch.setattr(available, "host_free", lambda: max(0, limit - session._kv.state.host.nbytes))
    monkeypatch.setattr(available, "usable", lambda free: free)
    turns, rounds, changes = list[Turn](), list[bool](), list[Switched | Noted]()
    for seed in range(8):
        changes += ask(session, turns, story(500, seed))[0]
        rounds.append(session._kv.state.quantizes)
    assert rounds == sorted(rounds)
    assert (rounds[0], rounds[-1]) == (False, True)
    pages = session._kv.state.host.quantized[: session.total // 32]
    assert 0 < pages.count(False) < len(pages)
    assert session.total > 3000, "more than full-precision pages would hold"
    (note,) = changes
    assert isinstance(note, Noted), "the mode stays, its pages change"
    assert note.text.startswith("auto: full with 8-bit pages, because the K/V take ")
    assert session._kv.mode.name == "full"


def test_refused_setup_falls_back_to_the_next(model, monkeypatch):
    session, _ = slow_session(model, monkeypatch, 300)
    enter = KVManager.switch
    tried = list[int]()

    def refused(kv, mode):
        tried.append(mode.budget)
        if mode.budget > 256:
            raise DoesNotFitError("It does not fit after all.")
        return enter(kv, mode)

    turns = list[Turn]()
    ask(session, turns, story(200, 0))
    monkeypatch.setattr(KVManager, "switch", refused)
    ask(session, turns, story(1500, 1))
    assert session._kv.mode.report().params["budget"] == 256
    assert tried == sorted(tried, reverse=True)
    assert len(tried) > 1


def test_parameters_apply_to_auto_or_its_current_mode(model, monkeypatch):
    session, turns = speculative_session(model, monkeypatch)
    budget = session._switcher.parameters.budget
    assert budget
    for changes, of in (({"recovery": True}, "auto"), ({"sink": 8}, "speculative"), ({"recovery": False}, "auto")):
        switched = session.switch(**changes)
        assert switched.given[of].items() >= changes.items()
        assert switched.params.items() >= {"budget": budget, **changes}.items()
        assert switched.auto.startswith(f"auto: speculative {budget}")
    for refused in ({"sink": 100_000}, {"sigma": 8}, {"budget": 1}):
        with pytest.raises(UsageError):
            session.switch(**refused)
        assert session._switcher.parameters.sink == 8
        assert not refused.keys() & (
            session._switcher.given["speculative"] | session._switcher.given["auto"]
        ).keys() - {"sink"}
    session.switch(budget=70)
    ask(session, turns, "And then?")
    assert session._kv.mode.report().params["budget"] == 70


def test_parameters_given_in_auto_apply_to_the_entered_mode(model, monkeypatch):
    session, _ = slow_session(model, monkeypatch, 400, speculative={"budget": 300})
    session.switch(recovery=True)
    switched = session.switch("auto", speculative={"window": 48})
    assert (switched.mode, switched.given["speculative"]) == ("full", {"budget": 300, "window": 48})
    with pytest.raises(UsageError):
        session.switch("auto", speculative={"window": -1})
    turns = list[Turn]()
    for seed in range(2):
        ask(session, turns, story(900, seed))
    assert (session._kv.mode.name, session._switcher.parameters.recovery) == ("speculative", True)
    assert session._kv.mode.report().params.items() >= {"budget": 300, "window": 48}.items(), "the budget is a maximum"


def test_requests_may_alternate_auto_and_other_modes(model):
    session, turns, seen = Session(model, Load(mode="auto")), [Turn("user", "Hello!")], list[tuple[bool, float]]()
    for args in (("auto",), ("full",), ("full", {"recovery": True}), ("auto", {"tokens_per_s": 20}), ("auto",)):
        list(session.answer(turns, Sampling(max_new_tokens=2), conversation=None, variant=Variant(*args)))
        auto = session._switcher.auto
        seen.append((auto.is_on, auto.parameters.tokens_per_s))
        assert bool(session.snapshot().auto) == auto.is_on
    assert seen == [(True, 10), (False, 10), (False, 10), (True, 20), (True, 10)]
    assert not any(session._switcher.given.values()), "parameters of a request are not kept"


def test_steps_before_compilation_are_not_measured(model, monkeypatch):
    session = Session(model, Load(mode="auto", read_bytes_per_s=1e12))
    ended = threading.Event()
    monkeypatch.setattr(cpu_ops, "awaited", {"loops": ended})
    turns = list[Turn]()
    ask(session, turns, "Hello!")
    assert not session._switcher.auto.ratios
    ended.set()  # compilation failed: the mode stays this slow
    ask(session, turns, "And then?")
    assert session._switcher.auto.ratios.keys() == {"full"}


def test_auto_checks_as_often_with_drafts(model, monkeypatch):
    session = Session(model, Load(mode="auto", given={"full": {"draft": "window"}}, read_bytes_per_s=1e12))
    monkeypatch.setattr(cpu_ops, "awaited", {})
    looked = list[int]()
    monkeypatch.setattr(
        session._loop, "_follow_time", lambda answer, is_due: looked.append(len(session.token_ids)) or iter(())
    )
    turns = [Turn("user", story(300, 1))]
    *_, finished = session.answer(turns, Sampling(temperature=0, max_new_tokens=300))
    assert isinstance(finished, Finished)
    assert finished.stats.generated_tokens == 300
    assert len(looked) >= 300 // (metrics.RATE_TOKENS + 8)
    assert all(later - before >= metrics.RATE_TOKENS for before, later in pairwise(looked))


def on_gpu(dtype: torch.dtype = torch.float32) -> LoadedModel:
    """A tiny random model with one token per byte."""
    end = byte_tokenizer.SIZE - 1
    model = load_tiny("llama", "cuda", dtype, vocab_size=end + 1, num_hidden_layers=4, max_position_embeddings=8192)
    words = {"tokenizer": byte_tokenizer.byte_level(), "vocab": end + 1, "eos_ids": frozenset({end}), "context": 8192}
    return replace(model, **words)


@pytest.mark.cuda
def test_auto_on_a_gpu_uses_the_link_until_it_is_too_slow(monkeypatch):
    """The rates are given: 300 tokens cross the link in the target time."""
    monkeypatch.setitem(GROWTH_HEADROOM, "cuda", 512)  # more than a turn
    model = on_gpu()
    token = geometry_of(model).token_bytes
    session = Session(model, Load(read_bytes_per_s=1e12, link_bytes_per_s=3000 * token))
    kv = session._kv
    reserved = staging_bytes(kv.state.geometry, 2048, CHUNKS[0]) + PREFILL_WORKSPACE
    monkeypatch.setattr(available, "free_bytes", lambda device: reserved + 1000 * token - kv.state.slot_bytes)
    monkeypatch.setattr(available, "usable", lambda free: free)
    monkeypatch.setattr(metrics.AnswerMetrics, "typical_s", lambda answer, least: None)
    session._runner._token_bytes = 0  # its layers take more than all its K/V
    session.switch("auto")
    turns, kinds, spilled = [Turn("user", "Hello!")], list[str](), list[bool]()
    while "speculative" not in kinds:
        list(session.answer(turns, Sampling(temperature=0, max_new_tokens=2)))
        choice = session._switcher.auto.choice
        assert choice is not None
        kinds.append(choice.setup.kind)
        spilled.append(isinstance(kv.mode, Full) and kv.mode.spills)
        turns += [Turn("assistant", "Yes. " * 20), Turn("user", "And then? " * 10)]
    over_link = kinds.index("full from RAM")
    assert not any(spilled[:over_link]), "it is entered again where both copies of what grew do not fit"
    assert any(spilled[over_link:])
    assert list(dict.fromkeys(kinds)) == ["full", "full from RAM", "speculative"]
    session.close()


@pytest.mark.cuda
def test_auto_on_a_gpu_counts_the_cpus_part(monkeypatch):
    """The CPU attends as fast as the link delivers: half each, if launches cost nothing."""
    model = on_gpu(torch.bfloat16)
    token = geometry_of(model).token_bytes
    rate = 3000 * token
    session = Session(model, Load(read_bytes_per_s=1e12, link_bytes_per_s=rate))
    monkeypatch.setattr(rates, "TURN_S", 0.0)
    monkeypatch.setattr(host_attention, "measured", lambda host: host_attention.Rates(rate, rate))

    monkeypatch.setattr(available, "usable", lambda free: free)

    def saved(tokens):
        monkeypatch.setattr(available, "free_bytes", lambda device: tokens * token)
        setups = session._switcher._setups(4000)
        return next((setup.saved_seconds / setup.link_seconds for setup in setups if setup.over_link), 0.0)

    assert saved(7000) == pytest.approx(0.5)
    assert saved(9000) == 0
    session.switch("full", resident=64)
    with torch.inference_mode():
        session._kv.quantize_pages(True)
    assert saved(7000) == 0
    session.close()


# ---- Parameters given at run time: of one mode, and shared by all


def test_budget_applies_to_every_mode_and_tau_to_one(model):
    session = Session(model, load_in("speculative", {"budget": 128, "tau": -2.0}))
    assert (session.info.auto, session.snapshot().auto) == ("", "")
    assert session.switch("freeze").params["tau"] == registered()["freeze"]().tau
    assert session.switch("streaming").params["budget"] == 128
    assert session.switch(budget=96).params["budget"] == 96
    back = session.switch("speculative").params
    assert (back["budget"], back["tau"]) == (96, -2.0)
    assert session.switch("streaming", budget=256).auto == ""
    assert session.switch("speculative").params["budget"] == 256


def test_freeze_is_capped_only_by_its_own_budget(model):
    session = Session(model, load_in("speculative", {"budget": 128}))
    assert session.switch("freeze").params["budget"] is None
    assert not session.snapshot().badges
    assert session.switch(budget=120).params["budget"] == 120
    (badge,) = session.snapshot().badges
    assert badge.partition(":")[0] == "capped"
    assert session.switch("streaming").params["budget"] == 128
    assert session.switch("freeze").params["budget"] == 120
    assert session.switch(budget=None).params["budget"] is None
    assert not session.snapshot().badges


def test_last_given_shared_value_counts(model):
    given = {"speculative": {"budget": 128, "tau": 0.9}, "streaming": {"budget": 256}, "freeze": {}}
    session = Session(model, Load(mode="freeze", given=given))
    assert session.info.params["tau"] == 0.5, "speculative's tau is its own"
    assert session.switch("speculative").params.items() >= {"budget": 256, "tau": 0.9}.items()
    assert session.switch("speculative", budget=192).params["budget"] == 192
    assert session.switch("streaming").params["budget"] == 192


def test_switch_returns_the_parameters_given_so_far(model):
    """Also what was reset to kvchat's choice, but not what kvchat chose."""
    session = Session(model, load_in("speculative", {"tau": 0.9}))
    first, second = session.switch(budget=128), session.switch("streaming", budget=None)
    assert first.given == {"speculative": {"tau": 0.9, "budget": 128}}
    assert second.given == {"speculative": {"tau": 0.9}, "streaming": {"budget": None}}
    assert second.params["budget"] is not None


# ---- On the bundled model, in a conversation that grows on a small device behind a slow link: in the long form only


GROWN = int(os.environ.get("KVCHAT_TEST_GROWN", "0"))  # tokens
READ, LINK, LINK_OVERHEAD = 2e9, 1e8, 1.3  # bytes/s; the last as ``OVERHEAD``
ROOM = 3000  # tokens, on the device
SECRET, ASK = "41872", "What is the passkey?"
KNOWN = "41"  # what even full mode recalls of it after so much text


class SlowLink(StepClock):
    """Steps take as long as reading what is on the device and fetching the rest over the link."""

    def seconds(self, read: float, moved: int) -> float:
        held = max(0.0, read - moved)
        return LINK_OVERHEAD * (self.session.model.weight_bytes + held) / READ + moved / LINK


@dataclass(frozen=True)
class Answered:
    """An answer with ``tokens`` stored: its final setup, auto's line, seconds per token at its end, its text."""

    tokens: int
    setup: str
    line: str
    seconds: float
    text: str


@pytest.fixture
def session_on_small_device(bundled, monkeypatch):
    """A session whose CPU acts as a device with its own memory."""
    monkeypatch.setattr(runner, "Geometry", lambda *sizes, unified, **rest: Geometry(*sizes, **rest))
    monkeypatch.setitem(GROWTH_HEADROOM, "cpu", 512)
    monkeypatch.setattr(ModeSwitcher, "_rates", lambda self: (READ, LINK))
    session = Session(bundled, Load())
    state, token = session._kv.state, session.info.kv_bytes_per_token
    reserved = staging_bytes(state.geometry, bundled.context, CHUNKS[0]) + PREFILL_WORKSPACE
    monkeypatch.setattr(available, "free_bytes", lambda device: reserved + ROOM * token - state.slot_bytes)
    monkeypatch.setattr(available, "usable", lambda free: free)
    session.switch("auto")
    yield session
    session.close()


def grow(session: Session, link: SlowLink, most: int, turns: list[Turn]) -> Iterator[Answered]:
    """Tell a number, then stories from 100 tokens on until ``most`` are stored, then ask for the number."""
    seed, is_last = 0, False
    while not is_last:
        is_last = session.total > most - 1000
        text = ASK if is_last else "Tell me a long story." if seed else f"The passkey is {SECRET}. Remember it."
        if seed and not is_last:
            filler = passage(sentences(seed), max(60, min(700, session.total // 2)), session.model.tokenizer)
            turns += [Turn("user", filler), Turn("assistant", "I see.")]
        turns.append(Turn("user", text))
        link.steps.clear()
        *_, finished = session.answer(turns, ANSWER)
        turns.append(Turn("assistant", finished.text))
        chosen = session._switcher.auto.choice
        assert chosen is not None
        seconds = sum(link.steps[-8:]) / len(link.steps[-8:])
        yield Answered(session.total, chosen.setup.label, chosen.line, seconds, finished.text)
        seed += 1


@pytest.mark.skipif(not GROWN, reason="KVCHAT_TEST_GROWN is not set")
@pytest.mark.slow("the bundled model decodes a dozen answers in a conversation that grows")
def test_auto_in_a_conversation_that_grows_on_a_small_device_behind_a_slow_link(
    session_on_small_device, monkeypatch, record_property
):
    session = session_on_small_device
    link = SlowLink(session=session).install(monkeypatch)
    turns = list[Turn]()
    seen = list(grow(session, link, GROWN, turns))
    for each in seen:
        record_property(f"{each.tokens} tokens", f"{1000 * each.seconds:.0f} ms, {each.line}")
    assert seen[0].tokens < 110
    assert GROWN - 1000 < seen[-1].tokens <= GROWN
    setups = [each.setup for each in seen]
    assert setups[0] == "full"
    assert len(set(setups)) == sum(one != other for one, other in pairwise(setups)) + 1, f"back and forth: {setups}"
    assert not [each for each in seen if each.seconds > 1.1 * TARGET_S and "nothing that fits" not in each.line]
    assert all("streaming" not in setup for setup in setups)
    assert setups[-1] != "full", "it does not fit"
    record_property("new at a step", session._switcher._new["speculative"])
    assert session._switcher._new["speculative"] not in (0, NEW["speculative"]), "it was measured"
    assert KNOWN in seen[-1].text
    session.switch("full")
    *_, finished = session.answer(turns[:-1], ANSWER)
    assert finished.text == seen[-1].text, "what full mode recalls of the first turn"
