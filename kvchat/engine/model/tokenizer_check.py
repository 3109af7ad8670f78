"""Tries a model's tokenizer once it is built: what it loses is told before the first question."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvchat.engine.model.checkpoint import MAX_TEXT_BYTES, read_json
from kvchat.engine.tokenizer_errors import explained_panics
from kvchat.errors import ModelError
from kvchat.units import seconds

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


# What the steps of a tokenizer may make of a character, and how many there may be: the longest in use have a tenth.
MOST_GROWTH, MOST_STEPS, LONGEST = 64, 300, 4096
STEPS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")  # the sections of tokenizer.json that name some
SLOW_S, LONGEST_PROBE = 0.5, 256
PROBES = ("a", " ", "1", "aA1. ", "é中")


def check_steps(folder: Path) -> None:
    """Refuse the tokenizer of a ``folder`` whose steps would make a text grow without bounds, before it is built.

    Raises:
        ModelError: they would, or its file cannot be read.
    """
    if not (file := folder / "tokenizer.json").is_file():
        return
    content = read_json(file, MAX_TEXT_BYTES)
    try:
        for section in STEPS:
            steps = list(_steps(content.get(section)))
            growth = math.prod(map(_growth, steps[:MOST_STEPS]))
            if growth > MOST_GROWTH or len(steps) > MOST_STEPS:
                told = f"{growth:,.0f} times its length" if growth < 10**30 else "any length"
                why = f"The {len(steps):,} steps of its {section} can make a text {told}; {MOST_GROWTH} is the most."
                raise ModelError(f"The tokenizer in {folder} is refused.", why, "Choose another model.")
    except RecursionError as error:
        why = "Its steps lie too deep within each other."
        raise ModelError(f"The tokenizer in {folder} is refused.", why, "Choose another model.") from error


def _steps(node: Any) -> Iterator[dict[str, Any]]:
    """Each object of a section that has a type, those within others too."""
    if isinstance(node, dict):
        if "type" in node:
            yield node
        for value in node.values():
            yield from _steps(value)
    elif isinstance(node, list):
        for value in node:
            yield from _steps(value)


def _growth(step: dict[str, Any]) -> float:
    """How many characters a step may make of one."""
    content = step.get("content", step.get("prepend", step.get("replacement", "")))
    length = len(content) if isinstance(content, str) else 0
    if length > LONGEST:
        return math.inf
    if step.get("type") != "Replace":
        return 1
    pattern = step.get("pattern")
    least = len(pattern["String"]) if isinstance(pattern, dict) and isinstance(pattern.get("String"), str) else 1
    return max(1.0, length / least if least else 1 + length)


def check(tokenizer: Any, rows: int, name: str) -> list[str]:
    """Notes about what ``tokenizer`` of the model ``name`` loses; ``rows`` are those of its embeddings.

    Raises:
        ModelError: a token that the chat template may write has no embedding.
    """
    notes = []
    _check_time(tokenizer, name)
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


def _check_time(tokenizer: Any, name: str) -> None:
    """Refuse a tokenizer that takes long for a short text: its regular expressions may try all ways to cut it."""
    length = 1
    while length <= LONGEST_PROBE:
        for text in PROBES:
            began = time.perf_counter()
            with explained_panics():
                tokenizer.encode((text * length)[:length], add_special_tokens=False)
            if (took := time.perf_counter() - began) > SLOW_S:
                raise ModelError(
                    f"{name} cannot be loaded.",
                    f"Its tokenizer takes {seconds(took)} for a text of {length} characters.",
                    "Choose another model.",
                )
        length *= 2


def _comes_back(tokenizer: Any, text: str) -> bool:
    with explained_panics():
        ids = tokenizer.encode(text, add_special_tokens=False)
        found: str = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    return found == text
