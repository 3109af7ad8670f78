"""The clipboard: the system's where it is near, and always a sentence that is true."""

from __future__ import annotations

import sys
import threading
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
from support.app_driver import finished, toasts, typed
from support.message import lacks

from kvchat.tui import terminal
from kvchat.tui.terminal import REMOTE, TERMINALS_TAKE, copy_to_system, describe, has_system


@pytest.fixture
def pyperclip(monkeypatch):
    """Pretend that pyperclip is there; the list holds what was copied, an exception put into it is raised."""
    module, copied = ModuleType("pyperclip"), []

    def copy(text: str) -> None:
        if copied and isinstance(copied[-1], Exception):
            raise copied[-1]
        copied.append(text)

    module.copy, module.__spec__ = copy, ModuleSpec("pyperclip", None)
    monkeypatch.setitem(sys.modules, "pyperclip", module)
    for name in REMOTE:
        monkeypatch.delenv(name, raising=False)
    return copied


async def test_the_systems_clipboard_is_used_where_it_is_the_persons(pyperclip):
    assert has_system({})
    assert not has_system({"SSH_CONNECTION": "10.0.0.1 5 10.0.0.2 22"})
    assert await copy_to_system("hé") == ""
    assert pyperclip == ["hé"]
    pyperclip.append(RuntimeError("\nNo program.\nInstall one."))
    assert await copy_to_system("x") == "No program"


async def test_a_clipboard_that_does_not_answer_is_given_up(pyperclip, monkeypatch):
    may_end = threading.Event()
    monkeypatch.setattr(sys.modules["pyperclip"], "copy", lambda text: may_end.wait(60))
    assert await copy_to_system("x", patience_s=0.01)
    may_end.set()


def test_what_became_of_a_text_is_said():
    assert "3 characters" in describe("abc", "")
    assert not lacks(describe("abc", None), "3 characters", "OSC 52")
    assert "/copy FILE" in describe("é" * TERMINALS_TAKE, None)
    refused = describe("abc", "no \x1b[c program")
    assert not lacks(refused, "no ␛[c program", "3 characters", "/copy FILE")


async def test_a_refusal_is_a_toast_and_a_file_takes_its_place(running, pyperclip, tmp_path):
    async with running() as (app, _pilot, until):
        typed(app, "hello")
        await until(lambda: finished(app))
        typed(app, "/copy")
        await until(lambda: "Copied" in toasts(app))
        assert pyperclip == [app.clipboard]
        pyperclip.append(RuntimeError("no program"))
        typed(app, "/code")
        await until(lambda: "refused: no program" in toasts(app))
        assert app.clipboard.startswith("def interest")
        typed(app, f"/code {tmp_path / 'interest.py'}")
        await until(lambda: (tmp_path / "interest.py").exists())
        assert (tmp_path / "interest.py").read_text() == app.clipboard


def test_without_the_library_there_is_only_the_terminals(monkeypatch):
    monkeypatch.setattr(terminal, "find_spec", lambda name: None)
    assert not has_system({})
