"""What the commands that try modes against each other do with their arguments."""

from __future__ import annotations

from kvchat.errors import UsageError
from kvchat.protocol.comparing import MAX_VARIANTS, Variant
from kvchat.tui.commands import parse_assignments, split_words
from kvchat.tui.controller import ChatController

NEEDLE_TOKENS = 2000  # four times the bundled model's budget; read in seconds on two cores
MIN_NEEDLE_TOKENS = 256


async def compare(chat: ChatController, argument: str) -> None:
    """``/compare MODE key=value… MODE…``"""
    chat.comparisons.begin(parse_variants(argument))


async def search_needle(chat: ChatController, argument: str) -> None:
    """``/needle TOKENS``"""
    if argument and not (argument.isdecimal() and int(argument) >= MIN_NEEDLE_TOKENS):
        raise UsageError(
            f'/needle "{argument}" is refused.', f"It takes the length of the text, {MIN_NEEDLE_TOKENS} tokens or more."
        )
    chat.comparisons.search_needle(int(argument or NEEDLE_TOKENS))


def parse_variants(argument: str) -> list[Variant]:
    """Parse ``streaming budget=256 sync``: each mode is followed by its parameters.

    Raises:
        UsageError: it begins with a parameter, or names too many modes.
    """
    groups: list[list[str]] = []
    for word in split_words(argument):
        if "=" not in word:
            groups.append([word])
        elif groups:
            groups[-1].append(word)
        else:
            raise UsageError(f"{word} belongs to no mode.", hint="For example: /compare full streaming budget=256")
    if len(groups) > MAX_VARIANTS:
        raise UsageError(f"{len(groups)} modes are too many.", f"At most {MAX_VARIANTS} are compared at once.")
    return [Variant(mode, parse_assignments(words)) for mode, *words in groups]
