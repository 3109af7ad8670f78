"""Texts that a person names: whatever is wrong with one is said by its name, and byte order marks are no part of it.

They are in UTF-8, or in UTF-16 where a mark says so, as editors on Windows write them.
"""

from __future__ import annotations

import codecs
from pathlib import Path

from kvchat.errors import UsageError

MARK = "\ufeff"
WIDE = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def read(file: Path) -> str:
    """The text of a regular file, with a newline at the end of each line.

    Raises:
        UsageError: there is none, it is something else such as a device, or it is not UTF-8.
    """
    if file.exists() and not file.is_file():
        raise UsageError(f"{file} cannot be read.", "It is no regular file.", "Give a text file.")
    try:
        return for_a_model(file.read_bytes(), str(file))
    except OSError as error:
        raise unreadable(str(file), error) from None


def for_a_model(raw: bytes, name: str) -> str:
    """``decoded``, with the newlines that models know: what ends lines on Windows changes their answers.

    Raises:
        UsageError: as ``decoded``.
    """
    return decoded(raw, name).replace("\r\n", "\n")


def decoded(raw: bytes, name: str) -> str:
    """The text of the bytes of ``name``.

    Raises:
        UsageError: they are neither UTF-8 nor UTF-16 with a mark.
    """
    form = "UTF-16" if raw.startswith(WIDE) and len(raw) % 2 == 0 else "UTF-8"
    try:
        return unmarked(raw.decode(form))
    except UnicodeDecodeError as error:
        detail = f"Byte {error.start:,} is 0x{raw[error.start]:02x}."
        raise UsageError(f"{name} is not {form}.", detail, "Convert it to UTF-8.") from None


def unmarked(text: str) -> str:
    """A text without the mark that editors begin a file in UTF-8 with; files that were joined may have several."""
    return text.removeprefix(MARK).replace(f"\n{MARK}", "\n")


def unreadable(name: str, error: OSError) -> UsageError:
    """The error for the file ``name`` that the system does not let this process read."""
    return UsageError(f"{name} cannot be read.", f"{error.strerror}.", "Check its name and permissions.")
