"""A mode of kvchat as a variant: its times, bytes on the device and bytes moved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvchat.bench.fixed_change_rate import fixed_change_rate
from kvchat.bench.fixed_corrections import FixedCorrections
from kvchat.bench.timing import Timing, time_steps
from kvchat.config.modes import FullParameters, ModeParameters, SpeculativeParameters
from kvchat.engine.runner import ModelRunner, geometry_of, traits_of
from kvchat.errors import UsageError
from kvchat.kv.modes import build
from kvchat.kv.modes.base import Mode
from kvchat.kv.modes.sync_heads import Calibration


def spills(chosen: ModeParameters) -> bool:
    """The mode is to read over the link what is not resident."""
    return isinstance(chosen, FullParameters) and chosen.resident is not None


class ModeRun:
    """A mode of kvchat with the parameters ``chosen``.

    ``change_rate`` None leaves the selection to the mode, ``corrections`` None who is corrected.
    """

    def __init__(
        self,
        runner: ModelRunner,
        name: str,
        chosen: ModeParameters,
        change_rate: float | None,
        calibration: Calibration | None,
        corrections: float | None = None,
    ) -> None:
        self.name = name
        self.change_rate = change_rate
        self.corrections = corrections
        self._figures: dict[str, Any] = {}
        self._runner = runner
        self.chosen = chosen
        self._context = runner.kv.total
        self._traits = traits_of(runner.model, calibration)

    def measure(self, tokens: Sequence[int]) -> Timing:
        """Decode ``tokens`` in the mode, as ``Variant.measure``; also record bytes on the device and bytes moved.

        Raises:
            KvchatError: the mode cannot be entered.
        """
        kv = self._runner.kv
        with torch.inference_mode():
            kv.truncate(self._context)
            kv.switch(self._mode())
        if kv.mode.needs_calibration:
            raise UsageError(
                "The model's heads are not calibrated.",
                "The context is too short to calibrate them on.",
                "Take a longer context, or run `kvchat calibrate` first.",
            )
        state, geometry = kv.state, kv.state.geometry
        held, predicted = kv.device_bytes, kv.mode.plan(geometry.grown(kv.total + 1)).device_bytes(geometry)
        before = state.transfer.totals
        timing = time_steps(self._runner.step, tokens, state.device)
        moved, wanted, corrected, moved_bytes = (b - a for a, b in zip(before, state.transfer.totals, strict=True))
        self._figures = {
            "kv_device_bytes": held,
            "kv_predicted_bytes": predicted,
            "kv_host_bytes": state.host.nbytes,
            "moved_bytes": moved_bytes / len(tokens),
            "changed": moved / wanted if wanted else None,
            "corrections": corrected / len(tokens),
            "corrected": self._corrected_share(corrected / len(tokens)),
            "not_captured": self._runner.graphs.refusal,
        }
        return timing

    @property
    def figures(self) -> dict[str, Any]:
        """Bytes on the device, bytes moved per token, share of selected K/V that was new, corrections per token."""
        return self._figures

    def _corrected_share(self, per_token: float) -> float | None:
        """Of the KV heads of layers that retrieve; None in other modes."""
        if not isinstance(self.chosen, SpeculativeParameters):
            return None
        g = self._runner.kv.state.geometry
        return per_token / ((g.layers - self.chosen.first_full) * g.kv_heads)

    def close(self) -> None:
        """Do nothing: all memory belongs to the KV manager."""

    def _mode(self) -> Mode:
        geometry = geometry_of(self._runner.model)
        if isinstance(self.chosen, SpeculativeParameters):
            if self.change_rate is not None:
                return fixed_change_rate(self.change_rate, self.chosen, geometry, self._traits)
            if self.corrections is not None:
                return FixedCorrections(self.corrections, self.chosen, geometry, self._traits)
        return build(self.chosen, geometry, self._traits)
