"""The commands that compare modes."""

from __future__ import annotations

from kvchat.errors import UsageError
from kvchat.protocol.messages import MAX_NEEDLE_TOKENS
from kvchat.tui.comparing.variants import parse_variants
from kvchat.tui.controller import ChatController
from kvchat.tui.prompt.assignments import split_words

NEEDLE_TOKENS = 2000  # four times the bundled model's budget; read in seconds on two cores
MIN_NEEDLE_TOKENS = 256


async def compare(chat: ChatController, argument: str) -> None:
    """``/compare MODE key=value… MODE…``"""
    chat.comparisons.begin(parse_variants(split_words(argument)))


async def search_needle(chat: ChatController, argument: str) -> None:
    """``/needle TOKENS``"""
    if argument and not (argument.isdecimal() and MIN_NEEDLE_TOKENS <= int(argument) <= MAX_NEEDLE_TOKENS):
        raise UsageError(
            f'/needle "{argument}" is refused.',
            hint=f"It takes the length of the text, {MIN_NEEDLE_TOKENS} to {MAX_NEEDLE_TOKENS:,} tokens.",
        )
    chat.comparisons.search_needle(int(argument or NEEDLE_TOKENS))
