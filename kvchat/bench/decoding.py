"""Decoding as it is measured: the modes, the model, and the conversation that they decode after."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvchat.bench import model_shapes
from kvchat.bench.corpus import prose
from kvchat.bench.frame import Report
from kvchat.bench.model_choice import ModelChoice
from kvchat.bench.timing import warm_up
from kvchat.bench.variant import parsed
from kvchat.engine import calibration
from kvchat.engine.runner import ModelRunner, geometry_of, traits_of
from kvchat.errors import DoesNotFitError, KvchatError
from kvchat.kv.modes import build
from kvchat.kv.modes.base import Mode
from kvchat.kv.modes.sync_heads import Calibration
from kvchat.models.load import LoadedModel


@dataclass(frozen=True)
class Decoding:
    """Variants that decode after ``contexts``.

    ``modes`` are ``MODE[:KEY=VALUE,...]``, ``budget`` and ``contexts`` in tokens, ``steps`` those that count per round.
    ``shape`` names a model shape with random weights instead of the chosen model; ``prefill`` reads a prompt there
    instead of drawing K/V.
    """

    shape: str = ""
    contexts: tuple[int, ...] = (512, 8192)
    modes: tuple[str, ...] = ("full", "streaming", "speculative", "freeze", "sync")
    budget: int = 512
    steps: int = 64
    rounds: int = 5
    prefill: bool = False

    def open(self, choice: ModelChoice, report: Report) -> LoadedModel:
        """Load the model.

        Raises:
            KvchatError: it is refused, or shorter than the longest context and what is decoded after it.
        """
        model = model_shapes.choose(self.shape, choice, report)
        needed = max(self.contexts) + self.steps + warm_up(model.device)
        if needed > model.context:
            raise DoesNotFitError(
                "The contexts do not fit the model.",
                f"{needed:,} tokens are needed; the model reads {model.context:,}.",
                "Take a smaller --context.",
            )
        return model

    def smallest(self, model: LoadedModel, context: int) -> Mode:
        """Return the mode with the fewest bytes on the device: the context is stored in it.

        Raises:
            KvchatError: the model can run in none of the modes.
        """
        geometry, modes, refused = geometry_of(model), [], None
        for text in self.modes:
            try:
                modes.append(build(parsed(text, self.budget), geometry, traits_of(model)))
            except KvchatError as error:
                refused = error
        if refused is not None and not modes:
            raise refused
        return min(modes, key=lambda mode: mode.plan(geometry.grown(context)).device_bytes(geometry))

    def store(self, runner: ModelRunner, context: int) -> list[int]:
        """Store exactly ``context`` tokens; return their ids."""
        ids = self._ids(runner.model, context)
        with torch.inference_mode():
            runner.kv.truncate(0)
            runner.kv.switch(self.smallest(runner.model, context))
        if self.shape and not self.prefill:
            model_shapes.fill(runner.kv, context)
        else:
            for _ in runner.prefill(ids):
                pass
        return ids

    def decoded(self, model: LoadedModel, context: int) -> list[int]:
        """Return the tokens of a round after ``context`` tokens."""
        return self._ids(model, context + self.steps + warm_up(model.device))[context:]

    def calibration(self, model: LoadedModel, ids: Sequence[int]) -> Calibration | None:
        """Return the calibration that sync mode needs; None without sync mode or for too short a context."""
        if not any(text.partition(":")[0] == "sync" for text in self.modes):
            return None
        if self.shape:
            return model_shapes.calibration(model)
        return calibration.find(model.revision) or calibration.on_prompt(model, list(ids))

    def _ids(self, model: LoadedModel, tokens: int) -> list[int]:
        """The first tokens of the corpus, or drawn for random weights."""
        if self.shape:
            draw = random.Random(0)
            return [draw.randrange(model.vocab) for _ in range(tokens)]
        return prose(model.tokenizer, tokens)
