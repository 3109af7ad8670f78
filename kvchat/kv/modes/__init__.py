"""The modes by name. A new one is a file here, a class in ``kvchat.config.modes`` and a row in the tests' tables."""

from __future__ import annotations

from typing import Any

from kvchat.config.modes import ModeParameters
from kvchat.kv.geometry import Geometry
from kvchat.kv.modes.base import Mode, ModelTraits
from kvchat.kv.modes.freeze import Freeze
from kvchat.kv.modes.full import Full
from kvchat.kv.modes.speculative import Speculative
from kvchat.kv.modes.streaming import Streaming
from kvchat.kv.modes.sync import Sync

MODES: dict[str, Any] = {mode.name: mode for mode in (Full, Freeze, Streaming, Sync, Speculative)}


def build(parameters: ModeParameters, geometry: Geometry, traits: ModelTraits, preamble: int = 0) -> Mode:
    """The mode these parameters belong to.

    Raises:
        UsageError: parameters contradict each other.
        DoesNotFitError: the model cannot run in this mode.
    """
    mode: Mode = MODES[parameters.name](parameters, geometry, traits, preamble)
    return mode
