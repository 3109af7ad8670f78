"""Texts that a person names: whatever is wrong with one is said by its name."""

from __future__ import annotations

from pathlib import Path

from kvchat.errors import UsageError


def read(file: Path) -> str:
    """The text of a regular file.

    Raises:
        UsageError: there is none, it is something else such as a device, or it is not UTF-8.
    """
    if file.exists() and not file.is_file():
        raise UsageError(f"{file} cannot be read.", "It is no regular file.", "Give a text file.")
    try:
        return file.read_text("utf-8")
    except OSError as error:
        raise unreadable(str(file), error) from None
    except UnicodeDecodeError as error:
        raise _no_text(str(file), error) from None


def decoded(raw: bytes, name: str) -> str:
    """The text of the bytes of ``name``.

    Raises:
        UsageError: they are not UTF-8.
    """
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise _no_text(name, error) from None


def unreadable(name: str, error: OSError) -> UsageError:
    """The error for the file ``name`` that the system does not let this process read."""
    return UsageError(f"{name} cannot be read.", f"{error.strerror}.", "Check its name and permissions.")


def _no_text(name: str, error: UnicodeDecodeError) -> UsageError:
    detail = f"Byte {error.start:,} is 0x{error.object[error.start]:02x}."
    return UsageError(f"{name} is not UTF-8.", detail, "Convert it to UTF-8.")
