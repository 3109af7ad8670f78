"""Tries a model's tokenizer once it is built: what it loses is told before the first question."""

from __future__ import annotations

from typing import Any

from kvchat.engine.tokenizer_errors import explained_panics
from kvchat.errors import ModelError

# A text of each script, with runs of spaces and digits.
TEXTS = {
    "Latin": "Größe, naïve café:  1,234   56\n\t'x'  y",
    "Greek": "Καλημέρα,  κόσμε 12  345",
    "Cyrillic": "Съешь ещё  этих 1234 булок",
    "Arabic": "مرحبا  بالعالم ١٢٣  45",
    "Hebrew": "שלום  עולם 12   345",
    "Devanagari": "नमस्ते  दुनिया १२३  45",
    "Thai": "สวัสดี  ชาวโลก ๑๒๓  45",
    "Chinese": "你好，  世界 １２３  45",
    "Japanese": "こんにちは、  カタカナ 123  45",
    "Korean": "안녕하세요  세계 123  45",
}


def check(tokenizer: Any, rows: int, name: str) -> list[str]:
    """Notes about what ``tokenizer`` of the model ``name`` loses; ``rows`` are those of its embeddings.

    Raises:
        ModelError: a token that the chat template may write has no embedding.
    """
    notes = []
    if len(tokenizer) > rows:
        counts = f"Its tokenizer has {len(tokenizer):,} tokens, and the model embeddings for {rows:,}"
        outside = [token.content for id, token in tokenizer.added_tokens_decoder.items() if id >= rows]
        template = str(tokenizer.chat_template or "")
        if any(token in template for token in outside):
            raise ModelError(
                f"{name} cannot be loaded.",
                f"{counts}; its chat template writes {next(token for token in outside if token in template)}.",
                "Download the model again, with its own tokenizer.",
            )
        notes.append(f"{counts}.")
    if lost := [script for script, text in TEXTS.items() if not _comes_back(tokenizer, text)]:
        notes.append(f"Its tokenizer does not keep every text as it is: {', '.join(lost)}.")
    return notes


def _comes_back(tokenizer: Any, text: str) -> bool:
    with explained_panics():
        ids = tokenizer.encode(text, add_special_tokens=False)
        found: str = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    return found == text
