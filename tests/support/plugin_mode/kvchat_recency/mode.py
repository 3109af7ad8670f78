"""recency: attend to the first ``sink`` and the last ``keep`` tokens, all at their true positions.

Shapes: one table ``[1, 1, sink + keep]`` for all layers and heads. Costs: nothing is recalled while decoding.
"""

from __future__ import annotations

from kvchat.kv.geometry import Geometry
from kvchat.kv.memory.device_slots import Layout
from kvchat.kv.modes.base import Mode, ModelTraits, ModeReport, Plan, Step, TokenState
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

    def plan(self, capacity: int) -> Plan:
        return Plan([Layout(0, self.geometry.layers, min(self.sink, capacity), min(self.window, capacity))])

    def prepare_step(self) -> Step:
        return Step(exact=self.state.total < self.sink + self.window)

    def report(self) -> ModeReport:
        read = min(self.state.total, self.sink + self.window)
        return ModeReport(self.parameters.model_dump(), {"read": read}, TokenState.UNREACHABLE)
