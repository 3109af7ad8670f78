"""Rounds in which every variant decodes the same tokens after one context, quiet and beside busy processes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch

from kvchat.bench import other_load
from kvchat.bench.frame import Row
from kvchat.bench.mode_run import ModeRun, spills
from kvchat.bench.rows import NATURAL
from kvchat.bench.timing import Timing, Variant
from kvchat.config.profiles import Measured
from kvchat.errors import KvchatError
from kvchat.models.quantize.rows import LOOK_S

SETTLED_S = 5 * LOOK_S
Times = dict[Variant, list[Timing]]


class Rounds:
    """Measures ``variants`` in turns, so that a ratio is of one round's medians.

    With ``load`` each has a second turn in a round, beside so many busy processes. ``floor`` in ms and the rates
    ``measured`` of the device belong to the rows.
    """

    def __init__(
        self,
        variants: Sequence[Variant],
        rounds: int,
        load: int,
        floor: float | None,
        measured: Measured,
        device: torch.device,
    ) -> None:
        self.variants = variants
        self.rounds = rounds
        self.load = load
        self.floor = floor
        self.measured = measured
        self.device = device
        self.times: Times = {variant: [] for variant in variants}
        self.beside: Times = {variant: [] for variant in variants}
        self.others: dict[Variant, list[float]] = {variant: [] for variant in variants}
        self.failed: dict[Variant, str] = {}

    def rows(self, tokens: Sequence[int]) -> list[Row]:
        """Measure all rounds; a row for each variant."""
        for number in range(self.rounds):
            if self.load and number:
                self._settle(tokens)
            for variant in self.variants:
                before = other_load.sample()
                self._measure(variant, tokens, self.times)
                self.others[variant] += other_load.share(before, other_load.sample())
            if self.load:
                with other_load.busy(self.load):
                    self._settle(tokens)
                    for variant in self.variants:
                        self._measure(variant, tokens, self.beside)
        rows = [self._row(variant) for variant in self.variants]
        for variant in self.variants:
            variant.close()
        self._release()
        return rows

    def _measure(self, variant: Variant, tokens: Sequence[int], times: Times) -> None:
        """Measure a turn; a variant that fails is left out of later ones."""
        if variant in self.failed:
            return
        try:
            times[variant].append(variant.measure(tokens))
        except Exception as error:  # noqa: BLE001  # a compiler, a driver, a cache: anything may fail in its own way
            reason = str(error) if isinstance(error, KvchatError) else f"{type(error).__name__}: {error}"
            self.failed[variant] = reason.strip().splitlines()[0][:300]
        if variant in self.failed:  # not before the error is gone: its frames hold tensors
            variant.close()
            self._release()

    def _settle(self, tokens: Sequence[int]) -> None:
        """Let the modes, which share a runner, see what else runs now: they take the threads that it leaves."""
        shared = next((each for each in self.variants if isinstance(each, ModeRun) and each not in self.failed), None)
        until = time.monotonic() + SETTLED_S
        while shared is not None and shared not in self.failed and time.monotonic() < until:
            self._measure(shared, tokens, {shared: []})

    def _release(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    # ---- a row -----------------------------------------------------------------------------------

    def _row(self, variant: Variant) -> Row:
        row: Row = {"variant": variant.name}
        if isinstance(variant, ModeRun):
            row["change_rate"] = NATURAL if variant.change_rate is None else variant.change_rate
            if variant.corrections is not None:
                row["corrections_set"] = variant.corrections
        if variant in self.failed:
            return row | {"failed": self.failed[variant]}
        ms = statistics.median(timing.ms for timing in self.times[variant])
        row |= {
            "ms": ms,
            "wall_ms": statistics.median(timing.wall_ms for timing in self.times[variant]),
            "ms_spread": [pick(timing.ms for timing in self.times[variant]) for pick in (min, max)],
            "tokens_per_s": 1000 / ms,
            "times_floor": ms / self.floor if self.floor else None,
            "times_as_fast": self._ratios(variant),
            "others": statistics.median(self.others[variant]) if self.others[variant] else None,
        }
        recall = self._recall(variant) if isinstance(variant, ModeRun) else {}
        return row | self._kept(variant) | variant.figures | recall

    def _ratios(self, variant: Variant) -> dict[str, float]:
        """Times as fast as each baseline, the median of the rounds."""
        others = [c for c in self.variants if not isinstance(c, ModeRun) and c not in self.failed]
        return {
            other.name: statistics.median(
                theirs.ms / ours.ms for theirs, ours in zip(self.times[other], self.times[variant], strict=True)
            )
            for other in others
        }

    def _kept(self, variant: Variant) -> Row:
        """The speed kept beside the busy processes; by wall clock, since a median step may never be interrupted."""
        if not self.load:
            return {}
        pairs = list(zip(self.times[variant], self.beside[variant], strict=True))
        return {
            "wall_ms_beside": statistics.median(beside.wall_ms for _, beside in pairs),
            "kept": statistics.median(quiet.wall_ms / beside.wall_ms for quiet, beside in pairs),
        }

    def _recall(self, variant: ModeRun) -> Row:
        """Recall per step in ms: the time the link needs, its exposed and its hidden part.

        Of what full mode reads over the link ``link_ms``, the time of one large copy: no step is faster.
        """
        if spills(variant.chosen):
            rate = self.measured.to_device
            return {"link_ms": variant.figures["moved_bytes"] / rate / 1e6 if rate else None}
        link = self.measured.gather
        link_ms = variant.figures["moved_bytes"] / link / 1e6 if link else None
        if variant.change_rate == 0:
            return {"recall_ms": link_ms, "exposed_ms": None, "hidden_ms": None}
        still = next(
            (c for c in self.times if isinstance(c, ModeRun) and c.name == variant.name and c.change_rate == 0), None
        )
        if still is None or still in self.failed or link_ms is None:
            return {"recall_ms": link_ms, "exposed_ms": None, "hidden_ms": None}
        pairs = zip(self.times[variant], self.times[still], strict=True)
        exposed = statistics.median(moving.ms - resting.ms for moving, resting in pairs)
        return {"recall_ms": link_ms, "exposed_ms": exposed, "hidden_ms": max(0.0, link_ms - max(0.0, exposed))}
