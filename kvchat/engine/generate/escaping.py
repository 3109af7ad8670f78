"""Keeps what people write from becoming control tokens, whatever the tokenizer normalizes, strips or ignores."""

from __future__ import annotations

import re
import sys
import unicodedata
from collections.abc import Iterable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ESCAPE = "\ufdd0"  # splits a text before it is tokenized: a Unicode noncharacter, which never occurs in real text
MARK = "\N{REPLACEMENT CHARACTER}"
RARE = "\U00012000\ua66e\U00010380"  # letters that only byte-wise vocabularies know
KEPT_CONTENTS = 1024  # whose escaped form is kept: every turn comes again with the next


class Escaper:
    """Puts ``ESCAPE`` into a text wherever the tokenizer would take it for a ``control`` token.

    Only the tokenizer can tell: it may normalize, ignore case or take the white space around a token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, control: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._control = control
        self._mark = MARK if control.isdisjoint(tokenizer(MARK, add_special_tokens=False).input_ids) else ""
        self._eats_end = _eats_end(token for i, token in tokenizer.added_tokens_decoder.items() if i in control)
        self._escaped = lru_cache(KEPT_CONTENTS)(self._as_text)

    def escape(self, text: str) -> str:
        """``text`` with ``ESCAPE`` in it, and ``MARK`` for a single character that is spelled like a token."""
        apart = self._eats_end.split(text) if self._eats_end else [text]
        return ESCAPE.join(map(self._escaped, apart))

    def _as_text(self, text: str) -> str:
        encoded = self._tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=self._tokenizer.is_fast, verbose=False
        )
        if self._control.isdisjoint(encoded.input_ids):
            return text
        spans = encoded.offset_mapping if self._tokenizer.is_fast else [(0, len(text))] * len(encoded.input_ids)
        forged = {span for span, token in zip(spans, encoded.input_ids, strict=True) if token in self._control}
        parts, end = [], 0
        for start, stop in sorted(forged):
            middle = (start + stop) // 2
            alone = middle == start  # what is one character long cannot be written in another way
            parts += [text[end:start], *([self._mark] if alone else [text[start:middle], text[middle:stop]])]
            end = stop
        return ESCAPE.join(part if part == MARK else self._escaped(part) for part in [*parts, text[end:]] if part)


def control_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Ids of the control tokens, which structure a conversation."""
    control = {i for i, token in tokenizer.added_tokens_decoder.items() if _is_control(token)}
    return frozenset(control | set(tokenizer.all_special_ids))


def markers(tokenizer: PreTrainedTokenizerBase, rendered: str) -> frozenset[int]:
    """The added tokens in a ``rendered`` conversation without any of its own, also those not marked special."""
    found = {*tokenizer(rendered, add_special_tokens=False).input_ids}
    added = tokenizer.added_tokens_decoder.items()
    return frozenset(i for i, token in added if token.content.strip() and (i in found or token.content in rendered))


def unknown(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The id of unknown characters, if that is all it is for; some tokenizers have none, and name the end's."""
    ids = {tokenizer.unk_token_id} & {*tokenizer(RARE, add_special_tokens=False).input_ids}
    return frozenset(ids - {tokenizer.bos_token_id, tokenizer.eos_token_id})


def _is_control(token: Any) -> bool:
    return bool(token.special or re.fullmatch(r"<[|｜].*[|｜]>", token.content))


def _eats_end(tokens: Iterable[Any]) -> re.Pattern[str] | None:
    """Before the marks that become one character with the end of a token that is looked for in normalized text.

    U+0338 makes ``≯`` of the ``>`` before it, and the token is gone. None where there is no such token.
    """
    ends = {unicodedata.normalize("NFKC", token.content)[-1] for token in tokens if token.normalized}
    if not ends:
        return None
    found = [mark for mark in _combining() for end in ends if len(unicodedata.normalize("NFC", end + mark)) == 1]
    return re.compile(f"(?=[{''.join(found)}])") if found else None


@lru_cache(1)
def _combining() -> tuple[str, ...]:
    return tuple(filter(unicodedata.combining, map(chr, range(sys.maxunicode + 1))))
