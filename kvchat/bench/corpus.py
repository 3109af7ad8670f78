"""The corpus of the speed measurements: Python's language reference, part of every Python, so nothing to download."""

from __future__ import annotations

from pydoc_data import topics
from typing import Any


def prose(tokenizer: Any, tokens: int) -> list[int]:
    """Return the first ``tokens`` ids of the corpus in the tokenizer's vocabulary.

    Raises:
        ValueError: the corpus is shorter.
    """
    ids: list[int] = []
    for name in sorted(topics.topics):
        ids += tokenizer.encode(topics.topics[name], add_special_tokens=not ids)
        if len(ids) >= tokens:
            return ids[:tokens]
    raise ValueError(f"The corpus has {len(ids):,} tokens; {tokens:,} were requested.")
