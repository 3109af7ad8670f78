"""Details asked for only while they are shown: the tokens each layer and KV head reads, and the times of recall."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from kvchat.protocol.figures import Count, Several

# Milliseconds that separate the bins of the recall histogram; the first bin is below the first of them.
RECALL_EDGES_MS = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0)
MAX_LAYERS = MAX_HEADS = 512

Heads = Annotated[Several[Count], Field(max_length=MAX_HEADS)]
Milliseconds = Annotated[float, Field(ge=0)]


@dataclass(frozen=True)
class Watch:
    """Send ``Details`` at once and beside the snapshots from now on, or no more."""

    details: bool


@dataclass(frozen=True)
class RecallBin:
    """``steps`` took this long to recall: milliseconds, all together, that work hid and that the model waited."""

    steps: Count = 0
    hidden_ms: Milliseconds = 0.0
    exposed_ms: Milliseconds = 0.0


@dataclass(frozen=True)
class Details:
    """Tokens by layer and KV head, of ``total`` that are stored, and the recall of the last 256 steps by its time.

    ``read`` are those that the last token's attention read, ``held`` those in slots. ``recall`` has a bin more than
    ``RECALL_EDGES_MS``, or none where nothing was recalled. ``pcie_*`` are bytes per second by NVML, None without it.
    """

    total: Count
    read: Annotated[Several[Heads], Field(max_length=MAX_LAYERS)] = ()
    held: Annotated[Several[Heads], Field(max_length=MAX_LAYERS)] = ()
    recall: Annotated[Several[RecallBin], Field(max_length=len(RECALL_EDGES_MS) + 1)] = ()
    pcie_to_device: Count | None = None
    pcie_to_host: Count | None = None
