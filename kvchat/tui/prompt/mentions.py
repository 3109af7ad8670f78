"""Files mentioned in a question as ``@path`` or ``@"a path"``: completed while it is typed, read when it is sent."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple

from kvchat.conversations import attachments
from kvchat.errors import UsageError
from kvchat.tui.prompt.folders import Entries, Entry
from kvchat.tui.prompt.suggestions import Offer, Suggestion
from kvchat.units import size

OFFERED = 50
MENTION = re.compile(r"""(?<!\S)(\\?)@(?:"([^"\n]+)"|([^\s"]\S*))""")
_BEGUN = re.compile(r"""(?<!\S)@(?:"([^"\n]*)|([^\s"]*))$""")
_PLAIN_PATH = re.compile(r"(~|\.{0,2}/)|.*\.\w{1,4}$")  # a decorator such as @app.route is none
PUNCTUATION = ".,;:!?)]}'"


class Part(NamedTuple):
    """A part of a question as it was written; what was pasted is literal, ``@`` in it is text."""

    text: str
    is_typed: bool = True


class Question(NamedTuple):
    """``files`` are fenced; ``written`` holds a file's name where it was mentioned."""

    files: tuple[str, ...]
    written: str

    @property
    def text(self) -> str:
        """The text to send: the files, then the words written, unless these are only the files' names."""
        return "\n\n".join(filter(None, (*self.files, self.written)))


def mentioned(text: str) -> list[str]:
    """The names of the files that a text seems to mention."""
    found = (match.groups() for match in MENTION.finditer(text))
    return [*dict.fromkeys(quoted or _split_punctuation(bare)[0] for escaped, quoted, bare in found if not escaped)]


def attach(parts: Iterable[Part], limit: int) -> Question:
    """Read the files that the typed parts mention, together at most ``limit`` bytes.

    Raises:
        KvchatError: a file does not exist, cannot be read, is no text or too large.
    """
    files: dict[str, str] = {}
    written, rest = "", ""

    def replace(found: re.Match[str]) -> str:
        escaped, quoted, bare = found.groups()
        name, after = (quoted, "") if quoted else _split_punctuation(bare)
        if escaped:
            return found[0][_is_mention(name, bool(quoted)) :]
        if not _is_file(name, bool(quoted)):
            return found[0]
        if name not in files:
            room = limit - sum(len(text.encode("utf-8", "replace")) for text in files.values())
            files[name] = attachments.read(Path(os.path.expanduser(name)), max(room, 0))
        return name + after

    for text, is_typed in parts:
        written += MENTION.sub(replace, text) if is_typed else text
        rest += MENTION.sub("", text) if is_typed else text
    fenced = tuple(attachments.fenced(name, text) for name, text in files.items())
    return Question(fenced, written if rest.strip() or not files else "")


def mention(path: str) -> str:
    """The mention of a file, in quotes where its path needs them."""
    return f'@"{path}"' if re.search(r"\s", path) else f"@{path}"


def offer(before: str, entries: Entries) -> Offer | None:
    """The files and folders that the mention at the end of ``before`` may mean; None where there is none."""
    begun = _BEGUN.search(before)
    if begun is None:
        return None
    typed = begun[1] if begun[1] is not None else begun[2]
    found = (Suggestion(_mention_of(path), label, doc) for path, label, doc, _ in matching(typed, entries))
    return Offer(begun[0], tuple(one for one in found if one.text.rstrip() != begun[0]), takes_by_enter=True)


def matching(typed: str, entries: Entries) -> list[Suggestion]:
    """Paths that ``typed`` may become: entries of its folder and below, by how well their names fit the rest.

    A folder's path ends in a slash.
    """
    folder, begun = typed[: typed.rfind("/") + 1], typed[typed.rfind("/") + 1 :]
    found = [(rank, entry) for entry in entries(folder) if (rank := _rank(entry.name, begun)) is not None]
    found.sort(key=lambda one: (one[0], one[1].name.count("/"), one[1].name.lower()))
    return [_suggest(folder, entry) for _, entry in found[:OFFERED]]


def _mention_of(path: str) -> str:
    """A file's mention ends with a space, that of a folder goes on."""
    return mention(path).removesuffix('"') if path.endswith("/") else f"{mention(path)} "


def _rank(path: str, begun: str) -> int | None:
    """Rank of a path: its name begins so, contains it, or all letters come in this order; None where it does not fit.

    Hidden files are offered to those who type the dot, what lies below to those who type a letter; a name that cannot
    be typed is never offered.
    """
    name, wanted = path.rpartition("/")[2].lower(), begun.lower()
    if not path.isprintable() or '"' in path:
        return None
    if begun.startswith("."):
        return 0 if path.startswith(begun) else None
    if name[0] == "." or ("/" in path and not begun):
        return None
    if name.startswith(wanted):
        return 0
    if wanted in name:
        return 1
    letters = iter(path.lower())
    return 2 if all(letter in letters for letter in wanted) else None


def _suggest(folder: str, entry: Entry) -> Suggestion:
    path = folder + entry.name
    if entry.is_folder:
        return Suggestion(f"{path}/", f"{entry.name}/")
    return Suggestion(path, entry.name, "" if entry.size is None else size(entry.size))


def _split_punctuation(name: str) -> tuple[str, str]:
    """A sentence may end after a mention: its punctuation is no part of a file's name."""
    bare = name.rstrip(PUNCTUATION)
    if not bare or _exists(name):
        return name, ""
    return bare, name[len(bare) :]


def _is_file(name: str, is_quoted: bool) -> bool:
    """True if ``@name`` means a file; a word that neither exists nor looks like a path is text, such as a decorator.

    Raises:
        UsageError: it looks like a path or nearly is one, but nothing is there.
    """
    if _exists(name):
        return True
    path = Path(os.path.expanduser(name))
    try:
        near = get_close_matches(path.name, os.listdir(path.parent), n=1, cutoff=0.75)
    except OSError:
        near = []
    if not (is_quoted or near or _PLAIN_PATH.match(name)):
        return False
    hint = f'Did you mean "{near[0]}"?' if near else "Check the path."
    raise UsageError(f'There is no file "{name}".', hint, f"Write \\@{name} to send it as text.")


def _is_mention(name: str, is_quoted: bool) -> bool:
    """True if ``@name`` would be read as a file, or refused."""
    try:
        return _is_file(name, is_quoted)
    except UsageError:
        return True


def _exists(name: str) -> bool:
    try:
        return Path(os.path.expanduser(name)).exists()
    except (OSError, ValueError):  # too long, or in a folder that may not be read
        return False
