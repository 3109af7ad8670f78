"""The figures that the panels and the details of the screen show, as lines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from kvchat.protocol.figures import Snapshot
from kvchat.protocol.messages import Details
from kvchat.tui.gpu_history import Moment
from kvchat.tui.panel_rows import (
    FETCH_TIMES,
    HELD_BY_HEAD,
    READ_BY_HEAD,
    Rows,
    context_rows,
    extra_rows,
    memory_rows,
    mode_rows,
    recall_rows,
)
from kvchat.tui.widgets.recall_histogram import label, occupied
from kvchat.units import count, figure, size


def figure_lines(s: Snapshot, details: Details, moments: Sequence[Moment], link_bytes_per_s: float | None) -> list[str]:
    """All figures of the panels, a line for each row, then the details by layer, by time and of the GPU."""
    blocks = {
        "this answer": context_rows(s),
        f"{s.mode} mode": [*mode_rows(s), *extra_rows(s.extras)],
        "fetching": recall_rows(s, link_bytes_per_s),
        "memory": memory_rows(s),
    }
    return [
        *(line for title, rows in blocks.items() for line in _block(title, rows)),
        *_block(f"{READ_BY_HEAD}, of {count(details.total)}", _by_layer(details.read)),
        *_block(f"{HELD_BY_HEAD}, of {count(details.total)}", _by_layer(details.held)),
        *_block(FETCH_TIMES, _times(details)),
        *_block("GPU in the last minutes", _course(moments, details)),
    ]


def _block(title: str, rows: Rows) -> Iterator[str]:
    if rows:
        yield f"{title}:"
        yield from (f"  {label} {value}".rstrip() for label, value in rows)


def _by_layer(counts: Sequence[Sequence[int]]) -> Rows:
    """The tokens of each KV head; one number where all heads have as many."""
    return [
        (f"layer {layer}", f"{count(heads[0])} in each head" if len(set(heads)) == 1 else ", ".join(map(count, heads)))
        for layer, heads in enumerate(counts)
        if heads
    ]


def _times(details: Details) -> Rows:
    return [
        (label(place).replace("–", " to "), f"{count(details.recall[place].steps)} tokens")
        for place in occupied(details.recall)
    ]


def _course(moments: Iterable[Moment], details: Details) -> Rows:
    """From the least to the most; the traffic as it is now."""
    readings = list(moments)
    load = [one.utilization for one in readings if one.utilization is not None]
    power = [one.power for one in readings if one.power is not None]
    rows = [
        (name, f"{figure(min(values))} to {figure(max(values), unit)}")
        for name, values, unit in (("load", load, "%"), ("power", power, "W"))
        if values
    ]
    links = {"PCIe to the device": details.pcie_to_device, "PCIe to the host": details.pcie_to_host}
    return [*rows, *((name, f"{size(rate)}/s") for name, rate in links.items() if rate is not None)]
