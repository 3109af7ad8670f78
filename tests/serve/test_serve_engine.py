"""What waits for the engine and what it is asked, without a child: its client notes what is sent."""

import asyncio
from pathlib import Path

import pytest

from kvchat.cli import serve as command
from kvchat.cli.profile import load_settings
from kvchat.kv.memory import available
from kvchat.protocol.client import Crashed
from kvchat.protocol.figures import Stats
from kvchat.protocol.messages import Chat, Failed, Finished, Keeping, Load, Loaded, Peeked, Started, Stop, Turn
from kvchat.serve import server
from kvchat.serve.engine import Again, Ended, Engine, Job, parked
from kvchat.serve.refusals import Refusal

LOADED = Loaded("m", "L", 1, "cpu", "float32", 64, 2, 2, 32, 64, "full", {}, notes=("No GPU.",))
CHAT = Chat((Turn("user", "Hi."),))


class Noting:
    """In place of the child's client."""

    def __init__(self) -> None:
        self.sent: list[object] = []

    def send(self, command: object) -> None:
        self.sent.append(command)

    async def restart(self) -> None:
        """Nothing is started."""


def loaded(tmp_path: Path, limit: int = 9, parked: int = 0) -> tuple[Engine, Noting, list[str]]:
    said: list[str] = []
    engine = Engine(Load(keeping=Keeping(parked)), tmp_path / "log", limit, lambda stage: None, said.append, ())
    engine._client = client = Noting()
    engine._take(LOADED)
    return engine, client, said


def test_where_none_may_wait_one_at_a_time_is_answered(tmp_path):
    engine, client, _ = loaded(tmp_path, limit=0)
    for _ in range(2):
        engine.submit(CHAT)
        with pytest.raises(Refusal, match="already waiting"):
            engine.submit(CHAT)
        for report in (Started(1, 0), Finished("eos", "", Stats()), Peeked(0, 0, "")):
            engine._take(report)
    assert client.sent.count(CHAT) == 2


def end(engine: Engine, reason: str) -> None:
    for report in (Finished(reason, "", Stats()), Peeked(0, 0, "")):
        engine._take(report)


def asked(name: str) -> Chat:
    return Chat((Turn("user", name),))


def names(client: Noting) -> list[str]:
    return [each.turns[0].content for each in client.sent if isinstance(each, Chat)]


def drain(job: Job) -> list[type]:
    return [type(job.events.get_nowait()) for _ in range(job.events.qsize())]


def test_what_nobody_watches_lets_others_go_first_and_is_interrupted_for_them_once(tmp_path):
    engine, client, _ = loaded(tmp_path)
    title = engine.submit(asked("title"), can_wait=True)
    tags = engine.submit(asked("tags"), can_wait=True)
    engine._take(Started(1, 0))
    shown = [engine.submit(asked(name)) for name in ("first", "second")]
    assert client.sent.count(Stop()) == 1
    for reason in ("stopped", "eos", "eos"):
        end(engine, reason)
    assert names(client) == ["title", "first", "second", "title"]
    third = engine.submit(asked("third"))  # the title has waited once
    assert client.sent.count(Stop()) == 1
    for reason in ("eos", "eos", "eos"):
        end(engine, reason)
    assert names(client)[4:] == ["third", "tags"]
    assert drain(title) == [Started, Again, Ended]
    assert [drain(job) for job in (*shown, third, tags)] == [[Ended]] * 4
    assert engine.working + engine.waiting == 0


def test_what_was_interrupted_is_not_begun_anew_if_it_ended_before_or_its_client_left(tmp_path):
    engine, client, _ = loaded(tmp_path)
    for reason, leaves in (("eos", ""), ("stopped", "before"), ("stopped", "between")):
        title = engine.submit(asked("title"), can_wait=True)
        engine.submit(asked("shown"))
        if leaves == "before":
            engine.abandon(title)
        engine._take(Finished(reason, "", Stats()))
        if leaves == "between":  # while the engine works after the answer
            engine.abandon(title)
        engine._take(Peeked(0, 0, ""))
        end(engine, "eos")
        assert drain(title) == [Ended]
    assert names(client) == ["title", "shown"] * 3


def test_a_prompt_that_does_not_fit_is_refused_with_its_tokens(tmp_path):
    engine, _, _ = loaded(tmp_path)
    job = engine.submit(CHAT)
    for report in (Failed("Full.", "70 of 64.", "/new", "ContextFullError", tokens=70), Peeked(0, 0, "")):
        engine._take(report)
    error = job.events.get_nowait().refusal.body["error"]
    assert (error["message"], error["n_prompt_tokens"], error["n_ctx"]) == ("Full. 70 of 64.", 70, 64)


def test_what_fails_beside_an_answer_is_said_and_ends_none(tmp_path):
    engine, client, said = loaded(tmp_path)
    job = engine.submit(CHAT)
    engine._take(Failed("No figures.", "The GPU is lost.", aside=True))
    assert drain(job) == []
    assert "No figures." in said[-1]
    end(engine, "eos")
    assert drain(job) == [Ended]
    assert len(client.sent) == 2


@pytest.mark.parametrize("is_ended", [True, False])
def test_an_answer_that_ended_before_the_engine_died_is_given(tmp_path, is_ended):
    engine, _, _ = loaded(tmp_path)
    job = engine.submit(CHAT)
    if is_ended:
        engine._take(Finished("eos", "Paris.", Stats()))
    asyncio.run(engine._restart(Crashed(3, ())))
    ended = job.events.get_nowait()
    assert (ended.last is not None, ended.refusal is None) == (is_ended, is_ended)


def test_what_the_model_should_be_known_for_and_the_room_for_talks_is_said(tmp_path):
    _, _, said = loaded(tmp_path, parked=64 * 1234)
    assert "No GPU." in said
    assert [line for line in said if "1,234 tokens" in line]
    _, _, said = loaded(tmp_path)
    assert len(said) == 2
    split = Load(keeping=Keeping(64 * 1234), gpus=2, split="heads")
    assert not list(parked(LOADED, split)), "ranks keep none"


@pytest.mark.parametrize(("free", "given", "room"), [(40, "", 10), (4, "", 2), (40, "1", 1)])
def test_a_quarter_of_free_memory_is_for_talks_unless_the_settings_say(tmp_path, monkeypatch, free, given, room):
    if given:
        monkeypatch.setenv("KVCHAT_KV_PARKED_GIB", given)
    loads: list[Load] = []
    monkeypatch.setattr(available, "host_free", lambda: free * 2**30)
    monkeypatch.setattr(server, "serve", lambda load, *rest: loads.append(load))
    command.serve(load_settings(), "127.0.0.1", 0, "", (), 1)
    assert loads[0].keeping.parked_bytes == room * 2**30
