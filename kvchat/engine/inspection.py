"""The part of ``Session`` that only looks: its model and mode, the figures of screens, what is stored and read."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from kvchat.engine import calibration
from kvchat.engine.figures.metrics import MetricsCollector
from kvchat.engine.generate.answer import AnswerLoop
from kvchat.engine.generate.mode_switcher import ModeSwitcher
from kvchat.engine.generate.runner import ModelRunner
from kvchat.engine.guards import whole_number
from kvchat.engine.keep.keeper import Keeper
from kvchat.errors import UsageError
from kvchat.kv.inspect import attended
from kvchat.kv.manager import KVManager
from kvchat.kv.memory_errors import explained
from kvchat.models.load import LoadedModel
from kvchat.models.quantize import int4_rows
from kvchat.protocol.details import Details
from kvchat.protocol.figures import Price, Snapshot
from kvchat.protocol.messages import Loaded

LOOKING = "looking at what is stored"


class Inspection:
    """A session tells of itself; each call computes it."""

    _model: LoadedModel
    _kv: KVManager
    _loop: AnswerLoop
    _runner: ModelRunner
    _switcher: ModeSwitcher
    _metrics: MetricsCollector
    _keeper: Keeper

    @property
    def info(self) -> Loaded:
        """The model and the current mode."""
        model, kv, switcher = self._model, self._kv, self._switcher
        return Loaded(
            model=model.name,
            architecture=type(model.model).__name__,
            parameters=int4_rows.unpacked_elements(model.model),
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
                *self._loop.encoder.notes,
                *map(str, switcher.calibration_problems),
                *calibration.notes(model, switcher.calibration),
            ),
            weights=model.weights,
            fast=model.fused,
            temperature=model.advised.temperature or 0.0,
            template_variables=self._loop.encoder.variables,
        )

    def snapshot(self) -> Snapshot:
        """The present figures of the KV manager; cheap enough for ten calls a second.

        Raises:
            DoesNotFitError: memory ran out.
        """
        with explained(self._kv, LOOKING):
            snapshot = self._metrics.snapshot(self._loop.stored.reduced_tokens)
            badges = *snapshot.badges, *self._runner.badges
            prices, parked = self._switcher.recent_prices(), self._keeper.parked_bytes
        return replace(snapshot, prices=prices, badges=badges, kv_parked_bytes=parked)

    def details(self) -> Details:
        """The same by layer and KV head, and recall by its time; cheap enough for two a second.

        Raises:
            DoesNotFitError: memory ran out.
        """
        with explained(self._kv, LOOKING):
            return self._metrics.details()

    def attended(self, layer: int) -> Tensor:
        """The stored tokens that the last token's attention read in ``layer``, as a mask: bool ``[kv_head, total]``.

        Raises:
            UsageError: the model has no such layer; DoesNotFitError: memory ran out.
        """
        if not 0 <= whole_number(layer, "A layer") < self._model.layers:
            raise UsageError(
                f"There is no layer {layer}.",
                f"The model has layers 0 to {self._model.layers - 1}.",
                "Give one of these.",
            )
        with explained(self._kv, LOOKING):
            return attended(self._kv.state, layer)

    def prices(self) -> tuple[Price, ...]:
        """The cost of switching to each of the other modes now.

        Raises:
            DoesNotFitError: memory ran out.
        """
        with explained(self._kv, LOOKING):
            return self._switcher.prices()

    def text(self, start: int, end: int) -> str:
        """The text of the stored tokens ``start`` to ``end``, control tokens included."""
        ids = self._loop.stored.ids[whole_number(start, "A position") : whole_number(end, "A position")]
        text: str = self._model.tokenizer.decode(ids)
        return text
