"""The decode benchmark as a picture: SVG by hand, so that no library is needed to draw bars."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any
from xml.sax.saxutils import escape

from kvchat.bench.decode import named

LABEL, BARS, RIGHT = 230, 430, 200  # widths: names left of the bars, the longest bar, figures right of it
BAR, GAP, HEAD = 20, 6, 34
OWN, PEER, EXPOSED, INK, FAINT = "#2b7bba", "#a9b4c0", "#e08a2e", "#1f2933", "#6b7785"

Row = Mapping[str, Any]


def decode(result: Mapping[str, Any]) -> str:
    """ms/token, a bar for each contender and a group for each context; the dashed line is the floor.

    The end of a bar that is drawn orange is exposed recall. Contenders that failed have their reason instead.
    """
    groups = [(context, list(rows)) for context, rows in groupby(result["rows"], key=lambda row: row["context"])]
    longest = max([row["ms"] for row in result["rows"] if "ms" in row] + [result["floor_ms"] or 0.0, 1e-9])
    width = LABEL + BARS + RIGHT
    height = 64 + sum(HEAD + len(rows) * (BAR + GAP) for _, rows in groups) + 20
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        _text(20, 26, f"{result['settings']['model']}: ms per decoded token", 15, INK),
        _text(20, 46, _environment(result), 11, FAINT),
    ]
    top = 64
    for context, rows in groups:
        parts += _group(context, rows, top, BARS / longest, result["floor_ms"])
        top += HEAD + len(rows) * (BAR + GAP)
    return "\n".join([*parts, "</svg>\n"])


def _group(context: int, rows: Sequence[Row], top: int, scale: float, floor: float | None) -> Iterator[str]:
    """One context; ``scale`` is pixels per ms."""
    yield _text(20, top + 20, f"{context:,} tokens", 13, INK)
    for i, row in enumerate(rows):
        yield from _bar(row, top + HEAD + i * (BAR + GAP), scale)
    if floor:
        x, bottom = LABEL + floor * scale, top + HEAD + len(rows) * (BAR + GAP) - GAP + 2
        yield f'<path d="M{x:.1f} {top + HEAD - 4} V{bottom}" stroke="{INK}" stroke-dasharray="4 3"/>'
        yield _text(x + 4, top + 20, f"floor {floor:.3g} ms", 10, FAINT)


def _bar(row: Row, top: float, scale: float) -> Iterator[str]:
    base = top + BAR - 6
    yield _text(LABEL - 8, base, named(row), 12, INK, "end")
    if "failed" in row:
        reason = row["failed"] if len(row["failed"]) <= 90 else f"{row['failed'][:89]}…"
        yield _text(LABEL + 4, base, reason, 11, FAINT)
        return
    length, color = row["ms"] * scale, OWN if "change_rate" in row else PEER
    exposed = min(length, max(0.0, row.get("exposed_ms") or 0.0) * scale)
    yield f'<rect x="{LABEL}" y="{top}" width="{length:.1f}" height="{BAR}" rx="2" fill="{color}"/>'
    if exposed >= 0.5:
        x = LABEL + length - exposed
        yield f'<rect x="{x:.1f}" y="{top}" width="{exposed:.1f}" height="{BAR}" fill="{EXPOSED}"/>'
    yield _text(LABEL + length + 6, base, f"{row['ms']:.3g} ms · {row['tokens_per_s']:.0f} tok/s", 11, INK)


def _environment(result: Mapping[str, Any]) -> str:
    e = result["environment"]
    device = e["gpu"] or f"{e['processor']}, {e['threads']} threads"
    return f"{device}; {result['settings']['dtype']}; torch {e['torch']}, transformers {e['transformers']}"


def _text(x: float, y: float, text: str, size: int, color: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y}" font-size="{size}" fill="{color}" text-anchor="{anchor}">{escape(text)}</text>'
