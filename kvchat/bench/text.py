"""English prose for measurements, from the Python distribution itself: the same everywhere, nothing to download."""

from __future__ import annotations

from pydoc_data import topics

from kvchat.engine.session import Session


def prose(session: Session, tokens: int) -> list[int]:
    """The first ``tokens`` ids of Python's language reference in the session's vocabulary.

    Raises:
        ValueError: the reference is shorter than that.
    """
    tokenizer = session.model.tokenizer
    ids: list[int] = []
    for name in sorted(topics.topics):
        ids += tokenizer.encode(topics.topics[name], add_special_tokens=not ids)
        if len(ids) >= tokens:
            return ids[:tokens]
    raise ValueError(f"The text has {len(ids):,} tokens, {tokens:,} were asked for.")
