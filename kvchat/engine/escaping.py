"""Prevents text from becoming control tokens, whatever the tokenizer normalizes, strips or ignores.

Also marks where messages begin and end in a rendered conversation.
"""

from __future__ import annotations

import re
from functools import lru_cache
from itertools import accumulate, count
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


ESCAPE = "\ufdd0"  # where a text is split before it is tokenized: a Unicode noncharacter, never found in real text
MARK = "\N{REPLACEMENT CHARACTER}"
RARE = "\U00012000\ua66e\U00010380"  # letters that only byte-level vocabularies know
KEPT_CONTENTS = 1024  # messages whose escaped form is cached, because each prompt repeats all earlier turns
EDGE = "\ufdd2"  # a Unicode noncharacter, never found in real text, without case
_NUMBERED = re.compile(f"{EDGE}([0-9]+){EDGE}")
THOUGHT_END = "</think>"
_THOUGHT_BEGIN = re.compile(r"^\s*(?:<think>\s*)?")
# Text that templates search for in messages to decide how to render them: it stays outside the marks.
_LOOKED_FOR = re.compile("(</?(?:think|tool_response)>|/(?:no_?)?think|detailed thinking (?:on|off))")


class Escaper:
    """Puts ``ESCAPE`` into a text wherever the tokenizer would produce a ``control`` token.

    Only the tokenizer can tell: it may normalize, ignore case or strip the white space around a token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, control: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._control = control
        self._mark = MARK if control.isdisjoint(tokenizer(MARK, add_special_tokens=False).input_ids) else ""
        self.escape = lru_cache(KEPT_CONTENTS)(self._escape)

    def _escape(self, text: str) -> str:
        """Return ``text`` with ``ESCAPE`` inserted, and ``MARK`` for a single character that is a control token."""
        encoded = self._tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=self._tokenizer.is_fast, verbose=False
        )
        if self._control.isdisjoint(encoded.input_ids):
            return text
        spans = encoded.offset_mapping if self._tokenizer.is_fast else [(0, len(text))] * len(encoded.input_ids)
        control = {span for span, token in zip(spans, encoded.input_ids, strict=True) if token in self._control}
        parts, end = [], 0
        for start, stop in sorted(control):
            middle = (start + stop) // 2
            alone = middle == start  # a single character cannot be split
            parts += [text[end:start], *([self._mark] if alone else [text[start:middle], text[middle:stop]])]
            end = stop
        return ESCAPE.join(part if part == MARK else self.escape(part) for part in [*parts, text[end:]] if part)


def control_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the ids of the control tokens, which structure a conversation."""
    added = tokenizer.added_tokens_decoder.items()
    control = {i for i, token in added if token.special or re.fullmatch(r"<[|｜].*[|｜]>", token.content)}
    return frozenset(control | set(tokenizer.all_special_ids))


def markers(tokenizer: PreTrainedTokenizerBase, rendered: str) -> frozenset[int]:
    """Return the added tokens, special or not, that a template writes into a ``rendered`` conversation itself."""
    found = {*tokenizer(rendered, add_special_tokens=False).input_ids}
    added = tokenizer.added_tokens_decoder.items()
    return frozenset(i for i, token in added if token.content.strip() and (i in found or token.content in rendered))


def unknown(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the id of unknown characters, unless there is none or it also begins or ends texts."""
    ids = {tokenizer.unk_token_id} & {*tokenizer(RARE, add_special_tokens=False).input_ids}
    return frozenset(ids - {tokenizer.bos_token_id, tokenizer.eos_token_id})


class Edges:
    """Marks the beginning and end of each message's text in one conversation with twice the message's index.

    The next odd number marks where its thought begins.
    """

    def __init__(self) -> None:
        self._numbers = count(0, 2)

    def insert(self, content: str) -> str:
        """Return ``content`` with its marks, placed inside white space and tags, which templates may remove."""
        number = next(self._numbers)
        thought, end, said = content.rpartition(THOUGHT_END)
        begun = thought[: len(thought) - len(_THOUGHT_BEGIN.sub("", thought, count=1))]
        if thought != begun:
            thought = f"{begun}{EDGE}{number + 1}{EDGE}{thought.removeprefix(begun)}"
        first, last = _inner(said)
        mark = f"{EDGE}{number}{EDGE}"
        return f"{thought}{end}{said[:first]}{mark}{said[first:last]}{mark}{said[last:]}"


def _inner(said: str) -> tuple[int, int]:
    """Return where a text begins and ends without the tags that templates search for; all of it if it is only tags."""
    others = [found.span() for found in _LOOKED_FOR.finditer(said)]
    gaps = zip([0, *(end for _, end in others)], [*(begin for begin, _ in others), len(said)], strict=True)
    words = [gap for gap in gaps if said[slice(*gap)].strip()] or [(0, len(said))]
    begin, end = words[0][0], words[-1][1]
    inner = said[begin:end]
    return begin + len(inner) - len(inner.lstrip()), end - (len(inner) - len(inner.rstrip()) if inner.strip() else 0)


def found_edges(rendered: str) -> tuple[str, list[tuple[int, int, int]]] | None:
    """Remove the marks of ``Edges`` from a rendered text; return it with (message index, start, end) of each message.

    A message may appear in any order, repeatedly or not at all. Returns None if the marks are not paired.
    """
    parts = _NUMBERED.split(rendered)
    marks = zip(map(int, parts[1::2]), accumulate(map(len, parts[::2])), strict=False)
    said: list[tuple[int, int, int]] = []
    thought = begun = None
    for number, place in marks:
        if number % 2:
            thought = (number - 1, place)
        elif begun is None:
            begun = thought if thought and thought[0] == number else (number, place)
        elif begun[0] == number:
            said.append((number // 2, begun[1], place))
            thought = begun = None
        else:
            return None
    return None if begun else ("".join(parts[::2]), said)
