"""Convert token ids to text as they arrive: whole characters only, and nothing of a stop string.

``hold_back`` is for readers that cannot retract what they have shown, such as a pipe.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from kvchat import thoughts
from kvchat.protocol.messages import Event, Finished, Text, Withdrawn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


REPLACEMENT = "\ufffd"
BYTE = re.compile(r"<0x[0-9A-F]{2}>")  # a token of one byte, in vocabularies that spell unknown text in bytes
LONGEST_CHARACTER = 4  # bytes
LAST_MARK = 0x10FFFD  # the last private-use character; it and those before it stand for control tokens
MOST_HELD = 64  # ids; only garbage needs more


class Detokenizer:
    """Decodes one sequence of ids incrementally, without control tokens.

    The joined pieces equal ``tokenizer.decode(ids, skip_special_tokens=True)``, whatever bytes the ids stand for.
    One-byte tokens are held until a longer one comes, because one wrong byte makes its neighbors unreadable. Each step
    decodes the ids of the last piece and those since. If the sequence ``continues`` a text, the space before its first
    word is kept, which some tokenizers drop at the beginning of a text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, continues: bool = False) -> None:
        self._tokenizer = tokenizer
        self._token = tokenizer.backend_tokenizer.id_to_token if tokenizer.is_fast else tokenizer.convert_ids_to_tokens
        # ids of the last piece, decoded before the next one, and their text
        self._context: list[int] = tokenizer.encode("a", add_special_tokens=False) if continues else []
        self._before = self._decode(self._context) if continues else ""
        self._held: list[int] = []  # ids whose text has not been returned yet

    def step(self, token: int) -> str:
        """Return the text that ``token`` completes; empty while a character is incomplete."""
        self._held.append(token)
        if BYTE.fullmatch(self._token(token) or ""):
            return ""
        text = self._tail()
        is_incomplete = text.endswith(REPLACEMENT) and len(self._held) <= MOST_HELD
        if not text or (is_incomplete and not text.endswith(REPLACEMENT * LONGEST_CHARACTER)):
            return ""
        return self._out(text)

    def flush(self) -> str:
        """Return the text still held; an incomplete character becomes U+FFFD."""
        return self._out(self._tail()) if self._held else ""

    def _out(self, text: str) -> str:
        self._context, self._held = self._held, []
        self._before = self._decode(self._context)
        return text

    def _tail(self) -> str:
        return self._decode(self._context + self._held)[len(self._before) :]

    def _decode(self, ids: list[int]) -> str:
        if self._tokenizer.is_fast:
            return str(self._tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=True))
        return str(self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


class StopBuffer:
    """Cuts a text that comes in pieces before the first stop string.

    Only characters that may begin a stop string are held back. The stop string completed first counts, so the result
    does not depend on how the text is divided.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._held = ""
        self.found = ""

    def feed(self, piece: str) -> str:
        """Return the text that can be shown now; once ``found`` is set it is the last."""
        text = self._held + piece
        ends = [(start + len(stop), start, stop) for stop in self._stop if (start := text.find(stop)) >= 0]
        if ends:
            _, cut, self.found = min(ends)
        else:
            cut = len(text) - max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = "" if self.found else text[cut:]
        return text[:cut]

    def flush(self) -> str:
        """Return the characters held back, at the end of the text."""
        text, self._held = self._held, ""
        return text


class AnswerText:
    """The text of one answer as its tokens arrive: what can be shown now, and what all tokens decode to.

    Stop strings may contain control tokens, which are not part of the text and are matched by id. Control tokens that
    begin or end a thought, or are ``kept``, are part of the text. In an answer of several parts the first thought is
    put between tags. An answer that starts ``in_thought`` continues the thought, without its begin tag; one that
    ``continues`` another text keeps the space before its first word.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop: Sequence[str],
        in_thought: bool = False,
        kept: Collection[str] = (),
        continues: bool = False,
    ) -> None:
        self._detokenizer, self.continues = Detokenizer(tokenizer, continues), continues
        special = {i: token.content for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._tags = {i: content for i, content in special.items() if thoughts.is_tag(content) or content in kept}
        self._parts = {i: content for i, content in special.items() if content in thoughts.PARTS}
        if len(self._parts) < len(thoughts.PARTS):
            self._parts = {}
        self._head: str | None = None  # the head of a part, while it is generated
        self.in_thought = self._thinks = in_thought
        named = [i for i, content in special.items() if content and any(content in one for one in stop)]
        self._marks = {i: chr(LAST_MARK - number) for number, i in enumerate(named)}
        for i in sorted(named, key=lambda i: -len(special[i])):
            stop = [one.replace(special[i], self._marks[i]) for one in stop]
        self._stops = StopBuffer(stop)
        self.shown = ""
        self.decoded = ""

    @property
    def stopped(self) -> bool:
        return bool(self._stops.found)

    def add(self, token: int) -> str:
        """Return the text that can be shown after ``token``."""
        tag, mark, part = self._tags.get(token, ""), self._marks.get(token, ""), self._parts.get(token, "")
        piece = self._detokenizer.flush() if tag or mark or part else self._detokenizer.step(token)
        return self._show(piece + tag, self._in_parts(piece, part) + (mark or tag))

    def finish(self) -> str:
        """Return the text still held back; ends the answer."""
        rest = self._detokenizer.flush()
        held = self._show(rest, self._in_parts(rest, ""))
        if not self.stopped:
            rest = self._unmarked(self._stops.flush())
            self.shown += rest
            held += rest
        return held

    def _in_parts(self, piece: str, mark: str) -> str:
        """Return the visible text of a piece and of the control token after it, which delimits a part or its head."""
        if self._head is not None:
            self._head, piece = self._head + piece, ""
        if mark == thoughts.MESSAGE:
            is_thought, self._head = self._head == "analysis", None
            if is_thought and not (self._thinks or self.shown):
                self._thinks = True
                return f"{piece}<think>"
            if self._thinks and not is_thought:
                self._thinks = False
                return f"{piece}</think>\n\n"
        elif mark:
            self._head = ""
        return piece

    def _show(self, piece: str, marked: str) -> str:
        """Show text that cannot begin a stop string; ``marked`` is the piece with marks for control tokens."""
        self.decoded += piece
        text = "" if self.stopped else self._unmarked(self._stops.feed(marked))
        self.shown += text
        return text

    def _unmarked(self, text: str) -> str:
        for mark in self._marks.values():
            text = text.replace(mark, "")
        return text


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of ``text`` that is a proper prefix of ``stop``."""
    lengths = range(min(len(text), len(stop) - 1), 0, -1)
    return next((n for n in lengths if text.endswith(stop[:n])), 0)


def hold_back(events: Iterable[Event], withdrawable: Callable[[], int]) -> Iterator[Event]:
    """Yield an answer's events without ``Withdrawn``: text is held back while recovery may still withdraw it.

    ``withdrawable()`` is the number of last tokens that may still be withdrawn (0 holds nothing back); a token has at
    most one ``Text``. Other events pass at once, so they may precede older text.
    """
    held: deque[Text] = deque()
    for event in events:
        if isinstance(event, Text):
            held.append(event)
            while len(held) > withdrawable():
                yield held.popleft()
        elif isinstance(event, Withdrawn):
            _cut(held, event.chars)
        else:
            if isinstance(event, Finished):
                yield from held
            yield event


def _cut(held: deque[Text], chars: int) -> None:
    while chars and held:
        last = held.pop()
        kept = max(len(last.text) - chars, 0)
        chars -= len(last.text) - kept
        if kept:
            held.append(replace(last, text=last.text[:kept]))
