"""The arguments of /compare and /needle."""

from __future__ import annotations

import pytest

from kvchat.errors import UsageError
from kvchat.protocol.comparing import MAX_VARIANTS, Variant
from kvchat.tui.comparing.compare_commands import MIN_NEEDLE_TOKENS, parse_variants, search_needle


def test_each_mode_is_followed_by_its_parameters():
    assert parse_variants("") == []
    parsed = parse_variants("streaming budget=256 R=8 speculative first_full=no full")
    assert parsed == [
        Variant("streaming", {"budget": 256, "R": 8}),
        Variant("speculative", {"first_full": False}),
        Variant("full"),
    ]


@pytest.mark.parametrize("line", ["budget=256", "full " * (MAX_VARIANTS + 1), "full 'budget=1"])
def test_what_makes_no_sense_is_refused(line):
    with pytest.raises(UsageError):
        parse_variants(line)


@pytest.mark.parametrize("length", ["many", "-3", str(MIN_NEEDLE_TOKENS - 1)])
async def test_a_needle_needs_a_text(chat, length):
    with pytest.raises(UsageError, match="length of the text"):
        await search_needle(chat.controller, length)
