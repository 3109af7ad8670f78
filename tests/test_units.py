"""Formatting of numbers for users."""

import pytest

from kvchat import units


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (units.count(14203), "14,203"),
        (units.count(None), "n/a"),
        (units.count(1, "token"), "1 token"),
        (units.count(0, "token"), "0 tokens"),
        (units.count(14203, "token"), "14,203 tokens"),
        (units.count(None, "thread"), "n/a threads"),
        (units.short(999), "999"),
        (units.short(31400), "31.4k"),
        (units.short(131072), "131k"),
        (units.short(None), "n/a"),
        (units.size(0), "0 B"),
        (units.size(1536), "1.5 KiB"),
        (units.size(6.1 * 2**30), "6.1 GiB"),
        (units.size(140 * 2**30), "140 GiB"),
        (units.size(1024**3 - 1), "1.0 GiB"),
        (units.size(99.97 * 2**20), "100 MiB"),
        (units.size(6.128 * 2**30, 2), "6.13 GiB"),
        (units.size(140 * 2**30, 2), "140 GiB"),
        (units.size(None), "n/a"),
        (units.seconds(0.0042), "4 ms"),
        (units.seconds(0.9999), "1.0 s"),
        (units.seconds(12.34), "12 s"),
        (units.seconds(59.97), "1 min 0 s"),
        (units.seconds(3725), "62 min 5 s"),
        (units.seconds(None), "n/a"),
        (units.figure(1.84, "ms", 1), "1.8 ms"),
        (units.figure(None, "ms"), "n/a"),
        (units.percent(0.941), "94 %"),
        (units.percent(None), "n/a"),
        (units.bars([]), ""),
        (units.bars([0, 0]), "▁▁"),
        (units.bars([1, 4, 8]), "▂▅█"),
    ],
)
def test_numbers_are_formatted(shown, text):
    assert shown == text
