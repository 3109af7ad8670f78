"""Freeze's constants are for long conversations: in these tests tokens freeze from the first steps on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.freeze_run import EARLY, ruled


@pytest.fixture(autouse=True)
def early_freezes() -> Iterator[None]:
    with ruled(**EARLY):
        yield
