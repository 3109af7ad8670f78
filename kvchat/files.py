"""Writing files whole or not at all: a full disk or a crash leaves what was there before.

Files are made with mode 0600, missing folders with 0700.
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from contextlib import suppress
from io import FileIO
from pathlib import Path


def write(path: Path, data: bytes) -> None:
    """Replace the file at ``path``, or the file that a link there names, by ``data``.

    Raises:
        OSError: it cannot be written; the old file is as it was.
    """
    if path.exists() and not path.is_file():
        path.write_bytes(data)  # a device or a pipe such as /dev/stdout must not be replaced by a file
        return
    path = path.resolve()
    make_folder(path.parent)
    descriptor, temporary = tempfile.mkstemp(prefix=".kvchat-", dir=path.parent)
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def append(path: Path, data: bytes) -> None:
    """Add ``data`` at the end of the file at ``path``.

    Raises:
        OSError: it cannot be written whole; the file is as it was.
    """
    with open_log(path) as file:
        size = os.fstat(file.fileno()).st_size
        if os.write(file.fileno(), data) < len(data):
            os.ftruncate(file.fileno(), size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def open_log(path: Path) -> FileIO:
    """Open the file at ``path`` unbuffered, to append to it.

    Raises:
        OSError: it cannot be opened.
    """
    make_folder(path.parent)
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        with suppress(PermissionError):  # another user's file keeps its mode
            os.fchmod(descriptor, 0o600)
    return open(descriptor, "ab", buffering=0)


def make_folder(folder: Path) -> None:
    """Make a folder and those above it that are missing.

    Raises:
        OSError: it cannot be made.
    """
    for missing in reversed([place for place in (folder, *folder.parents) if not place.exists()]):
        missing.mkdir(mode=0o700, exist_ok=True)
