"""Sync modes over geometries of a few calibrated heads."""

from __future__ import annotations

from typing import Any

import torch
from support.toy_model import calibration

from kvchat.config.modes import parse
from kvchat.kv.geometry import Geometry
from kvchat.kv.modes import build
from kvchat.kv.modes.base import ModelTraits

FOUR = {"kv_heads": 4, "group": 2, "page": 8}  # of a toy model


def mode_of(kv_heads: int = 4, *, calibrated: bool = True, **params: Any) -> Any:
    """The mode, not entered."""
    geometry = Geometry(3, 2 * kv_heads, kv_heads, 64, 64, torch.float32)
    traits = ModelTraits(8192, (None,) * 3, None, calibration(geometry) if calibrated else None)
    return build(parse("sync", params), geometry, traits)
