"""The question that the prompt's text becomes."""

import threading

import pytest
from support.app_driver import prompt, submit, wait_for

from kvchat.conversations.conversation import Conversation, Message
from kvchat.protocol.figures import Stats
from kvchat.protocol.messages import Sampling
from kvchat.tui.prompt import mentions
from kvchat.tui.prompt.arguments import compose
from kvchat.tui.prompt.history import BYTES_PER_TOKEN, bytes_per_token, estimate
from kvchat.tui.prompt.mentions import Entry, FolderReader, Part
from kvchat.tui.state import ChatState


@pytest.mark.parametrize(
    "text", ["//mode is a command", "// x = 1;", "and/or", r"\@makeatletter \_x\_", r"C:\new\table"]
)
def test_typed_text_is_sent_verbatim(text):
    assert compose([Part(text)], ChatState(Conversation(), Sampling(), "full")) == text


def test_files_come_before_the_question(tmp_path):
    (tmp_path / "a.txt").write_text("a fact")
    text = compose([Part(f"What does @{tmp_path}/a.txt say?")], ChatState(Conversation(), Sampling(), "full"))
    assert text.index("a fact") < text.index("What does")


def test_an_edited_answer_is_taken_verbatim():
    conversation = Conversation()
    conversation.ask("one")
    conversation.answer("hi")
    state = ChatState(conversation, Sampling(), "full")
    state.edited = conversation.path[-1].id
    assert compose([Part("//mode @nothing")], state) == "//mode @nothing"


# ---- The estimated tokens of a question before it is sent


def answer(text, tokens):
    return Message(parent=None, role="assistant", text=text, stats=Stats(generated_tokens=tokens))


def test_bytes_per_token_are_estimated_from_answers():
    assert bytes_per_token([answer("a" * 600, 100), answer("b" * 300, 80)]) == 5
    assert bytes_per_token([answer("a" * 60, 10)]) == BYTES_PER_TOKEN


@pytest.mark.parametrize(
    ("text", "is_typed", "tokens"),
    [("word " * 8, True, 10), ("@notes.txt", True, 103), ("@notes.txt", False, 2), ("@nothing.txt ...", True, 4)],
)
def test_mentioned_files_count_toward_the_estimate(tmp_path, monkeypatch, text, is_typed, tokens):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("x" * 402)
    assert estimate([Part(text, is_typed)], 4.0) == tokens


async def test_the_token_estimate_is_shown_while_typing(running):
    async with running() as (app, _pilot, until):
        prompt(app).insert("word " * 80)
        await until(lambda: prompt(app).border_subtitle == "≈ 100 tokens")
        prompt(app).insert("word " * 20_000)
        await until(lambda: "16,384" in prompt(app).border_subtitle)
        prompt(app).load_text("/budget 128")
        await until(lambda: prompt(app).border_subtitle == "")
        prompt(app).load_text("")
        submit(app, "hello")
        await until(lambda: prompt(app).border_subtitle == "")


# ---- Folders are read off the event loop: known entries come at once, new ones once they are read


def test_folders_list_entries_with_sizes(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.txt").write_text("abc")
    (tmp_path / "broken").symlink_to(tmp_path / "nowhere")
    found = {entry.name: entry for entry in mentions.read(f"{tmp_path}/")}
    assert found == {"sub": Entry("sub", is_folder=True), "a.txt": Entry("a.txt", size=3), "broken": Entry("broken")}
    assert mentions.read(f"{tmp_path}/nowhere/") == ()


def test_nested_entries_follow_and_are_limited(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a/b/deep.py", "a/near.py", ".git/config", "node_modules/x.js", "top.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    (tmp_path / "loop").symlink_to(tmp_path)

    def names(folder):
        return [entry.name for entry in mentions.read(folder)]

    assert sorted(names("")[:5]) == [".git", "a", "loop", "node_modules", "top.py"]
    assert sorted(names("")[5:7]) == ["a/b", "a/near.py"]
    assert names("")[7:] == ["a/b/deep.py"]
    assert names("a/")[2:] == ["b/deep.py"]
    assert sorted(names(f"{tmp_path}/a/")) == ["b", "near.py"]
    monkeypatch.setattr(mentions, "MAX_WITH_BELOW", 6)
    assert len(names("")) == 6
    monkeypatch.setattr(mentions, "WALK_S", -1)
    assert len(names("")) == 5


async def test_a_slow_folder_blocks_nothing_and_is_read_once():
    may_answer, asked, changes = threading.Event(), [], []

    def slow(folder):
        asked.append(folder)
        may_answer.wait(60)
        return (Entry("late.txt"),)

    reader = FolderReader(lambda: changes.append(1), slow)
    assert reader.entries("slow/") == reader.entries("slow/") == ()
    may_answer.set()
    await wait_for(lambda: changes)
    assert reader.entries("slow/") == (Entry("late.txt"),)
    assert asked == ["slow/"]


async def test_rereading_a_folder_reports_only_changes(monkeypatch):
    monkeypatch.setattr(mentions, "FRESH_S", 0.0)
    listing, asked, changes = [(Entry("a"),)], [], []
    reader = FolderReader(lambda: changes.append(1), lambda folder: asked.append(folder) or listing[0])

    async def look():
        reader.entries("x/")
        await wait_for(lambda: not reader._reading)

    await look()
    await look()
    assert (len(asked), len(changes)) == (2, 1)
    listing[0] = (Entry("a"), Entry("b"))
    await look()
    assert len(changes) == 2
    for number in range(2 * mentions.REMEMBERED):
        reader.entries(f"{number}/")
        await wait_for(lambda: not reader._reading)
    assert len(reader._known) == mentions.REMEMBERED
