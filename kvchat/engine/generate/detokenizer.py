"""Token ids -> text while they arrive: whole characters only, and nothing of a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tokenizers.decoders import DecodeStream

from kvchat.engine.tokenizer_errors import explained_panics

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REPLACEMENT = "\ufffd"


class Detokenizer:
    """Decodes one sequence of ids incrementally, without control tokens.

    The pieces joined are what ``tokenizer.decode(ids, skip_special_tokens=True)`` gives. Costs 2-3 µs a token with a
    fast tokenizer; with a slow one two decodes of the ids since the last but one piece.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True) if tokenizer.is_fast else None
        self._context: list[int] = []  # ids of the last piece: what follows is decoded behind them
        self._held: list[int] = []  # ids whose text is not out yet

    def step(self, token: int) -> str:
        """The text that ``token`` completes; empty while a character is incomplete."""
        self._held.append(token)
        if self._stream is not None:
            with explained_panics():
                text = self._stream.step(self._tokenizer.backend_tokenizer, token) or ""
        else:
            text = self._tail()
            text = "" if text.endswith(REPLACEMENT) else text
        if text:
            self._context, self._held = self._held, []
        return text

    def flush(self) -> str:
        """The text still held at the end: an incomplete character as U+FFFD. Nothing may follow."""
        return self._tail() if self._held else ""

    def _tail(self) -> str:
        before = self._decode(self._context)
        return self._decode(self._context + self._held)[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text


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
    """The text of one answer as its tokens come: what may be shown now, and what all of them decode to."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str]) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopBuffer(stop)
        self.shown = ""
        self.decoded = ""

    @property
    def stopped(self) -> bool:
        """True once a stop string was found."""
        return bool(self._stops.found)

    def add(self, token: int) -> str:
        """The text that ``token`` lets be shown."""
        return self._show(self._detokenizer.step(token))

    def finish(self) -> str:
        """The text held back until now. Nothing may follow."""
        held = self._show(self._detokenizer.flush())
        if not self.stopped:
            rest = self._stops.flush()
            self.shown += rest
            held += rest
        return held

    def _show(self, piece: str) -> str:
        self.decoded += piece
        text = "" if self.stopped else self._stops.feed(piece)
        self.shown += text
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that is a proper beginning of ``stop``."""
    lengths = range(min(len(text), len(stop) - 1), 0, -1)
    return next((n for n in lengths if text.endswith(stop[:n])), 0)
