"""Compute how much of each message the model still reads, from its range of tokens and the ribbon's cells in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from kvchat.conversations.conversation import Message
from kvchat.protocol.figures import Snapshot

Ranges = dict[str, tuple[int, int]]
PINNED = "P"  # the ribbon's letter
UNFINISHED = ""  # in place of the id of an answer that is being made


class Mark(NamedTuple):
    """Most of a message is in the state ``letter`` of the ribbon; the mean ``share`` of it, 0 to 1, is read."""

    letter: str
    share: float


def message_ranges(path: Iterable[Message], prompt_tokens: int | None, total: int) -> Ranges:
    """The stored tokens of each message by its id, each with what its template writes before it.

    Known from the counts of the answers. ``prompt_tokens`` precede the answer in progress, None without one; ``total``
    are stored. A message without counts, as an answer cut off by a crash, has no range.
    """
    ranges: Ranges = {}
    question, end = "", 0
    for message in path:
        if message.role == "user":
            question = message.id
        elif message.stats is not None:
            begin = message.stats.prompt_tokens
            ranges[question], ranges[message.id] = (end, begin), (begin, message.stats.total_tokens)
            question, end = "", message.stats.total_tokens
    if prompt_tokens is not None and question:
        ranges[question], ranges[UNFINISHED] = (end, min(prompt_tokens, total)), (prompt_tokens, total)
    return ranges


def message_at(ranges: Ranges, position: int) -> str | None:
    """The id of the message in which the stored token lies; None where it is not known."""
    return next((id for id, (start, end) in ranges.items() if start <= position < end), None)


def mark(start: int, end: int, s: Snapshot, pinned: bool = False) -> Mark | None:
    """The mark of a message with the stored tokens ``start`` to ``end``; None where none is stored."""
    cells = slice(start // s.cell_tokens, -(-min(end, s.total) // s.cell_tokens))
    letters, digits = s.ribbon[cells], s.attended[cells]
    if start >= end or not letters or len(digits) != len(letters):
        return None
    shares = [int(digit) / 9 for digit in digits if digit in "0123456789"]
    letter = PINNED if pinned else Counter(letters).most_common(1)[0][0]
    return Mark(letter, sum(shares) / len(letters))
