"""How many tokens a text in the prompt will be: an estimate, since the tokenizer is in the engine's process."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from kvchat.conversations.conversation import Message
from kvchat.tui.prompt import mentions
from kvchat.tui.prompt.mentions import Part

BYTES_PER_TOKEN = 4.0  # of UTF-8, in most scripts; until the conversation tells better
ENOUGH = 64  # generated tokens from which on it does


def bytes_per_token(path: Iterable[Message]) -> float:
    """Bytes of UTF-8 in a token of this model's, by the answers of a path."""
    answers = [message for message in path if message.stats and message.stats.generated_tokens and message.text]
    tokens = sum(message.stats.generated_tokens for message in answers if message.stats)
    if tokens < ENOUGH:
        return BYTES_PER_TOKEN
    return max(sum(len(message.text.encode("utf-8", "replace")) for message in answers) / tokens, 1.0)


def estimate(parts: Iterable[Part], per_token: float) -> int:
    """Tokens of a question with the files that it mentions; looks for these on the disk."""
    size = 0
    for part in parts:
        size += len(part.text.encode("utf-8", "replace"))
        size += sum(map(_size, mentions.mentioned(part.text))) if part.is_typed else 0
    return round(size / per_token)


def _size(name: str) -> int:
    """Bytes of a file, 0 where there is none."""
    try:
        path = Path(os.path.expanduser(name))
        return path.stat().st_size if path.is_file() else 0
    except (OSError, ValueError):
        return 0
