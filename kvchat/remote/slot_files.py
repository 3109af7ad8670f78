"""The list of conversations whose K/V llama-servers saved to files, which no server lists itself."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager

from kvchat import files, paths

# In place of the number of tokens in a file: it must be emptied; the server could not restore it, but may have it.
DELETED, USELESS = 0, -1
Files = dict[str, dict[str, int]]


def known() -> Files:
    """The tokens in each file, or ``DELETED`` or ``USELESS``, by the server's root and the conversation's id.

    Raises:
        OSError: the list cannot be read.
    """
    try:
        found: Files = json.loads(files.read(paths.server_slots_file()))
    except FileNotFoundError:
        return {}
    return found


def note(root: str, conversation: str, tokens: int | None) -> None:
    """Note that a conversation's file at a server has so many tokens; None means that it is empty.

    Raises:
        OSError: the list cannot be read or written.
    """
    with _changing() as found:
        of_server = found.setdefault(root, {})
        if tokens is None:
            of_server.pop(conversation, None)
        else:
            of_server[conversation] = tokens


def mark_deleted(conversation: str) -> None:
    """Note that a conversation is deleted: its files are emptied when their servers are next used.

    Raises:
        UsageError: the list cannot be read or written.
    """
    try:
        if any(conversation in of_server for of_server in known().values()):
            with _changing() as found:
                for of_server in found.values():
                    if conversation in of_server:
                        of_server[conversation] = DELETED
    except OSError as error:
        hint = "It names files of servers with what was said; make it writable, then delete the conversation again."
        raise files.unwritable(paths.server_slots_file(), error, hint) from None


@contextmanager
def _changing() -> Iterator[Files]:
    """The list, written when the block ends; other processes that change it wait."""
    path = paths.server_slots_file()
    files.make_folder(path.parent)
    with open(path.with_suffix(".lock"), "ab") as lock:  # not the list's own file, which is replaced
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = known()
        yield found
        files.write(path, json.dumps(found).encode())
