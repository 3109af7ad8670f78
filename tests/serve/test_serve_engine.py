"""The queue for the engine and the commands to it, without a child process: a client records them."""

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


class RecordingClient:
    """Takes the place of the child's client."""

    def __init__(self) -> None:
        self.sent: list[object] = []

    def send(self, command: object) -> None:
        self.sent.append(command)

    async def restart(self) -> None:
        """Nothing is started."""


def loaded(tmp_path: Path, limit: int = 9, parked: int = 0) -> tuple[Engine, RecordingClient, list[str]]:
    printed: list[str] = []
    engine = Engine(Load(keeping=Keeping(parked)), tmp_path / "log", limit, lambda stage: None, printed.append, ())
    engine._client = client = RecordingClient()
    engine._take(LOADED)
    return engine, client, printed


def test_without_a_queue_one_request_is_answered_at_a_time(tmp_path):
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


def question(name: str) -> Chat:
    return Chat((Turn("user", name),))


def names(client: RecordingClient) -> list[str]:
    return [each.turns[0].content for each in client.sent if isinstance(each, Chat)]


def drain(job: Job) -> list[type]:
    return [type(job.events.get_nowait()) for _ in range(job.events.qsize())]


def test_unwatched_requests_yield_and_are_interrupted_once(tmp_path):
    engine, client, _ = loaded(tmp_path)
    title = engine.submit(question("title"), can_wait=True)
    tags = engine.submit(question("tags"), can_wait=True)
    engine._take(Started(1, 0))
    watched = [engine.submit(question(name)) for name in ("first", "second")]
    assert client.sent.count(Stop()) == 1
    for reason in ("stopped", "eos", "eos"):
        end(engine, reason)
    assert names(client) == ["title", "first", "second", "title"]
    third = engine.submit(question("third"))  # the title has waited once
    assert client.sent.count(Stop()) == 1
    for reason in ("eos", "eos", "eos"):
        end(engine, reason)
    assert names(client)[4:] == ["third", "tags"]
    assert drain(title) == [Started, Again, Ended]
    assert [drain(job) for job in (*watched, third, tags)] == [[Ended]] * 4
    assert engine.working + engine.waiting == 0


def test_ended_or_abandoned_requests_are_not_restarted(tmp_path):
    engine, client, _ = loaded(tmp_path)
    for reason, leaves in (("eos", ""), ("stopped", "before"), ("stopped", "between")):
        title = engine.submit(question("title"), can_wait=True)
        engine.submit(question("shown"))
        if leaves == "before":
            engine.abandon(title)
        engine._take(Finished(reason, "", Stats()))
        if leaves == "between":  # while the engine works after the answer
            engine.abandon(title)
        engine._take(Peeked(0, 0, ""))
        end(engine, "eos")
        assert drain(title) == [Ended]
    assert names(client) == ["title", "shown"] * 3


def test_a_prompt_that_does_not_fit_shows_token_counts(tmp_path):
    engine, _, _ = loaded(tmp_path)
    job = engine.submit(CHAT)
    for report in (Failed("Full.", "70 of 64.", "/new", "ContextFullError", tokens=70), Peeked(0, 0, "")):
        engine._take(report)
    error = job.events.get_nowait().refusal.body["error"]
    assert (error["message"], error["n_prompt_tokens"], error["n_ctx"]) == ("Full. 70 of 64.", 70, 64)


def test_side_failures_are_printed_and_end_no_answer(tmp_path):
    engine, client, printed = loaded(tmp_path)
    job = engine.submit(CHAT)
    engine._take(Failed("No figures.", "The GPU is lost.", aside=True))
    assert drain(job) == []
    assert "No figures." in printed[-1]
    end(engine, "eos")
    assert drain(job) == [Ended]
    assert len(client.sent) == 2


@pytest.mark.parametrize("is_ended", [True, False])
def test_a_finished_answer_survives_an_engine_crash(tmp_path, is_ended):
    engine, _, _ = loaded(tmp_path)
    job = engine.submit(CHAT)
    if is_ended:
        engine._take(Finished("eos", "Paris.", Stats()))
    asyncio.run(engine._restart(Crashed(3, ())))
    ended = job.events.get_nowait()
    assert (ended.last is not None, ended.refusal is None) == (is_ended, is_ended)


def test_notes_and_memory_for_conversations_are_printed(tmp_path):
    _, _, printed = loaded(tmp_path, parked=64 * 1234)
    assert "No GPU." in printed
    assert [line for line in printed if "1,234 tokens" in line]
    _, _, printed = loaded(tmp_path)
    assert len(printed) == 2
    split = Load(keeping=Keeping(64 * 1234), gpus=2, split="heads")
    assert not list(parked(LOADED, split)), "ranks keep none"


@pytest.mark.parametrize(("free", "setting", "room"), [(40, "", 10), (4, "", 2), (40, "1", 1)])
def test_conversations_get_a_quarter_of_free_memory_by_default(tmp_path, monkeypatch, free, setting, room):
    if setting:
        monkeypatch.setenv("KVCHAT_KV_PARKED_GIB", setting)
    loads: list[Load] = []
    monkeypatch.setattr(available, "host_free", lambda: free * 2**30)
    monkeypatch.setattr(server, "serve", lambda load, *rest: loads.append(load))
    command.serve(load_settings(), "127.0.0.1", 0, "", (), 1)
    assert loads[0].keeping.parked_bytes == room * 2**30
