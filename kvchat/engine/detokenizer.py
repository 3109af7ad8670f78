"""Token ids -> text while they arrive: whole characters only, and nothing of a stop string.

``hold_back`` is for readers that cannot take back what they have shown, such as a pipe.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from kvchat import thoughts
from kvchat.models.tokenizer import explained_panics
from kvchat.protocol.messages import Event, Finished, Text, Withdrawn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


REPLACEMENT = "\ufffd"
BYTE = re.compile(r"<0x[0-9A-F]{2}>")  # a token of one byte, in vocabularies that spell out what they have no token for
LONGEST_CHARACTER = 4  # bytes
LAST_MARK = 0x10FFFD  # the last character for private use; it and those before it stand for control tokens
MOST_HELD = 64  # ids; only garbage takes more


class Detokenizer:
    """Decodes one sequence of ids incrementally, without control tokens.

    The pieces joined are what ``tokenizer.decode(ids, skip_special_tokens=True)`` gives, whatever bytes the ids are.
    Tokens of one byte are held until another comes: one that is wrong makes all beside it unreadable. Costs a decode of
    the ids since the last but one piece.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._token = tokenizer.backend_tokenizer.id_to_token if tokenizer.is_fast else tokenizer.convert_ids_to_tokens
        self._context: list[int] = []  # ids of the last piece: what follows is decoded behind them
        self._before = ""  # their text
        self._held: list[int] = []  # ids whose text is not out yet

    def step(self, token: int) -> str:
        """The text that ``token`` completes; empty while a character is incomplete."""
        self._held.append(token)
        if BYTE.fullmatch(self._token(token) or ""):
            return ""
        text = self._tail()
        is_incomplete = text.endswith(REPLACEMENT) and len(self._held) <= MOST_HELD
        if not text or (is_incomplete and not text.endswith(REPLACEMENT * LONGEST_CHARACTER)):
            return ""
        return self._out(text)

    def flush(self) -> str:
        """The text still held: an incomplete character as U+FFFD."""
        return self._out(self._tail()) if self._held else ""

    def _out(self, text: str) -> str:
        self._context, self._held = self._held, []
        self._before = self._decode(self._context)
        return text

    def _tail(self) -> str:
        return self._decode(self._context + self._held)[len(self._before) :]

    def _decode(self, ids: list[int]) -> str:
        if self._tokenizer.is_fast:
            try:
                return str(self._tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=True))
            except BaseException:  # only now: each token would pay for entering it
                with explained_panics():
                    raise
        return str(self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


class StopBuffer:
    """Cuts a text that comes in pieces before the first stop string.

    Only characters that may begin a stop string are held back. The first one to be complete counts, so the result does
    not depend on the pieces.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._held = ""
        self.found = ""

    def feed(self, piece: str) -> str:
        """The text that is safe to show now; once ``found`` is set it is the last."""
        text = self._held + piece
        ends = [(start + len(stop), start, stop) for stop in self._stop if (start := text.find(stop)) >= 0]
        if ends:
            _, cut, self.found = min(ends)
        else:
            cut = len(text) - max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = "" if self.found else text[cut:]
        return text[:cut]

    def flush(self) -> str:
        """The characters held back, at the end of the text."""
        text, self._held = self._held, ""
        return text


class AnswerText:
    """The text of one answer as its tokens come: what may be shown now, and what all of them decode to.

    A stop string may have control tokens in it, which are no part of the text: they are matched by id. Control tokens
    that begin or end a thought, or are ``kept``, are a part of the text. Of an answer in parts the first thought stands
    between tags; one ``in_thought`` goes on with it, without the tag that begins it.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop: Sequence[str],
        in_thought: bool = False,
        kept: Collection[str] = (),
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        special = {i: token.content for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._tags = {i: content for i, content in special.items() if thoughts.is_tag(content) or content in kept}
        self._parts = {i: content for i, content in special.items() if content in thoughts.PARTS}
        if len(self._parts) < len(thoughts.PARTS):
            self._parts = {}
        self._head: str | None = None  # of a part, while it is written
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
        """The text that ``token`` lets be shown."""
        tag, mark, part = self._tags.get(token, ""), self._marks.get(token, ""), self._parts.get(token, "")
        piece = self._detokenizer.flush() if tag or mark or part else self._detokenizer.step(token)
        return self._show(piece + tag, self._in_parts(piece, part) + (mark or tag))

    def finish(self) -> str:
        """The text held back until now. Nothing may follow."""
        rest = self._detokenizer.flush()
        held = self._show(rest, self._in_parts(rest, ""))
        if not self.stopped:
            rest = self._unmarked(self._stops.flush())
            self.shown += rest
            held += rest
        return held

    def _in_parts(self, piece: str, mark: str) -> str:
        """What is shown of a piece and of the control token behind it, which begins or ends a part or its head."""
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
        """Show what no stop string may begin in; ``marked`` is the piece with marks for control tokens."""
        self.decoded += piece
        text = "" if self.stopped else self._unmarked(self._stops.feed(marked))
        self.shown += text
        return text

    def _unmarked(self, text: str) -> str:
        for mark in self._marks.values():
            text = text.replace(mark, "")
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that is a proper beginning of ``stop``."""
    lengths = range(min(len(text), len(stop) - 1), 0, -1)
    return next((n for n in lengths if text.endswith(stop[:n])), 0)


def hold_back(events: Iterable[Event], withdrawable: Callable[[], int]) -> Iterator[Event]:
    """The events of an answer without ``Withdrawn``: text is held back as long as recovery may still withdraw it.

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
