"""The only formatter of bytes, counts, seconds and percentages. None is a missing reading: ``n/a``, never 0."""

from __future__ import annotations

from collections.abc import Sequence

MISSING = "n/a"
BARS = "▁▂▃▄▅▆▇█"
UNREAD = "·"  # in place of a block
METER = 8  # cells


def count(value: float | None, noun: str = "") -> str:
    """Format a count: ``14203`` -> ``14,203``; with a noun ``1 token``, ``14,203 tokens``."""
    number = MISSING if value is None else f"{round(value):,}"
    return f"{number} {noun}{'s' * (number != '1')}" if noun else number


def short(value: float | None) -> str:
    """Format a count in at most five characters: ``31400`` -> ``31.4k``."""
    if value is None:
        return MISSING
    if value < 1000:
        return f"{value:.0f}"
    return f"{value / 1000:.1f}k" if value < 99_950 else f"{value / 1000:.0f}k"


def size(value: float | None, digits: int = 1) -> str:
    """Format bytes: ``6543210987`` -> ``6.1 GiB``, with ``digits`` decimals, or none from 100 on.

    Two decimals are for sizes that a user compares, such as needed and free memory.
    """
    if value is None:
        return MISSING
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1023.5 or unit == "GiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" or abs(value) >= 99.95 else f"{value:.{digits}f} {unit}"


def seconds(value: float | None) -> str:
    """Format a duration: ``0.0042`` -> ``4 ms``, ``12.34`` -> ``12 s``, ``125`` -> ``2 min 5 s``."""
    if value is None:
        return MISSING
    if value < 0.9995:
        return f"{1000 * value:.0f} ms"
    if value < 59.5:
        return f"{value:.{int(value < 9.95)}f} s"
    minutes, rest = divmod(round(value), 60)
    return f"{minutes:,} min {rest} s"


def figure(value: float | None, unit: str = "", digits: int = 0) -> str:
    """Format a number with its unit: ``figure(1.84, "ms", 1)`` -> ``1.8 ms``."""
    return MISSING if value is None else f"{value:,.{digits}f} {unit}".rstrip()


def percent(share: float | None) -> str:
    """Format a share: ``0.941`` -> ``94 %``."""
    return MISSING if share is None else f"{share * 100:.0f} %"


def meter(share: float) -> str:
    """Draw a share as a meter: ``0.5`` -> ``▰▰▰▰▱▱▱▱``."""
    full = int(min(share, 1.0) * METER)
    return "▰" * full + "▱" * (METER - full)


def bars(values: Sequence[float | None], top: float | None = None) -> str:
    """Draw a block for each value, full for ``top`` (by default the largest), and a dot for a missing reading."""
    full, last = max(filter(None, values), default=0.0) if top is None else top, len(BARS) - 1
    return "".join(
        UNREAD if value is None else BARS[min(round(value / full * last), last) if full else 0] for value in values
    )
