"""Files that are written completely or not at all, and text files that a user names.

A full disk or a crash leaves the old file. Opening never waits for a pipe. New files get mode 0600, new folders 0700.
Texts are UTF-8, or UTF-16 with a byte order mark, as editors on Windows write them; the mark is removed.
"""

from __future__ import annotations

import codecs
import errno
import os
import stat
import tempfile
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any

import tomli

from kvchat.errors import DoesNotFitError, KvchatError, UsageError
from kvchat.units import size

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # the disk, the quota or the file has no more space
MARK = "\ufeff"
WIDE = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def read(path: Path, most: int = -1) -> bytes:
    """Return the first ``most`` bytes of the regular file at ``path``, by default all.

    Raises:
        OSError: it cannot be read, or may be endless, like a pipe or a device.
    """
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "It is not a regular file", str(path))
        return file.read(most)


def load(path: Path, limit: int | None = None) -> bytes:
    """Read a file that the user named.

    Raises:
        UsageError: it cannot be read; DoesNotFitError: it has more than ``limit`` bytes.
    """
    try:
        raw = read(path, -1 if limit is None else limit + 1)
    except (OSError, ValueError) as error:
        raise unreadable(str(path), error) from None
    return raw if limit is None else limited(raw, limit, str(path))


def toml(text: str) -> dict[str, Any]:
    """Return the values of a TOML text.

    Raises:
        tomli.TOMLDecodeError: it is not TOML; for a value that needs quotes, the message says so.
    """
    try:
        return tomli.loads(text)
    except tomli.TOMLDecodeError as error:
        if error.msg != "Invalid value":
            raise
        advice = "Invalid value: write text in quotes, true and false in lowercase"
        raise tomli.TOMLDecodeError(advice, error.doc, error.pos) from None


def limited(raw: bytes, limit: int, name: str) -> bytes:
    """Return ``raw``, the beginning of the file ``name``, of which at most ``limit`` + 1 bytes were read.

    Raises:
        DoesNotFitError: it has more than ``limit`` bytes.
    """
    if len(raw) > limit:
        raise DoesNotFitError(f"{name} is too large.", f"At most {size(limit)} are read.", "Shorten it.")
    return raw


def write(path: Path, data: bytes) -> None:
    """Replace the file at ``path``, or the file that a link there points to, by ``data``.

    Raises:
        OSError: it cannot be written; the old file is unchanged.
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


def save(path: Path, data: bytes, hint: str) -> None:
    """Write a file that the user named; ``hint`` is the advice unless the disk is full.

    Raises:
        UsageError: it cannot be written; the old file is unchanged.
    """
    try:
        write(path, data)
    except (OSError, ValueError) as error:
        raise unwritable(path, error, hint) from None


def check_new(path: Path) -> None:
    """
    Raises:
        UsageError: the file exists, or its folder does not.
    """
    if os.path.lexists(path):
        raise UsageError(f"{path} exists.", hint="Choose another name.")
    check_folder(path)


def check_folder(path: Path) -> None:
    """
    Raises:
        UsageError: the file's folder does not exist.
    """
    if not os.path.isdir(path.absolute().parent):
        raise UsageError(f"There is no folder {path.absolute().parent}.", hint="Create it first.")


def unwritable(path: Path, error: OSError | ValueError, hint: str) -> UsageError:
    """Return the error for a file that could not be written; ``hint`` is the advice unless the disk is full."""
    hint = "Free some disk space, or write elsewhere." if getattr(error, "errno", None) in FULL else hint
    return UsageError(f"{path} cannot be written.", f"{reason(error)}.", hint)


def reason(error: OSError | ValueError) -> str:
    """Return the reason for an error; a ValueError means a NUL in the path, which Python versions word differently."""
    return error.strerror or str(error) if isinstance(error, OSError) else "There is a NUL in its name"


def append(path: Path, data: bytes) -> None:
    """Append ``data`` to the file at ``path``.

    Raises:
        OSError: not all of it can be written; the file is unchanged.
    """
    with open_log(path) as file:
        append_to(file, data)


def append_to(file: FileIO, data: bytes) -> None:
    """Append ``data`` to a file of ``open_log``.

    Raises:
        OSError: not all of it can be written; the file is unchanged.
    """
    size = os.fstat(file.fileno()).st_size
    if (file.write(data) or 0) < len(data):
        file.truncate(size)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), file.name)


def open_log(path: Path) -> FileIO:
    """Open the file at ``path`` unbuffered, to append to it.

    Raises:
        OSError: it cannot be opened.
    """
    make_folder(path.parent)
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
    descriptor = os.open(path, flags | os.O_NONBLOCK, 0o600)
    os.set_blocking(descriptor, True)  # O_NONBLOCK only keeps opening a pipe from waiting for its reader
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        with suppress(PermissionError):  # another user's file keeps its mode
            os.fchmod(descriptor, 0o600)
    return open(descriptor, "ab", buffering=0)


def name_temporary_folder() -> None:
    """Set a temporary folder on a full disk, where Python finds none and torch could not be imported."""
    try:
        tempfile.gettempdir()
    except FileNotFoundError:
        tempfile.tempdir = os.environ.get("TMPDIR") or "/tmp"


def make_folder(folder: Path) -> None:
    """Create a folder and its missing parents.

    Raises:
        OSError: it cannot be created.
    """
    for missing in reversed([each for each in (folder, *folder.parents) if not each.exists()]):
        missing.mkdir(mode=0o700, exist_ok=True)


def read_text(file: Path, limit: int | None = None) -> str:
    """Return the text of a regular file, converted by ``for_a_model``.

    Raises:
        UsageError: it cannot be read, or is not text; DoesNotFitError: it has more than ``limit`` bytes.
    """
    text = for_a_model(load(file, limit), str(file))
    if "\0" in text:
        raise _not_text(str(file))
    return text


def for_a_model(raw: bytes, name: str) -> str:
    """Decode a text and convert CRLF to a newline, because CRLF changes the answers of models.

    Raises:
        UsageError: the same as ``decoded``.
    """
    return decoded(raw, name).replace("\r\n", "\n")


def decoded(raw: bytes, name: str) -> str:
    """Return the text in the bytes of the file ``name``.

    Raises:
        UsageError: they are neither UTF-8 nor UTF-16 with a byte order mark.
    """
    form = "UTF-16" if raw.startswith(WIDE) and len(raw) % 2 == 0 else "UTF-8"
    try:
        return unmarked(raw.decode(form))
    except UnicodeDecodeError as error:
        if form == "UTF-8" and b"\0" in raw:
            raise _not_text(name) from None
        detail = f"Byte {error.start:,} is 0x{raw[error.start]:02x}."
        raise UsageError(f"{name} is not {form}.", detail, "Convert it to UTF-8.") from None


def _not_text(name: str) -> UsageError:
    return UsageError(f"{name} is not a text file.", "It contains a NUL.", "Use a text file.")


def unmarked(text: str) -> str:
    """Return ``text`` without byte order marks; joined files have several."""
    return text.removeprefix(MARK).replace(f"\n{MARK}", "\n")


def unreadable(name: str, error: OSError | ValueError, kind: type[KvchatError] = UsageError) -> KvchatError:
    """Return the error for the file ``name``, which could not be read."""
    hint = "Name a file in it." if isinstance(error, IsADirectoryError) else "Check its name and permissions."
    return kind(f"{name} cannot be read.", f"{reason(error)}.", hint)
