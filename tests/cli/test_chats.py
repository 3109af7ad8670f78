"""``kvchat chats``: saved conversations without a screen."""

import json

import pytest
from typer.testing import CliRunner

from kvchat import paths
from kvchat.cli.main import app
from kvchat.conversations.conversation import Conversation
from kvchat.conversations.store import ConversationStore
from kvchat.errors import UsageError


def save(question: str, id: str = "") -> Conversation:
    conversation = Conversation(id=id)
    conversation.ask(question)
    conversation.answer("Yes.", "eos")
    store = ConversationStore(paths.database())
    store.save(conversation.changes())
    store.close()
    return conversation


def run(*words: str) -> str:
    result = CliRunner().invoke(app, ["chats", *words])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.output


def test_conversations_are_listed_and_searched():
    assert run("list").count("\n") == 1, "one line says that none is saved"
    cat, dog = save("My cat is called Biscuit."), save("My dog is called Rex.")
    lines = run("list").splitlines()
    assert [line.split()[:2] for line in lines] == [["1", dog.id[:8]], ["2", cat.id[:8]]]
    assert lines[0].endswith("2 messages  My dog is called Rex.")
    found, excerpt = run("list", "bisc").splitlines()
    assert found.split()[:2] == ["2", cat.id[:8]], "its number among all, as /open takes it"
    assert excerpt.strip() == "My cat is called Biscuit."
    output = run("list", "elephant")
    assert not any(chat.id[:8] in output for chat in (cat, dog))
    assert [chat["id"] for chat in json.loads(run("list", "--json"))] == [dog.id, cat.id]


def test_exported_conversations_can_be_imported(tmp_path):
    saved = save("What is a cat?")
    assert "## You\n\nWhat is a cat?" in run("export", saved.id[:8])
    file = tmp_path / "chat.json"
    assert run("export", saved.id, str(file)).strip() == str(file)
    run("delete", saved.id)
    imported = run("import", str(file)).strip()
    assert run("list").split()[1] == imported
    with pytest.raises(UsageError, match="exists"):
        run("export", imported, str(file))
    with pytest.raises(UsageError, match="has no known file ending"):
        run("export", imported, str(tmp_path / "chat.pdf"))
    (tmp_path / "empty.json").write_text(json.dumps({**json.loads(file.read_text()), "messages": [], "leaf": None}))
    with pytest.raises(UsageError, match="has no messages"):
        run("import", str(tmp_path / "empty.json"))


def test_deleted_conversations_can_be_restored():
    saved = save("one")
    assert run("delete", saved.id[:8]).strip() == f"deleted {saved.id}"
    with pytest.raises(UsageError, match="no conversation"):
        run("delete", saved.id)
    run("restore", saved.id)
    assert run("list").split()[1] == saved.id[:8]
    with pytest.raises(UsageError, match="within a day"):
        run("restore", "nonesuch")


def test_a_conversation_is_addressed_by_its_number():
    save("My cat is called Biscuit.", "1" * 32)
    save("My dog is called Rex.", "2" * 32)
    assert "Rex" in run("export", "1")
    assert "Biscuit" in run("export", "2")
    assert "Biscuit" in run("export", "1" * 8), "eight digits, as they are listed, are an id"
    for number in ("0", "3"):
        with pytest.raises(UsageError, match=f'no conversation "{number}"'):
            run("delete", number)
    assert run("delete", "2").strip() == f"deleted {'1' * 32}"


def test_an_id_must_be_unambiguous():
    save("one", "aa1")
    save("two", "aa2")
    with pytest.raises(UsageError, match="2 conversations"):
        run("export", "aa")
    with pytest.raises(UsageError, match="no conversation"):
        run("export", "b")
