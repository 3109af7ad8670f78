"""The time of a decoded token by the length of the conversation before it, mode by mode.

``decode`` measures one context after the other, and what a shared machine does in the minutes between them is more than
what a mode that reads a budget takes more. Here the model stands after all contexts at once; in each round a mode has
its turn after each of them, and a ratio is of one round's medians.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from functools import cached_property

from kvchat.bench.decoding import Decoding, ModeRun
from kvchat.bench.frame import (
    Cell,
    Experiment,
    Frame,
    ModelChoice,
    Report,
    Result,
    Row,
    methods,
    model_identity,
    parsed,
)
from kvchat.bench.timing import current, fingerprint
from kvchat.engine.runner import ModelRunner
from kvchat.errors import UsageError
from kvchat.models.load import LoadedModel


@dataclass(frozen=True)
class Settings(Decoding):
    """The measurement: ratios are to the shortest of ``contexts``."""

    contexts: tuple[int, ...] = (8192, 16256)
    rounds: int = 9


def run(settings: Settings = Settings(), choice: ModelChoice = ModelChoice(), frame: Frame | None = None) -> Result:
    """Measure and return plain data, ready for JSON: a row for each variant and context.

    Raises:
        KvchatError: the model or a mode is refused, or fewer than two contexts are given.
    """
    frame, found = frame or Frame(), methods(settings.modes, settings.budget)
    _refuse_one(settings)
    model = settings.open(choice, frame.report)
    experiment = Experiment(
        "lengths",
        "median ms per decoded token, and times that after the shortest context",
        asdict(settings),
        found,
        model_identity(model),
        fingerprint(model.device),
    )
    with current(model.device):
        places = Places(settings, model, frame.report)
        cells = [{"variant": text} for text in settings.modes]
        result = frame.measure(experiment, cells, places.rows, _line)
    return frame.finish(result, result["rows"])


def _refuse_one(settings: Settings) -> None:
    if len(set(settings.contexts)) < 2:
        raise UsageError(
            "Lengths are compared with one another.",
            f"{len(set(settings.contexts))} was given: {', '.join(f'{context:,}' for context in settings.contexts)}.",
            "Give --context twice or more.",
        )


class Places:
    """A model after each of the contexts, with K/V of its own at each; they are stored before the first measurement."""

    def __init__(self, settings: Settings, model: LoadedModel, report: Report) -> None:
        self._settings = settings
        self._model = model
        self._report = report

    @cached_property
    def _runs(self) -> dict[int, dict[str, ModeRun]]:
        """The variants by their names, after each context, the shortest first."""
        return {context: self._after(context) for context in sorted(set(self._settings.contexts))}

    @cached_property
    def _decoded(self) -> dict[int, list[int]]:
        return {context: self._settings.decoded(self._model, context) for context in self._runs}

    def _after(self, context: int) -> dict[str, ModeRun]:
        settings, model = self._settings, self._model
        runner = ModelRunner(model, settings.smallest(model, 0))
        heads = settings.calibration(model, settings.store(runner, context))
        self._report(f"{context:,} tokens stored")
        return {text: ModeRun(runner, text, parsed(text, settings.budget), None, heads) for text in settings.modes}

    def rows(self, cell: Cell) -> list[Row]:
        """Measure one variant after all contexts; a row for each.

        Raises:
            KvchatError: the mode cannot be entered.
        """
        runs = {context: variants[cell["variant"]] for context, variants in self._runs.items()}
        rounds = [
            {context: run.measure(self._decoded[context]).ms for context, run in runs.items()}
            for _ in range(self._settings.rounds)
        ]
        shortest = min(runs)
        return [
            {
                "context": context,
                "ms": statistics.median(times[context] for times in rounds),
                "ms_spread": [pick(times[context] for times in rounds) for pick in (min, max)],
                "times_shortest": statistics.median(times[context] / times[shortest] for times in rounds),
                **run.figures,
            }
            for context, run in runs.items()
        ]


def _line(row: Row) -> str:
    start = f"{row['variant']:<32} {row['context']:>7,} tokens {row['ms']:8.2f} ms"
    return start if row["times_shortest"] == 1 else f"{start}  {row['times_shortest']:5.2f} x the shortest"
