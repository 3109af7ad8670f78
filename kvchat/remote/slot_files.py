"""The list of conversations whose K/V llama-servers have in files of their own: only it knows these files."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager

from kvchat import files, paths

# In place of the number of tokens in a file: it is to be emptied; the server could not restore it, but it may be there.
DELETED, USELESS = 0, -1
Files = dict[str, dict[str, int]]


def known() -> Files:
    """By the server's root and the conversation's id how many tokens its file has, or one of those above.

    Raises:
        OSError: the list cannot be read.
    """
    try:
        found: Files = json.loads(files.read(paths.server_slots_file()))
    except FileNotFoundError:
        return {}
    return found


def note(root: str, conversation: str, tokens: int | None) -> None:
    """The file of a conversation at a server has so many tokens, with None nothing of it any more.

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
    """A conversation is deleted: its files are to be emptied, by whoever uses their servers next.

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
    """The list, which is written at the end; another kvchat that changes it waits."""
    path = paths.server_slots_file()
    files.make_folder(path.parent)
    with open(path.with_suffix(".lock"), "ab") as lock:  # the list's own file is replaced
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = known()
        yield found
        files.write(path, json.dumps(found).encode())
