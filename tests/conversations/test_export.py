"""Files of conversations: for reading, and for reading back."""

from __future__ import annotations

import json
import re
import time

import pytest

from kvchat.conversations import export
from kvchat.conversations.conversation import Conversation, ModeChange
from kvchat.errors import UsageError
from kvchat.protocol.figures import Stats


@pytest.fixture
def conversation():
    made = Conversation("be <brief>")
    made.ask("What is *this*? <script>alert(1)</script>")
    made.answer("first", "eos")
    made.go_to(made.leaf.parent)
    made.answer("| a |\n|---|\n| <img src=x onerror=alert(1)> |\n\n[x](javascript:alert(1))", "eos", "3 tok")
    return made


def test_markdown_is_the_path(conversation):
    text = export.to_markdown(conversation)
    assert text.startswith("# What is *this*?")
    assert "## System\n\nbe <brief>\n\n## You\n\nWhat is *this*?" in text
    assert "## Model\n\n| a |" in text
    assert "first" not in text


def test_markdown_and_the_page_say_which_model_in_which_mode_and_when(conversation):
    conversation.mode, conversation.params = "speculative", {"budget": 128, "sink": None}
    conversation.ask("And this?")
    conversation.answer("It is.", "eos", "9 tok", model="SmolLM2, int4")
    made, answered = conversation.created, conversation.leaf.created
    day, minute = (time.strftime(form, time.localtime(made)) for form in ("%Y-%m-%d", "%H:%M"))
    at = time.strftime("%Y-%m-%d %H:%M", time.localtime(answered))
    for text in (export.to_markdown(conversation), export.to_html(conversation)):
        assert f"{day} {minute} · SmolLM2, int4 · speculative mode, budget 128<" in text.replace("*", "<")
        assert f"{at} · SmolLM2, int4 · 9 tok" in text
    read = export.from_json(export.to_json(conversation).encode("utf-8-sig"), "x.json")
    assert (read.mode, read.params) == ("speculative", {"budget": 128, "sink": None})
    assert read.leaf.model == "SmolLM2, int4"


@pytest.mark.parametrize(
    ("title", "given", "file"),
    [
        ("My cat", "", "My cat.md"),
        ("My cat", ".", "My cat.md"),
        ("My cat", "html", "My cat.html"),
        ("My cat", ".json", "My cat.json"),
        ("My cat", "notes/", "notes/My cat.md"),
        ("My cat", "notes", "notes/My cat.md"),
        ("My cat", "cats", "cats.md"),
        ("My cat", "cats.html", "cats.html"),
        ("a/b: what\0 is *it*?\n..", "", "a b what is it.md"),
        ("../../etc/passwd", "", "etc passwd.md"),
        ("...", "", "conversation.md"),
        ("猫" * 60, "", f"{'猫' * 60}.md"),
        ("taken", "", "taken 3.md"),
    ],
)
def test_a_file_that_is_not_named_is_named_by_the_title(tmp_path, monkeypatch, title, given, file):
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


def test_html_renders_answers_and_runs_nothing(conversation):
    page = export.to_html(conversation)
    assert "<th>a</th>" in page
    assert "3 tok" in page
    for harmful in ("<script", "<img", 'href="javascript'):
        assert harmful not in page


@pytest.mark.parametrize(
    "answer", ["![x](http://a.example/p.png?q=secret)", "![x][1]\n\n[1]: http://a.example/p.png", "![x]"]
)
def test_html_asks_no_server_for_anything(conversation, answer):
    conversation.go_to(conversation.leaf.parent)
    conversation.answer(answer, "eos")
    page = export.to_html(conversation)
    assert not re.search(r"<(img|link|script|iframe|object)|src=|url\(", page)
    assert """<meta http-equiv="Content-Security-Policy" content="default-src 'none'; """ in page


def test_json_is_read_back_as_another_conversation(conversation):
    read = export.from_json(export.to_json(conversation).encode(), "x.json")
    assert (read.title, read.system, read.created) == (conversation.title, "be <brief>", conversation.created)
    assert read.turns == conversation.turns
    assert [m.text for m in read.messages.values()] == [m.text for m in conversation.messages.values()]
    assert not {read.id, *read.messages} & {conversation.id, *conversation.messages}
    assert len(read.changes().changed) == 3


def test_json_keeps_what_answers_cost(conversation):
    stats = Stats(3, 1, 5, 8, read_share=0.5, switches=({"at": 4, "mode": "sync"},), extras={"pages": 2})
    conversation.ask("and?")
    conversation.answer("so", "eos", "5 tok", stats)
    read = export.from_json(export.to_json(conversation).encode(), "x.json")
    assert read.stats == [stats]
    assert [message.stats for message in read.path] == [None, None, None, stats]


def test_the_lines_of_switches_stand_in_every_format(conversation):
    conversation.ask("and?")
    conversation.answer("one two three", "eos", switch_lines=(ModeChange(3, "full -> sync", 40, "sync"),))
    assert "## Model\n\none ┃ two three\n\n┃ full -> sync\n" in export.to_markdown(conversation)
    assert "<p>one ┃ two three</p>\n<p>┃ full -&gt; sync</p>" in export.to_html(conversation)
    read = export.from_json(export.to_json(conversation).encode(), "x.json")
    assert read.leaf.switch_lines == conversation.leaf.switch_lines
    older = broken(lambda file, messages: [message.pop("switch_lines") for message in messages], conversation)
    assert export.from_json(older, "x.json").leaf.marked_text == "one two three"


@pytest.mark.parametrize(
    "stats",
    [
        3,
        "x",
        [],
        {"prompt_tokens": -1},
        {"prompt_tokens": 2**63},
        {"switches": 3},
        {"read_share": float("inf")},
        {"ttft_s": float("nan")},
    ],
)
def test_damaged_figures_of_a_file_are_left_out(conversation, stats):
    data = broken(lambda file, messages: messages[1].update(stats=stats), conversation)
    assert export.from_json(data, "x.json").stats == []


def test_a_file_of_another_version_is_read(conversation):
    unknown = broken(lambda file, messages: messages[1].update(stats={"total_tokens": 8, "joy": 3}), conversation)
    assert export.from_json(unknown, "x.json").stats == [Stats(total_tokens=8)]
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
        (lambda file, messages: messages[0].update(parent="nobody"), "follows none"),
        (lambda file, messages: messages[0].update(parent=messages[0]["id"]), "follows none"),
        (lambda file, messages: messages[0].update(role="assistant"), "follows none"),
        (lambda file, messages: messages[1].update(role="user"), "follows none"),
        (lambda file, messages: messages[1].update(role="system"), "role"),
        (lambda file, messages: messages[1].update(text=7), "text"),
        (lambda file, messages: messages[1].update(id=messages[0]["id"]), "Two messages"),
        (lambda file, messages: file.update(leaf="nobody"), "is not in it"),
        (lambda file, messages: file.update(created=float("nan")), "created"),
        (lambda file, messages: messages[0].update(created=float("inf")), "created"),
        (lambda file, messages: messages[0].update(pinned="yes"), "pinned"),
        (lambda file, messages: messages[0].update(switch_lines=[[-1, "x"]]), "switch_lines"),
        (lambda file, messages: file.update(title="[" * 9, system={"a": 1}), "system"),
    ],
)
def test_what_is_no_conversation_is_refused(conversation, change, reason):
    with pytest.raises(UsageError, match=reason):
        export.from_json(broken(change, conversation), "x.json")


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\xff\xfe", b"null", b"[" * 100_000])
def test_what_is_no_json_is_refused(data):
    with pytest.raises(UsageError, match="not a kvchat conversation"):
        export.from_json(data, "x.json")


def test_many_wrong_messages_cost_no_more_than_one():
    began = time.process_time()
    with pytest.raises(UsageError, match=r"messages\.0"):
        export.from_json(
            b'{"title": "", "system": null, "created": 1, "leaf": null, "messages": [' + b"1," * 500_000 + b"1]}", "x"
        )
    assert time.process_time() - began < 3


def test_files_that_cannot_be_read_are_refused(tmp_path):
    with pytest.raises(UsageError, match="No such file"):
        export.read(tmp_path / "none.json")
    with pytest.raises(UsageError, match="is not a file"):
        export.read(tmp_path)
    with pytest.raises(UsageError, match="a NUL in its name"):
        export.read(tmp_path / "a\0.json")
    with (tmp_path / "endless.json").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(UsageError, match="too large"):
        export.read(tmp_path / "endless.json")
