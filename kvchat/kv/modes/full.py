"""full: everything resident, everything attended. The reference of all other modes.

Slot i holds position i in every layer and head; one table for all. Costs ``Geometry.token_bytes`` of device memory a
token; nothing moves after the mode was entered.
"""

from __future__ import annotations

from kvchat.kv.memory.device_slots import Layout
from kvchat.kv.modes.base import Mode


class Full(Mode):
    """All layers: a window as large as the store."""

    name = "full"

    def layouts(self, capacity: int) -> list[Layout]:
        return [Layout(0, self.geometry.layers, sink=0, window=capacity)]
