"""Numbers for people."""

from __future__ import annotations

import pytest

from kvchat import units as fmt


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (fmt.count(14203), "14,203"),
        (fmt.count(None), "n/a"),
        (fmt.short(999), "999"),
        (fmt.short(31400), "31.4k"),
        (fmt.short(131072), "131k"),
        (fmt.short(None), "n/a"),
        (fmt.size(0), "0 B"),
        (fmt.size(1536), "1.5 KiB"),
        (fmt.size(6.1 * 2**30), "6.1 GiB"),
        (fmt.size(140 * 2**30), "140 GiB"),
        (fmt.size(None), "n/a"),
        (fmt.figure(1.84, "ms", 1), "1.8 ms"),
        (fmt.figure(None, "ms"), "n/a"),
        (fmt.percent(0.941), "94 %"),
        (fmt.percent(None), "n/a"),
        (fmt.bars([]), ""),
        (fmt.bars([0, 0]), "▁▁"),
        (fmt.bars([1, 4, 8]), "▂▅█"),
    ],
)
def test_numbers(shown, text):
    assert shown == text
