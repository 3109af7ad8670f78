"""recency: attend to the first ``sink`` and the last ``keep`` tokens, all at their true positions.

Shapes: one table ``[1, 1, sink + keep]`` for all layers and heads. Costs: nothing is recalled while decoding.
"""

from __future__ import annotations

from typing import Any

from kvchat.kv.geometry import Geometry
from kvchat.kv.memory.device_slots import Layout
from kvchat.kv.modes.base import Mode, ModelTraits
from kvchat_recency import RecencyParameters


class Recency(Mode):
    """The base class keeps sinks and window; tokens outside them are out of reach."""

    name = "recency"
    parameters: RecencyParameters

    def __init__(
        self, parameters: RecencyParameters, geometry: Geometry, traits: ModelTraits, preamble: int = 0
    ) -> None:
        super().__init__(parameters, geometry, traits, preamble)
        self.sink = parameters.sink
        self.window = parameters.keep

    def layouts(self, capacity: int) -> list[Layout]:
        return [Layout(0, self.geometry.layers, min(self.sink, capacity), min(self.window, capacity))]

    def num_reachable(self) -> int:
        return min(self.store.total, self.sink + self.window)

    def is_exact(self, tokens: int) -> bool:
        return tokens <= self.sink + self.window

    def reach(self) -> str:
        return "X"

    def stats(self) -> dict[str, Any]:
        return {"attended": self.num_reachable()}
