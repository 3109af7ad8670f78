"""auto on the bundled model, in a conversation that grows on a small device behind a slow link.

The CPU plays a device with memory of its own, of a given size. Steps compute what they do; their time is that of the
bytes that they read there and of those that come over the link, by a clock that both move. In the long form only, to
12,000 tokens: the short one has auto with a tiny model on the fake GPU, in ``test_auto``.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import pytest
from support.step_clock import StepClock

from kvchat.engine import runner
from kvchat.engine.mode_switcher import ModeSwitcher
from kvchat.engine.session import Session
from kvchat.engine.synthetic_text import passage, sentences
from kvchat.kv.attention import PREFILL_WORKSPACE
from kvchat.kv.auto import NEW
from kvchat.kv.geometry import GROWTH_HEADROOM, Geometry
from kvchat.kv.memory import available
from kvchat.kv.prefill import CHUNKS, staging_bytes
from kvchat.protocol.messages import Load, Sampling, Turn

GROWN = int(os.environ.get("KVCHAT_TEST_GROWN", "0"))  # tokens, of the long form
READ, LINK = 2e9, 1e8  # bytes/s
ROOM = 3000  # tokens, on the device
TARGET_S = 0.1
OVERHEAD = 1.3  # of a step beside its bytes: what auto has to find out
ANSWER = Sampling(temperature=0, max_new_tokens=48)
SECRET, ASK = "41872", "What is the passkey?"
KNOWN = "41"  # of it, after so much text, in full mode too


class SlowLink(StepClock):
    """Steps take as long as what is on the device is read there, and what is fetched comes over the link."""

    def seconds(self, read: float, moved: int) -> float:
        held = max(0.0, read - moved)
        return OVERHEAD * (self.session.model.weight_bytes + held) / READ + moved / LINK


@dataclass(frozen=True)
class Answered:
    """An answer at ``tokens`` stored: the setup that it ended in, auto's line, seconds a token at its end, its text."""

    tokens: int
    setup: str
    line: str
    seconds: float
    text: str


@pytest.fixture
def session(model, monkeypatch):
    monkeypatch.setattr(runner, "Geometry", lambda *sizes, unified, **rest: Geometry(*sizes, **rest))
    monkeypatch.setitem(GROWTH_HEADROOM, "cpu", 512)
    monkeypatch.setattr(ModeSwitcher, "_rates", lambda self: (READ, LINK))
    session = Session(model, Load())
    state, token = session._kv.state, session.info.kv_bytes_per_token
    beside = staging_bytes(state.geometry, model.context, CHUNKS[0]) + PREFILL_WORKSPACE
    monkeypatch.setattr(available, "free_bytes", lambda device: beside + ROOM * token - state.slot_bytes)
    monkeypatch.setattr(available, "usable", lambda free: free)
    session.switch("auto")
    yield session
    session.close()


def grow(session: Session, link: SlowLink, most: int, turns: list[Turn]) -> Iterator[Answered]:
    """Tell a number, then stories from 100 tokens on until ``most`` are stored, then ask for the number."""
    seed, asks = 0, False
    while not asks:
        asks = session.total > most - 1000
        text = ASK if asks else "Tell me a long story." if seed else f"The passkey is {SECRET}. Remember it."
        if seed and not asks:
            told = passage(sentences(seed), max(60, min(700, session.total // 2)), session.model.tokenizer)
            turns += [Turn("user", told), Turn("assistant", "I see.")]
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
def test_auto_in_a_conversation_that_grows_on_a_small_device_behind_a_slow_link(session, monkeypatch, record_property):
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
    assert setups[-1] != "full", "it has no room"
    record_property("new at a step", session._switcher._new["speculative"])
    assert session._switcher._new["speculative"] not in (0, NEW["speculative"]), "it was measured"
    assert KNOWN in seen[-1].text
    session.switch("full")
    *_, finished = session.answer(turns[:-1], ANSWER)
    assert finished.text == seen[-1].text, "what full finds of what was told first"
