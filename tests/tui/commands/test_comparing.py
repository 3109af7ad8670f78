"""The arguments of /needle."""

from __future__ import annotations

import pytest

from kvchat.errors import UsageError
from kvchat.protocol.messages import MAX_NEEDLE_TOKENS
from kvchat.tui.commands.chat import MIN_NEEDLE_TOKENS, search_needle


@pytest.mark.parametrize("length", ["many", "-3", str(MIN_NEEDLE_TOKENS - 1), str(MAX_NEEDLE_TOKENS + 1), "9" * 30])
async def test_a_needle_needs_a_text(chat, length):
    with pytest.raises(UsageError, match=f"{MIN_NEEDLE_TOKENS:,}.*{MAX_NEEDLE_TOKENS:,}"):
        await search_needle(chat.controller, length)
