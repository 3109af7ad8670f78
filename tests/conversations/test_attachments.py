"""Files in a question: whole or refused, fenced so that they are found again."""

from __future__ import annotations

import os
import time

import pytest

from kvchat.conversations import attachments
from kvchat.conversations.conversation import Conversation
from kvchat.errors import DoesNotFitError, KvchatError


@pytest.mark.parametrize("text", ["", "a", "a\n", "```py\nx\n```\n", "``````\n", "File b:\n```\nx\n```", "\n\n", "é‮\n"])
def test_what_is_fenced_is_found_again_with_what_surrounds_it(text):
    block = attachments.fenced("notes.md", text)
    found = list(attachments.pieces(f"{block}\n\nWhat is it?"))
    assert [(piece.text, piece.name) for piece in found] == [(block, "notes.md"), ("\n\nWhat is it?", "")]
    assert text in block


HOSTILE = {
    "files that never end": "File a:\n```\n",
    "files with fences of their own": "File a:\n````x\n```\n",
    "names": "File a",
    "colons": "File ::::::::",
    "fences": "```\n",
    "a fence": "`",
    "files": "File a:\n```\nx\n```\n",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_the_time_to_find_files_grows_with_the_text(name):
    question = HOSTILE[name] * (2**20 // len(HOSTILE[name]))
    begun = time.process_time()
    assert "".join(piece.text for piece in attachments.pieces(question)) == question
    attachments.folded(question)
    attachments.fenced("again", question)
    assert time.process_time() - begun < 5


def test_a_file_that_never_ends_is_text_and_hides_none_behind_it():
    block = attachments.fenced("b", "text")
    found = list(attachments.pieces(f"File a:\n`````\nx\n\n{block}\nand"))
    assert [piece.name for piece in found] == ["", "b", ""]
    assert found[1].label == "[b · 5 B]"


def test_a_question_is_folded_to_labels_and_titled_by_them():
    question = f"{attachments.fenced('a.txt', 'x' * 2048)}\n\n{attachments.fenced('b', 'y')}\n\nCompare them"
    assert attachments.folded(question) == "[a.txt · 2.0 KiB]\n[b · 2 B]\nCompare them"
    assert attachments.folded("\nno file\n") == "\nno file\n"
    conversation = Conversation()
    conversation.ask(question)
    assert (conversation.title, conversation.last_text()) == ("[a.txt · 2.0 KiB] [b · 2 B] Compare them", question)


def test_a_file_of_as_many_bytes_as_may_be_is_read_whole(tmp_path):
    path = tmp_path / "f"
    path.write_bytes("a\r\né\x1b[31m".encode())
    assert attachments.read(path) == "a\né\x1b[31m"
    assert attachments.read(path, limit=path.stat().st_size)


def test_what_cannot_be_sent_is_refused_with_the_reason(tmp_path):
    (tmp_path / "large").write_bytes(b"x" * 11)
    (tmp_path / "binary").write_bytes(b"ELF\0")
    (tmp_path / "latin").write_bytes(b"ab\xff")
    (tmp_path / "locked").touch(mode=0)
    os.mkfifo(tmp_path / "pipe")
    said = {
        "large": "too large. At most 10 B fit.",
        "binary": "is not a text file. Byte 3 is NUL.",
        "latin": "is not UTF-8. Byte 2 is 0xff.",
        "pipe": "is a pipe, not a file.",
        ".": "is a folder, not a file.",
        "missing": "cannot be read. No such file",
        "/dev/zero": "is a device, not a file.",
    }
    if os.geteuid():
        said["locked"] = "cannot be read. Permission denied"
    for name, reason in said.items():
        with pytest.raises(KvchatError) as refused:
            attachments.read(tmp_path / name, limit=10)
        assert reason in str(refused.value)
        assert isinstance(refused.value, DoesNotFitError) == (name == "large")
