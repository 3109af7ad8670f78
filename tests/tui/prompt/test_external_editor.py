"""The user's editor: its file becomes the text; if it fails nothing changes and no file is left."""

import errno
import os
import shlex
import sys
import tempfile

import pytest
from support.app_driver import press, prompt, toasts

from kvchat.errors import UsageError
from kvchat.tui.prompt import external_editor

SHOUT = "path.write_text(path.read_text().upper() + '\\n')"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("VISUAL", raising=False)
    return tmp_path


@pytest.fixture
def editor(monkeypatch):
    """Make the given program the editor; ``path`` in it is the file."""

    def use(program, variable="EDITOR"):
        code = f"import os, pathlib, sys; path = pathlib.Path(sys.argv[1]); {program}"
        monkeypatch.setenv(variable, f"{shlex.quote(sys.executable)} -c {shlex.quote(code)}")

    return use


def test_the_edited_file_is_private_and_removed(folder, editor):
    editor("raise SystemExit(1)")
    editor(f"assert os.stat(path).st_mode & 0o777 == 0o600; {SHOUT}", "VISUAL")
    assert external_editor.edit("one\ntwo") == "ONE\nTWO"
    assert not os.listdir(folder)


def test_byte_order_marks_and_crlf_are_removed(folder, editor):
    editor("path.write_bytes(b'\\xef\\xbb\\xbfone\\r\\ntwo\\r\\n')")
    assert external_editor.edit("text") == "one\ntwo"


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("raise SystemExit(3)", "exit code 3"),
        ("path.unlink()", os.strerror(errno.ENOENT)),
        ("path.write_bytes(b'\\xff')", "UTF-8"),
    ],
)
def test_a_failing_editor_is_reported(folder, editor, program, reason):
    editor(program)
    with pytest.raises(UsageError) as refused:
        external_editor.edit("text")
    assert reason in str(refused.value)
    assert not os.listdir(folder)


def test_editors_that_cannot_start_are_reported(folder, monkeypatch):
    for command, reason in (("/no/such/editor", os.strerror(errno.ENOENT)), ("'vi", "quotation")):
        monkeypatch.setenv("EDITOR", command)
        with pytest.raises(UsageError, match=reason):
            external_editor.edit("text")
    monkeypatch.delenv("EDITOR")
    monkeypatch.setenv("PATH", str(folder))
    with pytest.raises(UsageError, match="EDITOR"):
        external_editor.edit("text")


async def test_the_prompt_survives_if_no_editor_can_run(running):
    async with running() as (app, _pilot, until):
        prompt(app).insert("draft")
        press(app, "f4")
        await until(lambda: "can run in this terminal" in toasts(app))
        assert prompt(app).text == "draft"
