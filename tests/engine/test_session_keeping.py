"""What a session writes of a conversation to disk, whatever else it is asked to do."""

import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.integrity import stored_kv
from support.loads import load_in

from kvchat.engine.prefix_cache import Job, SavedFolder, WriteBehind
from kvchat.engine.prompt import Stored
from kvchat.engine.session import Session
from kvchat.errors import UsageError
from kvchat.kv.geometry import Geometry
from kvchat.kv.memory.host_pool import HostPool
from kvchat.kv.memory.page_file import TOKEN, PageFile
from kvchat.kv.memory.pages import Pages
from kvchat.protocol.messages import Keeping, Load, Resumed, Sampling, Turn

GREEDY = Sampling(temperature=0, max_new_tokens=6)
LONG = (Turn("user", "The sea was calm and the whale went on. " * 30),)


@pytest.fixture(scope="module")
def model(model):
    """With a revision: conversations of a model that no folder holds are not saved."""
    return replace(model, revision="1")


@pytest.fixture
def session(model, tmp_path):
    """A session that saves conversations."""
    opened = Session(model, Load(keeping=Keeping(2**30, 2**30, str(tmp_path))))
    yield opened
    opened.close()


@pytest.fixture
def unblock(monkeypatch):
    """Block the writing of pages from the second one on, until this is called."""
    write, released = PageFile.write, threading.Event()

    def wait(file, page, *rest):
        assert page == 0 or released.wait(60)
        write(file, page, *rest)

    monkeypatch.setattr(PageFile, "write", wait)
    yield released.set
    released.set()


def start_writing(session: Session) -> list[int]:
    """Start writing a conversation; return the ids of its tokens."""
    list(session.answer(LONG, GREEDY, None, "one"))
    return list(session._loop.stored.ids)


def saved_ids(session: Session, name: str = "one") -> list[int]:
    """The ids on disk once writing has finished."""
    session._prefix_cache._writer._thread.join(60)
    cache = session._prefix_cache
    return cache._file(cache._folder.path(name)).rows()["id"].tolist()


def test_steps_do_not_interrupt_writing(session, unblock):
    ids = start_writing(session)
    for token in (5, 6, 7):
        session.step(token)
    assert session._prefix_cache._writer.is_writing
    unblock()
    assert saved_ids(session) == ids
    file = session._prefix_cache._file(session._prefix_cache._folder.path("one"))
    session.close(60)
    assert file.rows()["id"].tolist() == [*ids, 5, 6, 7]


@pytest.mark.parametrize("use", [lambda s: s.prefill([5, 6, 7]), lambda s: s.truncate(100)])
def test_prefill_and_truncate_are_written_at_once(session, unblock, use):
    start_writing(session)
    use(session)
    unblock()
    assert saved_ids(session) == session._loop.stored.ids


@pytest.mark.parametrize(
    "use",
    [
        lambda s: s.step(-1),
        lambda s: s.prefill([-1]),
        lambda s: list(s.answer((Turn("user", " "),), GREEDY, None, "one")),
        lambda s: list(s.answer((Turn("user", " "),), GREEDY, None, "two")),
        lambda s: list(s.resume("two", (Turn("user", " "),))),
    ],
)
def test_refused_calls_do_not_interrupt_writing(session, unblock, use):
    ids = start_writing(session)
    with pytest.raises(UsageError):
        use(session)
    unblock()
    assert saved_ids(session) == ids


def test_unstarted_generators_do_not_interrupt_writing(session, unblock):
    ids = start_writing(session)
    for unread in (session.answer(LONG, GREEDY), session.chat("More?"), session.rebuild(), session.resume("two", LONG)):
        del unread
    unblock()
    assert saved_ids(session) == ids


def test_chat_answers_are_written_too(session):
    start_writing(session)
    "".join(session.chat("Hello!", GREEDY))
    assert saved_ids(session) == session._loop.stored.ids


def test_pages_quantized_during_writing_are_saved_as_they_are(session, unblock, model, tmp_path):
    ids = start_writing(session)
    session.keep_pages("int8")
    for token in range(200, 280):  # past the page that was not full, into places that it frees
        session.step(token)
    unblock()
    assert saved_ids(session) == ids
    later = Session(model, Load(keeping=Keeping(0, 2**30, str(tmp_path))))
    answer = session.text(len(ids) - 6, len(ids))
    list(later.resume("one", (*LONG, Turn("assistant", answer))))
    assert later.total == len(ids)
    for found, expected in zip(stored_kv(later._kv.state), stored_kv(session._kv.state), strict=True):
        assert torch.equal(found, expected[:, : later.total])


@pytest.mark.parametrize("kept_in", ["memory", "disk"])
def test_resuming_without_turns_starts_a_new_conversation(model, tmp_path, kept_in):
    keeping = Keeping(2**30 * (kept_in == "memory"), 2**30 * (kept_in == "disk"), str(tmp_path))
    session = Session(model, load_in("streaming", {"budget": 64}, keeping=keeping))
    turns = (Turn("system", "Be brief."), Turn("user", "My cat is called Biscuit. " * 30, pinned=True))
    answer = list(session.answer(turns, GREEDY, None, "one"))[-1].text
    ids, pins = list(session._loop.stored.ids), session._kv.state.pins
    assert pins
    if kept_in == "disk":
        session._prefix_cache._writer._thread.join(60)
    assert list(session.resume("two", ())) == []
    assert (session.total, session._loop.stored.ids, session._kv.state.pins) == (0, [], ())
    session.prefill([5, 6, 7])
    with pytest.raises(UsageError, match="prompt is empty"):
        list(session.answer((), GREEDY, None, "one"))
    assert session._loop.stored.ids == [5, 6, 7]
    (back,) = session.resume("one", (*turns, Turn("assistant", answer)))
    assert (back.tokens, back.where, session._kv.state.pins) == (len(ids), kept_in, pins)
    assert session._loop.stored.ids == ids
    assert list(session.resume("one", [])) == [Resumed("one", len(ids), 0.0, "")]
    assert (session.total, session._kv.state.pins) == (len(ids), ())


def test_session_closes_after_a_gpu_failure(session, monkeypatch):
    def fail():
        raise RuntimeError("CUDA error")

    start_writing(session)
    session.step(5)
    monkeypatch.setattr(session._kv.state.host, "synchronize", fail)
    session.close()
    with pytest.raises(UsageError, match="closed"):
        session.step(5)


GEOMETRY = Geometry(layers=1, q_heads=1, kv_heads=1, d_k=2, d_v=2, dtype=torch.float32, page=4)


class BlockedFile(PageFile):
    """Stops in the middle of writing its second page until it is released."""

    def __init__(self, path) -> None:
        super().__init__(path, GEOMETRY, {})
        self.reached, self.released = threading.Event(), threading.Event()

    def write(self, page, *rest) -> None:
        if page == 1:
            self.reached.set()
            assert self.released.wait(60)
        super().write(page, *rest)


def job_of(file: PageFile, layers: torch.Tensor, stored: Stored) -> Job:
    rows = np.zeros(len(stored.ids), TOKEN)
    rows["id"] = stored.ids
    return Job(file, stored, 0, rows, lambda: Pages([False] * len(layers), [layers], []))


def test_interrupting_does_not_wait_for_the_disk(tmp_path):
    file, stored = BlockedFile(tmp_path / "a.kv"), Stored(list(range(14)))
    layers = torch.arange(64, dtype=torch.float32).view(4, 1, 2, 4, 2)
    before = layers.clone()
    writer = WriteBehind(SavedFolder(tmp_path, 2**30), GEOMETRY.page)
    writer.begin([job_of(file, layers, stored)])
    assert file.reached.wait(60)
    writer.interrupt()  # while the second page is being written
    assert stored.saved == 4
    layers.zero_()
    writer.begin([])
    file.released.set()
    writer.finish(60)
    assert file.rows()["id"].tolist() == list(range(8))
    pool = HostPool(GEOMETRY, torch.device("cpu"))
    assert file.read(pool, 8) == 8
    assert torch.equal(pool.layers[0][:2], before[:2])


def test_pages_over_the_limit_are_not_saved(tmp_path):
    file, stored = PageFile(tmp_path / "a.kv", GEOMETRY, {}), Stored(list(range(14)))
    writer = WriteBehind(SavedFolder(tmp_path, 4096 + 2 * file.record_bytes(False)), GEOMETRY.page)
    writer.begin([job_of(file, torch.zeros(4, 1, 2, 4, 2), stored)])
    writer.finish(60)
    assert stored.saved == 8
    assert len(file.rows()) == 8
    assert "kv.saved_gib" in writer.problem


def test_missing_file_is_rewritten_from_its_beginning(tmp_path):
    file, stored = PageFile(tmp_path / "a.kv", GEOMETRY, {}), Stored(list(range(14)), saved=8)
    writer = WriteBehind(SavedFolder(tmp_path, 2**30), GEOMETRY.page)
    job = job_of(file, torch.zeros(4, 1, 2, 4, 2), stored)
    job.first, job.rows, job.saved = 2, job.rows[8:], 8
    writer.begin([job])
    writer.finish(60)
    assert stored.saved == 0
    assert writer.problem == ""
