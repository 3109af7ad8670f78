"""Conversations with hybrid models: reuse, regeneration, withdrawal and resuming, against a fresh session."""

import pytest
import torch
from support import tiny_models, tiny_multimodal
from support.grids import WHOLE
from support.integrity import check_integrity
from support.kept_chat import OTHER, TALE, Chat, flip_byte, notes, resumed_from
from support.loads import load_in
from support.tiny_runner import load_tiny, prefill_logits, token_ids

from kvchat.engine import prefix_cache, recovery
from kvchat.engine.session import Session
from kvchat.models.load import load_model
from kvchat.models.recurrent import TAIL
from kvchat.protocol.messages import Finished, Load, Recovered, Resumed, Sampling, Started, Turn

GREEDY = Sampling(temperature=0, max_new_tokens=24)
HELLO = (Turn("user", "Hello! My name is Maria and my cat is called Biscuit."),)
QUESTION = Turn("user", "What is my cat called?")


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3_5")
    tiny_multimodal.save(tiny_multimodal.fresh("qwen3_5"), folder)
    return load_model(Load(str(folder), "cpu", "float32"), lambda stage: None)


def run_answer(session: Session, turns, sampling=GREEDY, between=None) -> tuple[list[int], Started, list]:
    events = list(session.answer(turns, sampling, between))
    assert isinstance(events[-1], Finished)
    return session.token_ids, events[0], events


def text_of(events) -> str:
    return events[-1].text


def fresh_tokens(session: Session, started: Started) -> list[int]:
    """The tokens that a new session draws after the same ids; tokenized again, the text may have others."""
    fresh, tokens = Session(session.model), []
    logits = fresh.prefill(session._loop.stored.ids[: started.prompt_tokens])
    for _ in session.token_ids:
        tokens.append(int(logits.argmax()))
        logits = fresh.step(tokens[-1])
    return tokens


@pytest.mark.parametrize("mode", ["freeze", "sync"])
def test_second_and_regenerated_turns_match_a_fresh_session(hybrid, mode):
    params = {"freeze": {"recovery": False}, "sync": {"mem": 0.9}}.get(mode, {})
    session = Session(hybrid, load_in(mode, params))
    _, _, events = run_answer(session, HELLO)
    turns = (*HELLO, Turn("assistant", text_of(events)), QUESTION)
    second, started, _ = run_answer(session, turns)
    assert started.reused_tokens > 30
    assert second == fresh_tokens(session, started)
    again, started, _ = run_answer(session, turns)
    assert started.reused_tokens == started.prompt_tokens - 1
    assert again == second


def test_recurrent_state_forgets_withdrawn_tokens(hybrid, monkeypatch):
    """Recovery goes back in the middle of an answer; what is stored then matches one prefill."""
    session, plain = Session(hybrid, load_in("freeze")), Session(hybrid)
    alarms = iter([*[None] * 12, *[recovery.Trigger("entropy", 9.0)] * 200])
    monkeypatch.setattr(recovery.Signals, "add", lambda self, *args: next(alarms))
    sampling = Sampling(temperature=0.8, max_new_tokens=150, seed=1)
    _, _, events = run_answer(session, HELLO, sampling)
    assert any(isinstance(event, Recovered) and event.level == "RR" for event in events)
    expected = plain.prefill(session._loop.stored.ids)
    session.switch("full")
    session.truncate(session.total - 1)
    logits = session.step(plain._runner.recurrent._ids[-1])
    assert (logits - expected).abs().max() < 1e-4 * expected.abs().max()


def test_rebuilt_conversation_matches_a_fresh_one(hybrid):
    """The state was computed with reduced context, too."""
    session, fresh = Session(hybrid, load_in("streaming", {"budget": 64, "R": 1, "sigma": 0})), Session(hybrid)
    run_answer(session, HELLO, Sampling(temperature=0, max_new_tokens=60))
    session.switch("full")
    reduced = session.step(5)
    fresh.prefill(session._loop.stored.ids[: session.total - 1])
    expected = fresh.step(5)
    assert (reduced - expected).abs().max() > 1e-3 * expected.abs().max()
    session.truncate(session.total - 1)
    list(session.rebuild())
    assert session.snapshot().reduced_tokens == 0
    torch.testing.assert_close(session.step(5), expected, rtol=1e-4, atol=1e-4)


def test_panels_count_the_recurrent_states_bytes(hybrid):
    session = Session(hybrid)
    run_answer(session, HELLO)
    state, snapshot = session._runner.recurrent, session.snapshot()
    assert snapshot.kv_device_bytes == session._kv.device_bytes + state.nbytes
    assert snapshot.kv_host_bytes == session._kv.state.host.nbytes + state.snapshot_bytes
    assert "KiB" in snapshot.extras["recurrent state"]


# ---- K/V and recurrent state of tiny hybrid models, restored from memory and from disk


ASKED = 1 + len(TALE)  # with what the encoder puts before it


def start_chat(tmp_path, name: str, **settings) -> Chat:
    """A conversation with one answered question."""
    chat = Chat(tmp_path, load_tiny(name), **settings)
    chat.say("a", TALE)
    chat.answer()
    return chat


def resume(chat: Chat, tmp_path) -> tuple[Chat, list]:
    """The conversation in a later session, and the events of resuming it."""
    later = Chat(tmp_path, load_tiny(chat.runner.model.name))
    return later, list(later.cache.resume("a", (Turn("user", chat.stored.text[1:]),)))


def assert_continue_alike(one: Chat, other: Chat) -> None:
    for mine, its in zip(next_logits(one), next_logits(other), strict=True):
        assert torch.equal(mine, its)
    check_integrity(one.runner.kv.state)


def next_logits(chat: Chat) -> list[torch.Tensor]:
    first = prefill_logits(chat.runner, token_ids(40, seed=2))
    return [first, *(chat.runner.step(token) for token in token_ids(6, seed=3))]


def tokens_to_recompute(chat: Chat) -> int:
    chat.runner.truncate(chat.runner.kv.total)
    return len(chat.runner.recurrent.unread)


@pytest.mark.parametrize("name", tiny_models.HYBRID if WHOLE else tiny_models.STATES)
def test_resumed_chat_continues_like_one_never_closed(tmp_path, name):
    chat = start_chat(tmp_path, name)
    later, events = resume(chat, tmp_path)
    assert resumed_from(events) == (ASKED + 9, "disk")
    assert later.stored.ids == chat.stored.ids
    assert tokens_to_recompute(later) == 0
    assert_continue_alike(later, chat)
    for one in (chat, later):
        one.runner.truncate(ASKED - 1)
        assert 0 < len(one.runner.recurrent.unread) < TAIL
    assert_continue_alike(later, chat)
    for one in (chat, later):
        one.runner.truncate(100)
    assert len(later.runner.recurrent.unread) == 100, "further back, everything is recomputed"
    for mine, its in zip(next_logits(later), next_logits(chat), strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-5)


def test_reopened_conversation_comes_from_memory(tmp_path):
    chat = start_chat(tmp_path, "lfm2", saved=0)
    never_left = start_chat(tmp_path, "lfm2", saved=0)
    chat.say("b", OTHER)
    snapshots = sum(one.nbytes for one in chat.cache._parked["a"].snapshots)
    assert chat.cache.parked_bytes == chat.cache._parked["a"].pages.nbytes + snapshots > snapshots > 0
    back = list(chat.cache.resume("a", (Turn("user", never_left.stored.text[1:]),)))
    assert resumed_from(back) == (ASKED + 9, "memory")
    assert_continue_alike(chat, never_left)


def test_shared_prefix_resumes_from_an_intermediate_state(tmp_path):
    chat = start_chat(tmp_path, "qwen3_5")
    later = Chat(tmp_path, chat.runner.model)
    assert resumed_from(later.say("b", TALE + "and then")) == (ASKED - TAIL, "disk")
    fresh = Chat(tmp_path / "none", chat.runner.model)
    fresh.say("b", TALE + "and then")
    torch.testing.assert_close(later.logits, fresh.logits, rtol=1e-4, atol=1e-5)
    assert [event for event in Chat(tmp_path, chat.runner.model).say("c", OTHER) if isinstance(event, Resumed)] == []


def damage(chat: Chat, tmp_path, *which: int) -> None:
    path = tmp_path / "kv" / "a.kv"
    file = chat.cache._file(path)
    file.rows()
    states = file.end().states
    assert [state.tokens for state in states] == [ASKED - TAIL, ASKED + 9]
    for index in which:
        flip_byte(path, states[index].at + states[index].nbytes // 2)


def test_damaged_state_falls_back_to_the_one_before(tmp_path):
    chat = start_chat(tmp_path, "qwen3_5")
    damage(chat, tmp_path, 1)
    later, events = resume(chat, tmp_path)
    assert "state is damaged" in notes(events)[0]
    assert resumed_from(events) == (ASKED - TAIL, "disk")
    assert later.stored.ids == chat.stored.ids[: ASKED - TAIL]
    damage(chat, tmp_path, 0)
    later, events = resume(chat, tmp_path)
    assert "state is damaged" in notes(events)[0]
    assert (later.runner.kv.total, later.stored.ids, len(events)) == (0, [], 1)
    later.say("a", TALE)
    again = Chat(tmp_path / "none", chat.runner.model)
    again.say("a", TALE)
    assert_continue_alike(later, again)


@pytest.mark.parametrize("left", [0, 30, 500])
def test_file_truncated_within_its_states_restores_nothing(tmp_path, left):
    chat = start_chat(tmp_path, "lfm2")
    path = tmp_path / "kv" / "a.kv"
    file = chat.cache._file(path)
    file.rows()
    end = file.links[-1].end
    path.write_bytes(path.read_bytes()[: end + left])
    later, events = resume(chat, tmp_path)
    assert not [event for event in events if isinstance(event, Resumed)]
    assert later.runner.kv.total == 0


def test_state_of_another_transformers_version_is_refused(tmp_path, monkeypatch):
    chat = start_chat(tmp_path, "lfm2")
    monkeypatch.setattr(prefix_cache.transformers, "__version__", "6.0")
    _, events = resume(chat, tmp_path)
    assert "another version of transformers" in notes(events)[0]
    monkeypatch.undo()
    assert "version of transformers" not in prefix_cache.identity(load_tiny("llama"))


def test_damaged_page_invalidates_the_states_after_it(tmp_path):
    chat = start_chat(tmp_path, "lfm2")
    path = tmp_path / "kv" / "a.kv"
    flip_byte(path, 4096 + 3 * chat.cache._file(path).record_bytes(False) - 1)
    later, events = resume(chat, tmp_path)
    assert "damaged" in notes(events)[0]
    assert (later.runner.kv.total, later.stored.ids) == (0, [])


def test_states_over_the_limit_are_not_saved(tmp_path):
    chat = start_chat(tmp_path, "qwen3_5")
    file = chat.cache._file(tmp_path / "kv" / "a.kv")
    file.rows()
    small = start_chat(tmp_path / "small", "qwen3_5", saved=file.links[-1].end + 500)
    assert "room for" in small.cache._writer.problem
    assert (tmp_path / "small" / "kv" / "a.kv").stat().st_size < file.links[-1].end + 2000
    _, events = resume(small, tmp_path / "small")
    assert events == []
