"""Saved conversations survive crashes, other processes and disk errors."""

import signal
import sqlite3
import stat
import subprocess
import sys
from contextlib import closing

import pytest
from support.full_disk import full_disk
from support.keeping import save_changes

from kvchat.conversations import store as module
from kvchat.conversations.conversation import Conversation, ModeChange
from kvchat.conversations.store import MARK, MIGRATIONS, ConversationStore, StoreError
from kvchat.errors import UsageError
from kvchat.protocol.figures import Stats

STATS = Stats(generated_tokens=3, decode_tokens_per_s=7.5, switches=({"from": "full"},))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "data" / "chats.db"


@pytest.fixture
def store(path):
    store = ConversationStore(path)
    yield store
    store.close()


def conversation(*texts: str, system: str | None = None) -> Conversation:
    made = Conversation(system)
    for number, text in enumerate(texts):
        made.answer(text, "eos", "receipt", STATS) if number % 2 else made.ask(text)
    return made


def saved(store: ConversationStore, *texts: str) -> Conversation:
    made = conversation(*texts)
    save_changes(store, made)
    return made


def test_a_conversation_is_loaded_as_it_was_saved(store):
    written = conversation("one", "1 \ud800 \0 ¿", system="be brief")
    written.go_to(written.leaf.parent)
    written.answer("again")
    save_changes(store, written)
    read = store.load(written.id)
    assert (read.id, read.title, read.system, read.created) == (written.id, "one", "be brief", written.created)
    assert [message.text for message in read.messages.values()] == ["one", "1 ? \0 ¿", "again"]
    assert read.leaf == written.leaf
    assert read.stats == [STATS]
    assert read.changes() is None


LINES = (ModeChange(3, "full -> sync", 40, "sync"), ModeChange(7, "sync -> full", 90, "full"))


def test_switches_are_saved(store):
    made = saved(store, "one")
    made.answer("one two three", "", switch_lines=LINES[:1])
    save_changes(store, made)
    made.answer("one two three four", "eos", switch_lines=LINES)
    save_changes(store, made)
    read = store.load(made.id)
    assert read.leaf == made.leaf
    assert read.leaf.switch_lines == LINES
    assert read.leaf.marked_text == "one ┃¹ two ┃² three four\n\n┃¹ full -> sync\n\n┃² sync -> full"


@pytest.mark.parametrize("version", range(1, len(MIGRATIONS)))
def test_an_older_database_is_opened_without_loss(path, version):
    path.parent.mkdir()
    db = sqlite3.connect(path)
    for statements in MIGRATIONS[:version]:
        for statement in statements:
            db.execute(statement)
    db.execute("INSERT INTO conversation (id, title, created, updated, leaf) VALUES ('c', 'one', 1.0, 1.0, 'b')")
    for id, parent, role, text in (("a", None, "user", "one"), ("b", "a", "assistant", "1")):
        db.execute(
            "INSERT INTO message (id, conversation, parent, role, text, created, ending, receipt)"
            " VALUES (?, 'c', ?, ?, ?, 1.0, 'eos', '3 tok')",
            (id, parent, role, text),
        )
    db.execute(f"PRAGMA user_version = {version}")
    db.commit()
    db.close()
    ConversationStore(path).close()
    store = ConversationStore(path)  # now the database is up to date
    read = store.load("c")
    assert [(m.marked_text, m.receipt, m.pinned) for m in read.path] == [("one", "3 tok", False), ("1", "3 tok", False)]
    assert [hit.title for hit in store.search("one")] == ["one"]
    read.answer("one two three four", "eos", switch_lines=LINES)
    save_changes(store, read)
    assert store.load("c").leaf.switch_lines == LINES
    store.close()


def test_database_files_are_private_or_made_private(store, path):
    saved(store, "one")
    files = [*path.parent.iterdir()]
    assert [stat.S_IMODE(file.stat().st_mode) for file in files] == [0o600] * 3
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    for file in files:
        file.chmod(0o644)
    ConversationStore(path).close()
    assert {stat.S_IMODE(file.stat().st_mode) for file in path.parent.iterdir()} == {0o600}


def test_the_latest_conversation_comes_first(store):
    assert store.latest() is None
    first, second = saved(store, "one", "1"), saved(store, "two")
    assert [summary.title for summary in store.recent()] == ["two", "one"]
    first.answer("more", "eos")
    save_changes(store, first)
    assert store.latest().id == first.id
    assert [summary.messages for summary in store.recent()] == [2, 1]
    assert second.changes() is None


def test_a_deleted_conversation_can_be_restored_for_a_day(store, path, monkeypatch):
    kept, lost = saved(store, "kept"), saved(store, "lost")
    store.delete(kept.id)
    store.delete(lost.id)
    assert store.recent() == []
    with pytest.raises(UsageError, match="no conversation"):
        store.load(kept.id)
    store.restore(kept.id)
    monkeypatch.setattr(module, "RESTORABLE_S", -1)
    ConversationStore(path).close()
    store.restore(lost.id)
    assert [summary.title for summary in store.recent()] == ["kept"]
    assert store.search("lost") == []


def test_renaming_changes_only_the_title(store):
    first, second = saved(store, "one", "1"), saved(store, "two")
    before = store.load(first.id).messages
    store.rename(first.id, "x\n" * 100)
    assert [summary.id for summary in store.recent()] == [second.id, first.id]
    read = store.load(first.id)
    assert read.title == f"{'x ' * 29}x…"
    assert read.messages == before


def test_search_finds_words_in_messages_and_titles(store):
    cat = saved(store, "My cat is called Biscuit.", "Thank you.", "and more", "a whale")
    dog = saved(store, "My dog is called Rex.", "Fine.")
    dog.rename("About animals")
    save_changes(store, dog)
    found = store.search("cat bisc")
    assert [summary.id for summary in found] == [cat.id]
    assert found[0].excerpt == "My {0}cat{1} is called {0}Biscuit{1}.".format(*MARK)
    assert cat.messages[found[0].message].role == "user"
    assert {summary.id for summary in store.search("called")} == {cat.id, dog.id}
    assert [summary.id for summary in store.search("ANIMALS")] == [dog.id]
    assert len(store.search(" \0 ")) == 2


SEARCHES = {
    "我的猫叫饼干，它喜欢晒太阳。": ["饼干", "晒太阳", "猫 饼干", "太"],
    "私の猫はビスケットといいます。": ["ビスケット", "猫", "ビスケ"],
    "내 고양이의 이름은 비스킷이에요": ["고양이", "비스킷", "이름 비스"],
    "แมวของฉันชื่อบิสกิต": ["บิสกิต", "แมว"],
    "मेरी बिल्ली का नाम बिस्कुट है": ["बिल्ली", "बिस्कुट नाम"],
    "Мою кошку зовут Печенька": ["печенька", "КОШКУ", "печ"],
    "Η ΓΑΤΑ ΜΟΥ ΛΕΓΕΤΑΙ ΟΔΥΣΣΕΥΣ": ["οδυσσευς", "γατα", "οδυσ"],
    "Die STRASSE heißt Größe": ["straße", "GRÖSSE", "größe", "groß"],
    "cafe\u0301 Việt Nam": ["café", "CAFÉ", "cafe", "việt", "VIE\u0302\u0323T"],
    "قطتي اسمها بسكويت": ["بسكويت", "اسمها"],
    "\U0001e922\U0001e923 adlam": ["\U0001e900\U0001e901"],
    "The 🎉 is → there, in C++": ["🎉", "→", "c++", "🎉 there"],
    "日本語ABC": ["語abc"],
}


@pytest.mark.parametrize("text", SEARCHES)
def test_search_finds_words_of_any_script_and_case(store, text):
    saved(store, "nothing of it, but 犬 and собака", "no")
    made = saved(store, "a question", text)
    for sought in SEARCHES[text]:
        assert [summary.id for summary in store.search(sought)] == [made.id], sought
    made.rename(text)
    save_changes(store, made)
    assert [summary.id for summary in store.search(text.swapcase() if "ß" not in text else text)] == [made.id]


def test_excerpts_without_spaces_are_short_and_mark_the_words(store):
    saved(store, "一" * 500 + "饼干" + "二" * 500)
    (found,) = store.search("饼干")
    assert found.excerpt == "…" + "一" * 40 + "饼干".join(MARK) + "二" * 100 + "…"


def test_a_search_reads_each_message_once(store):
    saved(store, *["the same word"] * 1000)
    steps = []
    store._db.set_progress_handler(lambda: steps.append(1) or 0, 1000)  # called once per 1,000 steps of SQLite
    (found,) = store.search("word")
    assert found.messages == 1000
    assert len(steps) < 500


def test_search_text_is_not_a_query(store):
    saved(store, "nothing of it")
    for text in ('"', "a AND", "*", "NEAR(", "-", "col:x", "'; --", "(", "!!!", "\ud800"):
        assert store.search(text) == []


def test_changed_and_withdrawn_text_is_no_longer_found(store):
    changed = saved(store, "one", "first")
    changed.answer("second", "eos")
    question = changed.ask("third")
    save_changes(store, changed)
    assert store.search("third")
    changed.withdraw()
    save_changes(store, changed)
    assert [bool(store.search(word)) for word in ("first", "second", "third")] == [False, True, False]
    assert question.id not in store.load(changed.id).messages


@pytest.fixture
def other(store, path):
    """The same database, opened by another application."""
    other = ConversationStore(path)
    yield other
    other.close()


def opened_twice(store, other, *texts):
    """A conversation that two applications have opened."""
    mine = saved(store, *texts)
    return mine, other.load(mine.id)


def stored_texts(store, made) -> list[str]:
    return [message.text for message in store.load(made.id).messages.values()]


def test_two_applications_add_branches_to_one_conversation(store, other):
    mine, theirs = opened_twice(store, other, "one", "1")
    mine.ask("mine")
    theirs.ask("theirs")
    save_changes(store, mine)
    save_changes(other, theirs)
    read = store.load(mine.id)
    assert [message.text for message in read.siblings(read.leaf.id)] == ["mine", "theirs"]


def test_saving_restores_a_conversation_purged_elsewhere(store, other, path, monkeypatch):
    mine, _ = opened_twice(store, other, "one", "1", "two", "2")
    mine.go_to(None)
    mine.ask("another branch")
    save_changes(store, mine)
    mine.select(mine.path[0].id)
    other.delete(mine.id)
    monkeypatch.setattr(module, "RESTORABLE_S", -1)
    ConversationStore(path).close()
    mine.answer("3", "eos")
    save_changes(store, mine)
    read = store.load(mine.id)
    assert read.messages == mine.messages
    assert (read.title, read.leaf) == ("one", mine.leaf)


def test_a_question_answered_elsewhere_is_not_deleted(store, other):
    mine, theirs = opened_twice(store, other, "one", "1", "two")
    theirs.answer("2", "eos")
    save_changes(other, theirs)
    assert mine.withdraw() == "two"
    save_changes(store, mine)
    assert other.load(mine.id).messages == theirs.messages


def test_a_question_withdrawn_elsewhere_returns_only_with_an_answer(store, other):
    mine, theirs = opened_twice(store, other, "one", "1", "two")
    last = theirs.leaf.id
    mine.withdraw()
    save_changes(store, mine)
    theirs.go_to(theirs.leaf.parent)
    theirs.rename("other")
    save_changes(other, theirs)
    assert stored_texts(store, mine) == ["one", "1"]
    store._db.execute("UPDATE conversation SET leaf = ?", (last,))
    assert [message.text for message in other.load(mine.id).path] == ["one", "1"], "the newest is shown"
    theirs.go_to(last)
    theirs.answer("2", "eos")
    save_changes(other, theirs)
    assert stored_texts(store, mine) == ["one", "1", "two", "2"]


def test_a_conversation_without_a_leaf_opens_at_its_end(store):
    made = saved(store, "one", "1")
    made.go_to(None)
    save_changes(store, made)
    assert [message.text for message in store.load(made.id).path] == ["one", "1"]


def test_a_conversation_is_listed_while_it_has_a_question(store, other):
    mine, theirs = opened_twice(store, other, "one")
    mine.withdraw()
    save_changes(store, mine)
    assert store.recent() == []
    mine.ask("two")
    save_changes(store, mine)
    assert [(found.id, found.messages) for found in store.recent()] == [(mine.id, 1)]
    mine.withdraw()
    save_changes(store, mine)
    theirs.answer("1", "eos")
    save_changes(other, theirs)
    assert stored_texts(store, mine) == ["one", "1"]


def test_empty_conversations_disappear_at_the_next_start(store, path):
    saved(store, "Hello")
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("DELETE FROM message")
    assert [found.messages for found in store.recent()] == [0]
    with closing(ConversationStore(path)) as opened:
        assert opened.recent() == []


def test_independent_changes_of_two_applications_are_merged(store, other):
    mine, theirs = opened_twice(store, other, "one", "1")
    theirs.rename("their title")
    theirs.answer("1 and more", "eos")
    save_changes(other, theirs)
    mine.pin(mine.leaf.id, True)
    mine.system = "my system prompt"
    save_changes(store, mine)
    read = store.load(mine.id)
    assert (read.title, read.system) == ("their title", "my system prompt")
    assert (read.last_text(), read.leaf.pinned) == ("1 and more", True)


def test_both_versions_of_a_conflicting_text_are_kept(store, other):
    mine, theirs = opened_twice(store, other, "one", "1")
    theirs.answer("1 theirs", "eos")
    save_changes(other, theirs)
    mine.answer("1 mine", "eos")
    save_changes(store, mine)
    read = store.load(mine.id)
    assert [message.text for message in read.siblings(read.leaf.id)] == ["1 mine", "1 theirs"]


def test_an_unacknowledged_save_can_be_repeated(store):
    made = saved(store, "one", "1")
    made.answer("1 and", "eos")
    store.save(made.changes())
    made.answer("1 and more", "eos")
    save_changes(store, made)
    assert stored_texts(store, made) == ["one", "1 and more"]


def test_a_failed_save_writes_nothing(store):
    made = conversation("one", "1")
    store._db.execute("CREATE TRIGGER full BEFORE INSERT ON message BEGIN SELECT RAISE(FAIL, ''); END")
    with pytest.raises(StoreError, match="cannot be written"):
        save_changes(store, made)
    assert store.recent() == []
    assert made.changes().changed == made.path


def test_a_full_disk_is_reported_when_saving(store):
    pages = store._db.execute("PRAGMA page_count").fetchone()[0]
    store._db.execute(f"PRAGMA max_page_count = {pages}")
    made = conversation("one", "x" * 2**20)
    changes = made.changes()
    with pytest.raises(StoreError, match="disk is full"):
        store.save(changes)
    store._db.execute("PRAGMA max_page_count = 1000000")
    store.save(changes)
    assert store.load(made.id).last_text() == "x" * 2**20


def test_a_full_disk_is_reported_when_opening(path):
    ConversationStore(path).close()
    with full_disk(), pytest.raises(StoreError, match="disk is full"):
        ConversationStore(path)
    ConversationStore(path).close()


def test_a_locked_database_is_reported_after_a_timeout(store, path, monkeypatch):
    store._db.execute("PRAGMA busy_timeout = 10")
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    made = conversation("one")
    changes = made.changes()
    with pytest.raises(StoreError, match="Another program"):
        store.save(changes)
    other.execute("ROLLBACK")
    other.close()
    store.save(changes)
    assert store.latest().title == "one"


@pytest.mark.parametrize("content", [b"no database at all\n" * 100, b"SQLite format 3\0" + b"\xff" * 4096])
def test_a_damaged_file_is_rejected_and_unchanged(path, content):
    path.parent.mkdir()
    path.write_bytes(content)
    with pytest.raises(StoreError, match="file"):
        ConversationStore(path)
    assert path.read_bytes() == content


def test_a_newer_database_is_rejected_and_unchanged(store, path):
    saved(store, "one")
    store._db.execute(f"PRAGMA user_version = {len(MIGRATIONS) + 1}")
    with pytest.raises(StoreError, match="newer kvchat"):
        ConversationStore(path)
    assert store.latest().title == "one"


def test_the_store_needs_a_valid_path_or_none(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot be opened"):
        ConversationStore(tmp_path / "file" / "chats.db")
    store = ConversationStore(None)
    saved(store, "one")
    assert store.latest().title == "one"
    store.close()


def test_saved_conversations_survive_kill(path):
    code = f"""
import os, sys
from pathlib import Path
from kvchat.conversations.conversation import Conversation
from kvchat.conversations.store import ConversationStore
store, conversation = ConversationStore(Path({str(path)!r})), Conversation()
conversation.ask("one")
for number in range(10**9):
    conversation.answer("x" * number)
    store.save(conversation.changes())
    print(number, flush=True)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        for _ in range(50):
            last = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
        last = int((process.stdout.read().split() or [last])[-1])
    store = ConversationStore(path)
    assert len(store.load(store.latest().id).last_text()) in (last, last + 1)
    store.close()


# ---- K/V files are deleted and restored with their conversation


def test_kv_files_are_deleted_and_restored_with_their_conversation(store, path, monkeypatch):
    made = saved(store, "Hello")
    file = path.parent / "kv" / f"{made.id}.kv"
    file.parent.mkdir()
    file.write_bytes(b"pages")
    store.delete(made.id)
    assert not file.exists()
    store.restore(made.id)
    assert file.read_bytes() == b"pages"
    store.delete(made.id)
    (aside,) = file.parent.iterdir()
    ConversationStore(path).close()
    assert aside.exists()
    monkeypatch.setattr(module, "RESTORABLE_S", -1)
    ConversationStore(path).close()
    assert not aside.exists()


def test_kv_files_of_empty_conversations_are_deleted_on_start(store, path):
    kept, withdrawn = saved(store, "Hello"), Conversation()
    withdrawn.ask("Never mind.")
    save_changes(store, withdrawn)
    (path.parent / "kv").mkdir()
    files = [path.parent / "kv" / f"{one.id}.kv" for one in (kept, withdrawn)]
    for file in files:
        file.write_bytes(b"pages")
    withdrawn.withdraw()
    save_changes(store, withdrawn)
    ConversationStore(path).close()
    assert [file.exists() for file in files] == [True, False]
