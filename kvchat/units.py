"""Numbers as a person reads them; a missing reading is ``n/a``, never 0."""

from __future__ import annotations

from collections.abc import Sequence

MISSING = "n/a"
BARS = "▁▂▃▄▅▆▇█"


def count(value: float | None) -> str:
    """``14203`` -> ``14,203``."""
    return MISSING if value is None else f"{round(value):,}"


def short(value: float | None) -> str:
    """At most five characters: ``31400`` -> ``31.4k``."""
    if value is None:
        return MISSING
    if value < 1000:
        return f"{value:.0f}"
    return f"{value / 1000:.1f}k" if value < 99_950 else f"{value / 1000:.0f}k"


def size(value: float | None) -> str:
    """Bytes: ``6543210987`` -> ``6.1 GiB``."""
    if value is None:
        return MISSING
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024 or unit == "GiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" or abs(value) >= 100 else f"{value:.1f} {unit}"


def figure(value: float | None, unit: str = "", digits: int = 0) -> str:
    """A number with its unit: ``figure(1.84, "ms", 1)`` -> ``1.8 ms``."""
    return MISSING if value is None else f"{value:,.{digits}f} {unit}".rstrip()


def percent(share: float | None) -> str:
    """``0.941`` -> ``94 %``."""
    return MISSING if share is None else f"{share * 100:.0f} %"


def bars(values: Sequence[float]) -> str:
    """One block a value, scaled to the largest."""
    top = max(values, default=0.0)
    return "".join(BARS[round(value / top * (len(BARS) - 1))] if top else BARS[0] for value in values)
