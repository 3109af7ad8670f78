"""Exported conversations: for reading, and for importing again."""

import json
import time

import pytest

from kvchat.conversations import export
from kvchat.conversations.conversation import MARK, Conversation, ModeChange, notes, with_marks
from kvchat.errors import DoesNotFitError, UsageError
from kvchat.protocol.figures import Stats


@pytest.fixture
def conversation():
    made = Conversation("be <brief>")
    made.ask("What is *this*? <script>alert(1)</script>")
    made.answer("first", "eos")
    made.go_to(made.leaf.parent)
    made.answer("| a |\n|---|\n| <img src=x onerror=alert(1)> |\n\n[x](javascript:alert(1))", "eos", "3 tok")
    return made


def imported_again(conversation):
    """A conversation from its file."""
    return export.from_json(export.to_json(conversation).encode("utf-8-sig"), "x.json")


def test_markdown_contains_the_current_path(conversation):
    text = export.to_markdown(conversation)
    assert text.startswith("# What is *this*?")
    assert "## System\n\nbe <brief>\n\n## You\n\nWhat is *this*?" in text
    assert "## Model\n\n| a |" in text
    assert "first" not in text


def test_an_impossible_date_is_left_out(conversation):
    conversation.created = 1e300
    assert export.to_markdown(conversation).partition("\n")[2].startswith("\n## System")


def test_markdown_shows_model_mode_and_date(conversation):
    conversation.mode, conversation.params = "speculative", {"budget": 128, "sink": None}
    conversation.ask("And this?")
    conversation.answer("It is.", "eos", "9 tok", model="SmolLM2, int4")
    made, answered = conversation.created, conversation.leaf.created
    day, minute = (time.strftime(form, time.localtime(made)) for form in ("%Y-%m-%d", "%H:%M"))
    answered_at = time.strftime("%Y-%m-%d %H:%M", time.localtime(answered))
    text = export.to_markdown(conversation)
    assert f"{day} {minute} · SmolLM2, int4 · speculative mode, budget 128*" in text
    assert f"{answered_at} · SmolLM2, int4 · 9 tok" in text
    read = imported_again(conversation)
    assert (read.mode, read.params) == ("speculative", {"budget": 128, "sink": None})
    assert read.leaf.model == "SmolLM2, int4"


@pytest.mark.parametrize(
    ("title", "given", "file"),
    [
        ("My cat", "", "My cat.md"),
        ("My cat", ".", "My cat.md"),
        ("My cat", ".json", "My cat.json"),
        ("My cat", "notes/", "notes/My cat.md"),
        ("My cat", "notes", "notes/My cat.md"),
        ("My cat", "cats", "cats.md"),
        ("My cat", "cats.json", "cats.json"),
        ("a/b: what\0 is *it*?\n..", "", "a b what is it.md"),
        ("../../etc/passwd", "", "etc passwd.md"),
        ("...", "", "conversation.md"),
        ("猫" * 60, "", f"{'猫' * 60}.md"),
        ("taken", "", "taken 3.md"),
    ],
)
def test_unnamed_files_are_named_after_the_title(tmp_path, monkeypatch, title, given, file):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes").mkdir()
    for taken in ("taken.md", "taken 2.md"):
        (tmp_path / taken).write_text("there")
    conversation = Conversation(title=title)
    conversation.ask("hello")
    path = export.destination(conversation, given)
    assert str(path) == file
    export.write(conversation, path)
    assert (tmp_path / file).read_text()


def test_json_is_imported_as_a_new_conversation(conversation):
    read = imported_again(conversation)
    assert (read.title, read.system, read.created) == (conversation.title, "be <brief>", conversation.created)
    assert read.turns == conversation.turns
    assert [m.text for m in read.messages.values()] == [m.text for m in conversation.messages.values()]
    assert not {read.id, *read.messages} & {conversation.id, *conversation.messages}
    assert len(read.changes().changed) == 3


def test_json_keeps_the_stats_of_answers(conversation):
    stats = Stats(3, 1, 5, 8, read_share=0.5, switches=({"at": 4, "mode": "sync"},), extras={"pages": 2})
    conversation.ask("and?")
    conversation.answer("so", "eos", "5 tok", stats)
    read = imported_again(conversation)
    assert read.stats == [stats]
    assert [message.stats for message in read.path] == [None, None, None, stats]


@pytest.mark.parametrize("ending", [".md", ".json"])
def test_surrogates_and_impossible_dates_can_be_exported(conversation, tmp_path, ending):
    conversation.ask("File caf\udce9.txt:\n```txt\nblack\n```")  # as Python decodes a file name of another system
    conversation.created = 1e300
    export.write(conversation, tmp_path / f"x{ending}")
    assert "File caf?.txt:" in (tmp_path / f"x{ending}").read_text()


def test_every_format_contains_the_switches(conversation):
    conversation.ask("and?")
    conversation.answer("one two three", "eos", switch_lines=(ModeChange(3, "full -> sync", 40, "sync"),))
    assert "## Model\n\none ┃ two three\n\n┃ full -> sync\n" in export.to_markdown(conversation)
    read = imported_again(conversation)
    assert read.leaf.switch_lines == conversation.leaf.switch_lines
    older = broken(lambda file, messages: [message.pop("switch_lines") for message in messages], conversation)
    assert export.from_json(older, "x.json").leaf.marked_text == "one two three"


def test_unknown_and_damaged_stats_are_left_out(conversation):
    known = {"total_tokens": 8, "joy": 3}
    for stats, kept in (
        (known, [Stats(total_tokens=8)]),
        ("x", []),
        ({"prompt_tokens": -1}, []),
        ({"switches": 3}, []),
    ):
        data = broken(lambda file, messages, stats=stats: messages[1].update(stats=stats), conversation)
        assert export.from_json(data, "x.json").stats == kept
    older = broken(lambda file, messages: [message.pop("stats") for message in messages], conversation)
    assert export.from_json(older, "x.json").stats == []


def broken(change, conversation):
    file = json.loads(export.to_json(conversation))
    change(file, file["messages"])
    return json.dumps(file).encode()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda file, messages: file.update(version=2), "version"),
        (lambda file, messages: file.pop("messages"), "messages"),
        (lambda file, messages: messages[0].update(parent="nobody"), "does not follow"),
        (lambda file, messages: messages[0].update(role="assistant"), "does not follow"),
        (lambda file, messages: messages[1].update(role="user"), "does not follow"),
        (lambda file, messages: messages[1].update(role="system"), "role"),
        (lambda file, messages: messages[1].update(text=7), "text"),
        (lambda file, messages: messages[1].update(id=messages[0]["id"]), "Two messages"),
        (lambda file, messages: file.update(leaf="nobody"), "is not in it"),
        (lambda file, messages: file.update(created=float("nan")), "created"),
        (lambda file, messages: messages[0].update(pinned="yes"), "pinned"),
        (lambda file, messages: messages[0].update(switch_lines=[[-1, "x"]]), "switch_lines"),
    ],
)
def test_invalid_conversations_are_rejected(conversation, change, reason):
    with pytest.raises(UsageError, match=reason):
        export.from_json(broken(change, conversation), "x.json")


def test_invalid_json_and_many_wrong_messages_are_rejected_quickly():
    for data in (b"", b"{", b"[]", b"\xff\xfe"):
        with pytest.raises(UsageError, match="not a kvchat conversation"):
            export.from_json(data, "x.json")
    began, head = time.process_time(), b'{"title": "", "system": null, "created": 1, "leaf": null, "messages": ['
    with pytest.raises(UsageError, match=r"messages\.0"):
        export.from_json(head + b"1," * 500_000 + b"1]}", "x")
    assert time.process_time() - began < 3


def test_oversized_files_are_rejected(tmp_path):
    with (tmp_path / "endless.json").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(DoesNotFitError):
        export.read(tmp_path / "endless.json")


# ---- Marks of switches in the text of an answer, and the notes below it


def switches_at(*places: int) -> list[ModeChange]:
    return [ModeChange(place, f"to {number}") for number, place in enumerate(places, 1)]


@pytest.mark.parametrize(
    ("before", "after", "drawn"),
    [
        ("a word", " and more", f"a word {MARK} and more"),
        ("a wo", "rd, and more", f"a word, {MARK} and more"),
        ("over.", "\n\nNext", f"over. {MARK}\n\nNext"),
        ("# T", "itle here", f"# Title {MARK} here"),
        ("- one\n", "- two three", f"- one\n- two {MARK} three"),
        ("| a | b |\n|---|---|\n", "| 1 | 2 |\n", f"| a | b |\n|---|---|\n| 1 {MARK} | 2 |\n"),
        ("See:\n\n```py", "thon\nx = 1\n```\nSo it is", f"See:\n\n```python\nx = 1\n```\nSo {MARK} it is"),
        ("~~~\nx =", " 1\n~~~\n```\ny z\n```\nso it", f"~~~\nx = 1\n~~~\n```\ny z\n```\nso {MARK} it"),
        ("```\nx =", " 1\n", "```\nx = 1\n"),
        ("x", "。y", f"x。 {MARK}y"),
        ("the end", "", "the end"),
        ("", "the begin", "the begin"),
    ],
)
def test_marks_follow_the_current_word_and_keep_markdown_intact(before, after, drawn):
    assert with_marks(before + after, switches_at(len(before)), is_over=True) == drawn


def test_a_mark_waits_for_the_end_of_its_word():
    assert with_marks("a words", switches_at(4), is_over=False) == "a words"
    assert with_marks("a words ", switches_at(4), is_over=False) == f"a words {MARK} "


def test_several_marks_are_numbered_in_order():
    assert with_marks("one two three", switches_at(3, 7, 13), is_over=True) == f"one {MARK}¹ two {MARK}² three"
    assert notes(switches_at(3, 7, 13)) == [f"{MARK}¹ to 1", f"{MARK}² to 2", f"{MARK}³ to 3"]
    assert notes(switches_at(3)) == [f"{MARK} to 1"]
