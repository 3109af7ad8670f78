"""Rows of the decode benchmark as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvchat import units

NATURAL = "natural"


def line(row: Mapping[str, Any]) -> str:
    """Format a row as one line."""
    start = f"{row['context']:>7} {named(row):<32} "
    if "failed" in row:
        return f"{start}{row['failed']}"
    ratios = "".join(
        f"  {ratio:5.2f} x {name}" for name, ratio in row["times_as_fast"].items() if name != row["variant"]
    )
    moved = f"  moves {units.size(row['moved_bytes'])}" if row.get("moved_bytes") else ""
    exposed = row.get("exposed_ms")
    recall = "" if exposed is None else f", exposed {exposed:.2f} of {row['recall_ms']:.2f} ms"
    bound = f", at least {row['link_ms']:.2f} ms over the link" if row.get("link_ms") else ""
    kept = f"  {100 * row['kept']:.0f} % of its speed beside the load" if "kept" in row else ""
    return f"{start}{row['ms']:8.2f} ms {row['tokens_per_s']:7.1f} tok/s{ratios}{moved}{recall}{bound}{kept}"


def named(row: Mapping[str, Any]) -> str:
    """Return the variant's notation with its change rate and its share of corrections, where they were set."""
    return str(row["variant"]) + changed(row)


def changed(row: Mapping[str, Any]) -> str:
    """Return the change rate and the share of corrections as text, where they were set."""
    rate, share = row.get("change_rate", NATURAL), row.get("corrections_set")
    new = "" if rate == NATURAL else f", {100 * rate:g} % new"
    return new + ("" if share is None else f", {100 * share:g} % corrected")
