"""llama.cpp's own server that saves slots: conversations come back from its disk, deleted ones leave nothing there."""

from contextlib import closing

import pytest
from support.fake_server import HI
from support.gguf_files import write_model
from support.llama_server import LlamaServer

from kvchat import paths
from kvchat.models.load import load_model
from kvchat.protocol.figures import Stats
from kvchat.protocol.messages import Keeping, Load, Noted, Resumed, Sampling, Turn
from kvchat.remote.servers import PROBE_S
from kvchat.remote.session import RemoteSession, open_session
from kvchat.remote.slot_files import mark_deleted

pytestmark = pytest.mark.slow("servers are started")
CAT, DOG = ((Turn("user", f"My {pet}. " * 20),) for pet in ("cat is called Biscuit", "dog is a dachshund"))
EMPTY_BYTES = 36
SHORT = Sampling(temperature=0, max_new_tokens=4)


@pytest.fixture(scope="module")
def bundled(tmp_path_factory):
    """The bundled model as a file: a server has it at once."""
    pytest.importorskip("xllamacpp")
    file = tmp_path_factory.mktemp("gguf") / "bundled.gguf"
    write_model(file, load_model(Load("bundled", "cpu", "float32"), lambda stage: None))
    return file


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path, bundled):
    """Where the server saves."""
    monkeypatch.setattr(LlamaServer, "file", bundled)
    monkeypatch.setenv("KVCHAT_DATA_DIR", str(tmp_path / "data"))
    (tmp_path / "slots").mkdir()
    return tmp_path / "slots"


KEEPING = Keeping(0, 2**30, "kv")


@pytest.fixture
def keeping(connect):
    """Open a session that keeps K/V on disk."""
    return lambda server: connect(server.url, keeping=KEEPING)


@pytest.fixture
def session(keeping, folder):
    """A session at a server that saves slots."""
    with LlamaServer(context=512, slots=folder) as server:
        yield keeping(server)


def said_and_left(server: LlamaServer, turns: tuple[Turn, ...], conversation: str) -> Stats:
    """The cost of an answer in a session that ends after it."""
    with closing(open_session(Load(model=server.url, keeping=KEEPING))) as session:
        return answered(session, turns, conversation)[1]


def answered(session: RemoteSession, turns: tuple[Turn, ...], conversation: str):
    """All events of an answer in a conversation, and its cost."""
    events = list(session.answer(turns, SHORT, conversation=conversation))
    return events, events[-1].stats


def test_a_conversation_is_saved_when_it_is_left_and_restored_when_it_is_gone_back_to(session, folder):
    _, first = answered(session, CAT, "cat")
    assert not list(folder.iterdir())
    answered(session, DOG, "dog")
    assert [file.name for file in folder.iterdir()] == ["kvchat-cat.kv"]
    (resumed,) = session.resume("cat", CAT)
    assert isinstance(resumed, Resumed)
    assert (resumed.conversation, resumed.tokens) == ("cat", first.total_tokens - 1)
    assert list(session.resume("cat", CAT)) == []
    _, again = answered(session, CAT, "cat")
    assert again.reused_tokens == first.prompt_tokens - 1
    assert isinstance(answered(session, DOG, "dog")[0][0], Resumed)  # an answer goes there by itself


def test_a_server_that_was_started_again_restores_what_it_lost_and_only_that(keeping, folder):
    with LlamaServer(context=512, slots=folder) as server:
        first = said_and_left(server, CAT, "cat")
        assert list(keeping(server).resume("cat", CAT)) == []  # its slot has it still
    with LlamaServer(context=512, port=server.port, slots=folder) as server:
        (resumed,) = keeping(server).resume("cat", CAT)
        assert isinstance(resumed, Resumed)
        _, again = answered(keeping(server), CAT, "")
        assert again.reused_tokens == first.prompt_tokens - 1


def test_of_a_deleted_conversation_nothing_stays_and_the_current_one_is_not_read_again(session, folder):
    answered(session, CAT, "cat")
    _, first = answered(session, DOG, "dog")
    assert (folder / "kvchat-cat.kv").stat().st_size > 2**20
    mark_deleted("cat")
    session.forget("cat")
    assert (folder / "kvchat-cat.kv").stat().st_size == EMPTY_BYTES
    assert answered(session, DOG, "dog")[1].reused_tokens == first.prompt_tokens - 1
    mark_deleted("dog")
    session.forget("dog")
    assert {file.stat().st_size for file in folder.iterdir()} == {EMPTY_BYTES}
    assert answered(session, DOG, "")[1].reused_tokens < first.prompt_tokens // 2  # nor in the slot
    assert "dog" not in paths.server_slots_file().read_text()


def test_what_was_deleted_while_another_model_was_in_use_is_emptied_later(keeping, folder):
    with LlamaServer(context=512, slots=folder) as server:
        said_and_left(server, CAT, "cat")
        mark_deleted("cat")
        answered(keeping(server), HI, "hi")
        assert (folder / "kvchat-cat.kv").stat().st_size == EMPTY_BYTES


def test_a_file_that_is_gone_is_told_and_read_again(session, folder):
    answered(session, CAT, "cat")
    answered(session, DOG, "dog")
    (folder / "kvchat-cat.kv").unlink()
    (noted,) = session.resume("cat", CAT)
    assert isinstance(noted, Noted)
    assert list(session.resume("dog", DOG))
    assert list(session.resume("cat", CAT)) == []


def test_a_file_that_cannot_be_restored_is_emptied_with_its_conversation(keeping, folder):
    with LlamaServer(context=512, slots=folder) as server:
        said_and_left(server, (Turn("user", CAT[0].content * 2),), "cat")
        file = folder / "kvchat-cat.kv"
    with LlamaServer(context=256, port=server.port, slots=folder) as server:  # too few tokens for it
        session = keeping(server)
        (noted,) = session.resume("cat", CAT)
        assert isinstance(noted, Noted)
        mark_deleted("cat")
        session.forget("cat")
        assert file.stat().st_size == EMPTY_BYTES


def test_a_server_that_is_busy_is_waited_for(keeping, folder):
    with LlamaServer(context=512, slots=folder) as server:
        session = keeping(server)
        answered(session, CAT, "cat")
        server.pause(PROBE_S + 0.5)
        answered(session, DOG, "dog")
        assert (folder / "kvchat-cat.kv").exists()


def test_a_server_that_cannot_write_is_told(keeping, folder):
    with LlamaServer(context=512, slots=folder) as server:
        folder.rmdir()
        session = keeping(server)
        answered(session, CAT, "cat")
        (noted,) = session.resume("dog", DOG)
        assert "Unable to save" in noted.text


def test_where_nothing_is_offered_or_wanted_nothing_is_saved(keeping, folder, connect):
    with LlamaServer(context=512) as server:
        session = keeping(server)
        for name, turns in (("cat", CAT), ("dog", DOG), ("cat", CAT)):
            answered(session, turns, name)
    with LlamaServer(context=512, slots=folder) as server:
        sessions = connect(server.url), keeping(server)
        answered(sessions[0], CAT, "cat")
        for kept in ("", ""):  # conversations that are not kept
            answered(sessions[1], CAT, kept)
        for session in sessions:
            assert list(session.resume("dog", DOG)) == []
    assert not list(folder.iterdir())
    assert not paths.server_slots_file().exists()
