"""The figures of a session for screens, computed at each call."""

from __future__ import annotations

from dataclasses import replace

from kvchat.engine.generate.answer import AnswerLoop
from kvchat.engine.generate.runner import ModelRunner
from kvchat.engine.keep.keeper import Keeper
from kvchat.engine.metrics import MetricsCollector
from kvchat.engine.mode_switcher import ModeSwitcher
from kvchat.protocol.details import Details
from kvchat.protocol.figures import Snapshot


class Reports:
    """The part of ``Session`` that tells what the KV manager holds and did."""

    _loop: AnswerLoop
    _runner: ModelRunner
    _switcher: ModeSwitcher
    _metrics: MetricsCollector
    _keeper: Keeper

    def snapshot(self) -> Snapshot:
        """The present figures of the KV manager; cheap enough for ten calls a second."""
        snapshot = self._metrics.snapshot(self._loop.stored.reduced_tokens)
        badges = *snapshot.badges, *self._runner.badges
        prices, parked = self._switcher.recent_prices(), self._keeper.parked_bytes
        return replace(snapshot, prices=prices, badges=badges, kv_parked_bytes=parked)

    def details(self) -> Details:
        """The same by layer and KV head, and recall by its time; cheap enough for two a second."""
        return self._metrics.details()
