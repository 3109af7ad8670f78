"""The ids whose K/V are in the host pool, and the text that they stand for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvchat.kv.memory.page_file import Link


@dataclass
class Stored:
    """The ids whose K/V are stored, and the text that they stand for.

    ``marks`` are pairs (number of ids, number of characters), ascending: that many ids stand for exactly that much of
    ``text``. Ids after the last mark have no known text. ``reduced`` tells for each id whether its K/V were computed
    while a mode attended to less than everything. The K/V of the first ``saved`` ids are on disk as they are here, in
    pages with these ``links``.
    """

    ids: list[int] = field(default_factory=list)
    text: str = ""
    marks: list[tuple[int, int]] = field(default_factory=list)
    reduced: list[bool] = field(default_factory=list)
    saved: int = 0
    links: list[Link] = field(default_factory=list)

    @property
    def reduced_tokens(self) -> int:
        """Number of ids whose K/V were computed with less context."""
        return sum(self.reduced)

    @property
    def first_reduced(self) -> int:
        """Index of the first of them; the number of ids where there is none."""
        return self.reduced.index(True) if True in self.reduced else len(self.ids)

    def extend(self, ids: Sequence[int], reduced: bool = False) -> None:
        """Add ids without a text."""
        self.ids.extend(ids)
        self.reduced.extend([reduced] * len(ids))

    def become(self, other: Stored) -> None:
        """Take over all that ``other`` has."""
        vars(self).update(vars(other))

    def agree_as(self, other: Stored) -> None:
        """Take text and marks of ``other``, whose ids are the same."""
        self.text, self.marks = other.text, other.marks

    def agree(self, text: str) -> None:
        """Say that all ids so far stand for ``text``; older marks that contradict it are dropped."""
        agreed, _ = self.agreed(text)
        kept = [mark for mark in self.marks if mark[0] <= agreed and mark[0] < len(self.ids)]
        self.marks = [*kept, (len(self.ids), len(text))]
        self.text = text

    def truncate(self, length: int) -> None:
        """Keep the first ``length`` ids."""
        del self.ids[length:], self.reduced[length:]
        self.saved = min(self.saved, length)
        self.marks = [mark for mark in self.marks if mark[0] <= length]
        self.text = self.text[: self.marks[-1][1]] if self.marks else ""

    def agreed(self, text: str) -> tuple[int, int]:
        """The last mark whose text is a prefix of ``text``, (0, 0) where there is none."""
        found = (mark for mark in reversed(self.marks) if text.startswith(self.text[: mark[1]]))
        return next(found, (0, 0))

    def agreed_from(self, text: str, chars: int) -> tuple[int, int] | None:
        """The first mark with at least ``chars`` characters whose text is a prefix of ``text``."""
        found = (mark for mark in self.marks if mark[1] >= chars and text.startswith(self.text[: mark[1]]))
        return next(found, None)


def common_prefix(a: Sequence[object], b: Sequence[object]) -> int:
    """Number of leading elements that are equal."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
