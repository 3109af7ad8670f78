"""Files that a person names: read, or refused by name."""

from __future__ import annotations

import os

import pytest

from kvchat.conversations import attachments
from kvchat.errors import UsageError
from kvchat.files import decoded, read_text


def test_a_text_is_read(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("Schön.", "utf-8")
    assert read_text(file) == "Schön."


def test_marks_of_byte_order_are_no_part_of_a_text(tmp_path):
    marked = b"\xef\xbb\xbfone\r\n\xef\xbb\xbftwo \xef\xbb\xbf"  # two files, one after the other
    (tmp_path / "text.txt").write_bytes(marked)
    assert read_text(tmp_path / "text.txt") == "one\ntwo \ufeff"
    assert decoded(marked, "stdin") == "one\r\ntwo \ufeff"
    with pytest.raises(UsageError, match=r"Byte 4 is 0xff"):
        decoded(b"\xef\xbb\xbfa\xff", "stdin")


@pytest.mark.parametrize("form", ["utf-16-le", "utf-16-be"])
def test_a_text_of_an_editor_on_windows_is_read(tmp_path, form):
    file = tmp_path / "text.txt"
    file.write_bytes("\ufeffSchön \U0001f600.\r\n".encode(form))
    assert read_text(file) == "Schön \U0001f600.\n"
    assert attachments.read(file) == "Schön \U0001f600.\n"
    file.write_bytes("\ufeffa\0b".encode(form))
    with pytest.raises(UsageError, match="is not a text"):
        attachments.read(file)
    file.write_bytes("\ufeffa\ud800b".encode(form, "surrogatepass"))
    with pytest.raises(UsageError, match="is not UTF-16"):
        read_text(file)


def test_what_is_no_text_is_refused_by_name_and_never_waited_for(tmp_path):
    latin, pipe = tmp_path / "latin.txt", tmp_path / "pipe"
    latin.write_bytes(b"Sch\xf6n.")
    os.mkfifo(pipe)
    with pytest.raises(UsageError, match=r"latin\.txt.*UTF-8.*Byte 3.*0xf6"):
        read_text(latin)
    for place in (pipe, tmp_path):
        with pytest.raises(UsageError, match=f"{place.name}.*not a regular file"):
            read_text(place)
    with pytest.raises(UsageError, match="No such file"):
        read_text(tmp_path / "none.txt")
