"""Edits a text in the user's editor."""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from textual.app import App, SuspendNotSupported

from kvchat.errors import UsageError
from kvchat.files import unmarked

DEFAULTS = ("nano", "vim", "vi", "emacs")


Editor = subprocess.Popen[bytes]
LEFT_BY = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def edit(text: str, started: Callable[[Editor], object] = lambda editor: None) -> str:
    """Run the editor, which has the terminal until it ends, and return ``text`` as edited.

    The text is in a file of mode 0600, removed afterwards. ``started`` is called with the editor's process.

    Raises:
        UsageError: there is no editor, it failed, or it left bytes that are not UTF-8.
    """
    command = _command()
    descriptor, name = tempfile.mkstemp(prefix="kvchat-", suffix=".md")
    path = Path(name)
    try:
        with open(descriptor, "wb") as file:
            file.write(text.encode("utf-8", "replace"))
        editor = subprocess.Popen([*command, name])
        started(editor)
        if code := editor.wait():
            raise _refusal(f"The editor {command[0]} ended with exit code {code}.")
        return unmarked(path.read_bytes().decode()).replace("\r\n", "\n").removesuffix("\n")
    except (OSError, UnicodeDecodeError) as error:
        detail = error.strerror if isinstance(error, OSError) else "It left bytes that are not UTF-8"
        raise _refusal(f"The editor {command[0]} failed: {detail}.") from None
    finally:
        with suppress(OSError):
            path.unlink()


def _refusal(title: str) -> UsageError:
    return UsageError(title, "The text is unchanged.", "Set VISUAL or EDITOR to another.")


async def edit_suspended(app: App[None], text: str) -> str:
    """Run ``edit`` without drawing on the terminal; an answer in progress continues."""
    try:
        with app.suspend(), app.batch_update(), _signals_passed_on() as started:
            # Errors are returned: raised here, they would keep Textual from taking the terminal back.
            edited = (await asyncio.gather(asyncio.to_thread(edit, text, started), return_exceptions=True))[0]
    except SuspendNotSupported:
        raise UsageError("No editor can run in this terminal.", hint="Write in the prompt.") from None
    if isinstance(edited, BaseException):
        raise edited
    return edited


@contextmanager
def _signals_passed_on() -> Iterator[Callable[[Editor], object]]:
    """Pass signals that end the application to the editor too, and ignore Ctrl+C, which the editor gets anyway.

    Use it only in the main thread. Call the yielded function with the editor's process.
    """
    editors: list[Editor] = []
    before = {number: leave for number in LEFT_BY if callable(leave := signal.getsignal(number))}

    def pass_on(number: int, frame: FrameType | None) -> None:
        for editor in editors:
            editor.terminate()
        before[signal.Signals(number)](number, frame)

    interrupted = signal.signal(signal.SIGINT, lambda number, frame: None)
    for number in before:
        signal.signal(number, pass_on)
    try:
        yield editors.append
    finally:
        for number, handler in {**before, signal.SIGINT: interrupted}.items():
            signal.signal(number, handler)


def _command() -> list[str]:
    for variable in ("VISUAL", "EDITOR"):
        if given := os.environ.get(variable, "").strip():
            try:
                return shlex.split(given)
            except ValueError as error:
                raise UsageError(f"{variable}={given} cannot be read.", f"{error}.", "Close the quotes.") from None
    found = next(filter(shutil.which, DEFAULTS), None)
    if found is None:
        raise UsageError("No editor was found.", f"Looked for {', '.join(DEFAULTS)}.", "Set EDITOR to one.")
    return [found]
