"""Text files that a person names: whatever is wrong with one is said by its name."""

from __future__ import annotations

from pathlib import Path

from kvchat.errors import UsageError


def read(file: Path) -> str:
    """The text of a regular file.

    Raises:
        UsageError: there is none, it is something else such as a device, or it is not UTF-8.
    """
    if file.exists() and not file.is_file():
        raise UsageError(f"{file} cannot be read.", "It is no regular file.")
    try:
        return file.read_text("utf-8")
    except OSError as error:
        raise UsageError(f"{file} cannot be read.", f"{error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise no_text(str(file), error) from None


def no_text(name: str, error: UnicodeDecodeError) -> UsageError:
    """What is said of a file whose bytes are no text; ``name`` is how it is called."""
    detail = f"Byte {error.start:,} is 0x{error.object[error.start]:02x}."
    return UsageError(f"{name} is not UTF-8.", detail, "Convert it to UTF-8.")
