"""Describes a session's model and mode to the application."""

from __future__ import annotations

from kvchat.engine import calibration
from kvchat.engine.mode_switcher import ModeSwitcher
from kvchat.engine.model.load import LoadedModel
from kvchat.kv.manager import KVManager
from kvchat.protocol.messages import Loaded


def describe(model: LoadedModel, kv: KVManager, switcher: ModeSwitcher) -> Loaded:
    """The model and the current mode."""
    return Loaded(
        model=model.name,
        architecture=type(model.model).__name__,
        parameters=model.model.num_parameters(),
        device=str(model.device),
        dtype=str(model.dtype).removeprefix("torch."),
        context=model.context,
        layers=model.layers,
        kv_heads=model.kv_heads,
        page=kv.state.geometry.page,
        kv_bytes_per_token=kv.state.geometry.token_bytes,
        mode=kv.mode.name,
        params=kv.mode.report().params,
        notes=(
            *model.notes,
            *map(str, switcher.calibration_problems),
            *calibration.notes(model, switcher.calibration),
        ),
        weights=model.weights,
        fast=model.fused,
        temperature=model.temperature,
    )
