"""full: everything resident, everything attended. The reference of all other modes.

Slot i holds position i in every layer and head; one table for all. Costs ``Geometry.token_bytes`` of device memory a
token; nothing moves after the mode was entered.
"""

from __future__ import annotations

from kvchat.kv.memory.device_slots import Layout
from kvchat.kv.modes.base import Mode, Plan


class Full(Mode):
    """One window as large as the conversation in all layers."""

    name = "full"

    def plan(self, capacity: int) -> Plan:
        return Plan([Layout(0, self.geometry.layers, sink=0, window=capacity)])
