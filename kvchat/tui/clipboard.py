"""The clipboard: the terminal's by OSC 52, which it may ignore without an answer, and the system's where it is near.

The system's needs pyperclip (the extra ``clipboard``). Over SSH it would be that of the machine far away.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.util import find_spec

from kvchat.foreign_text import visible
from kvchat.units import count

TERMINALS_TAKE = 74_994  # bytes: base64 makes 100,000 of them, where many terminals end
PATIENCE_S = 5.0
TO_FILE = "/copy FILE writes it into a file."
REMOTE = ("SSH_CONNECTION", "SSH_CLIENT", "SSH_TTY")


def has_system(environ: Mapping[str, str] = os.environ) -> bool:
    """True if the system's clipboard is that of the person, and can be written to."""
    return not any(environ.get(name) for name in REMOTE) and find_spec("pyperclip") is not None


async def copy_to_system(text: str, patience_s: float = PATIENCE_S) -> str:
    """Copy a text to the system's clipboard; why it was refused, "" where it was not."""
    try:
        return await asyncio.wait_for(_beside(lambda: _copy(text)), patience_s)
    except TimeoutError:
        return "it does not answer"


def describe(text: str, refusal: str | None) -> str:
    """Say where a text was copied to; ``refusal`` is the system's, None where only OSC 52 was sent."""
    if refusal == "":
        return f"Copied {count(len(text))} characters."
    sent = f"Sent {count(len(text))} characters to the terminal's clipboard (OSC 52)."
    if refusal:
        return f"The system's clipboard refused: {visible(refusal)}. {sent} It may ignore them: {TO_FILE}"
    is_much = len(text.encode("utf-8", "replace")) > TERMINALS_TAKE
    return f"{sent} Many terminals take less: {TO_FILE}" if is_much else sent


def _copy(text: str) -> str:
    import pyperclip

    try:
        pyperclip.copy(text)
    except Exception as error:  # noqa: BLE001  # pyperclip's own class, or what a program that it starts leads to
        return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
    return ""


async def _beside(work: Callable[[], str]) -> str:
    """The result of ``work`` on a thread that ends with the application, however long it would take."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[str] = loop.create_future()

    def run() -> None:
        result = work()
        with suppress(RuntimeError):  # the application has ended meanwhile
            loop.call_soon_threadsafe(lambda: None if done.done() else done.set_result(result))

    threading.Thread(target=run, daemon=True).start()
    return await done
