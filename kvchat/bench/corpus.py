"""English prose for measurements, from the Python distribution itself: the same everywhere, nothing to download."""

from __future__ import annotations

from pydoc_data import topics
from typing import Any


def prose(tokenizer: Any, tokens: int) -> list[int]:
    """The first ``tokens`` ids of Python's language reference in the tokenizer's vocabulary.

    Raises:
        ValueError: the reference is shorter than that.
    """
    ids: list[int] = []
    for name in sorted(topics.topics):
        ids += tokenizer.encode(topics.topics[name], add_special_tokens=not ids)
        if len(ids) >= tokens:
            return ids[:tokens]
    raise ValueError(f"The text has {len(ids):,} tokens, {tokens:,} were asked for.")
