"""Recall of facts in long texts, mode against mode: tasks by lengths, depths and budgets, with Wilson intervals.

The prompt of a case is read once, exactly; every variant answers greedily from it, so that variants differ only in the
tokens that their decode steps read. What full attention cannot answer is beyond the model, not lost by a mode: full is
always among the variants.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvchat.bench.frame import (
    Cell,
    Experiment,
    Frame,
    ModelChoice,
    Result,
    Row,
    enter,
    mean,
    methods,
    model_identity,
    wilson,
)
from kvchat.bench.recall_tasks import NAMES, TASKS, WITHOUT_DEPTH, Case, case
from kvchat.bench.timing import fingerprint
from kvchat.bench.walk import answered
from kvchat.engine.session import Session
from kvchat.errors import UsageError, did_you_mean

FULL = "full"
STANDARD = (FULL, "streaming", "speculative", "freeze", "sync")
ANSWER_TOKENS = 48


@dataclass(frozen=True)
class Settings:
    """The measurement: ``cases`` of each task at each of ``lengths`` in tokens and ``depths`` from 0 to 1.

    ``keys`` is how many facts are told where several are.
    """

    modes: tuple[str, ...]
    tasks: tuple[str, ...] = ("passkey", "keys", "chain", "name")
    lengths: tuple[int, ...] = (1000, 3000)
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    cases: int = 4
    keys: int = 4
    seed: int = 0


def run(settings: Settings, choice: ModelChoice = ModelChoice(), frame: Frame | None = None) -> Result:
    """Measure and return plain data, ready for JSON: a row for each case and variant.

    ``summary`` has a row for each task, length, depth and variant.

    Raises:
        UsageError: an unknown task, or a depth or number of keys out of range; KvchatError: the model cannot be
            loaded, or all modes refuse.
    """
    _check(settings)
    frame, variants = frame or Frame(), tuple(dict.fromkeys((FULL, *settings.modes)))
    found = methods(variants)
    session = choice.open(frame.report)
    experiment = Experiment(
        "recall",
        "facts found in a long text; right is every part of the answer",
        asdict(settings),
        found,
        model_identity(session.model),
        fingerprint(session.model.device),
    )
    drawn = _Drawn(settings, session.model.tokenizer)
    cells = [{**place, "variant": variant} for place in _places(settings) for variant in variants]
    result = frame.measure(experiment, cells, lambda cell: [_answer(session, drawn.case(cell), cell["variant"])], _line)
    return frame.finish(result, _summary(result["rows"]))


def _check(settings: Settings) -> None:
    for task in settings.tasks:
        if task not in TASKS:
            raise UsageError(f'There is no task "{task}".', did_you_mean(task, TASKS))
    for depth in settings.depths:
        if not 0 <= depth <= 1:
            raise UsageError(f"The depth {depth:g} is refused.", hint="0 is the beginning of the text, 1 its end.")
    if not 2 <= settings.keys <= len(NAMES):
        raise UsageError(f"{settings.keys} keys are refused.", hint=f"Give 2 to {len(NAMES)}.")


def _places(settings: Settings) -> list[Row]:
    """Task, length, depth and number of every case; the same prompt's variants follow each other."""
    return [
        {"task": task, "tokens": tokens, "depth": depth, "case": number}
        for task in settings.tasks
        for tokens in settings.lengths
        for depth in ((0.0,) if task in WITHOUT_DEPTH else settings.depths)
        for number in range(settings.cases)
    ]


class _Drawn:
    """The cases; the last one is kept for the variants that follow."""

    def __init__(self, settings: Settings, tokenizer: Any) -> None:
        self._settings = settings
        self._tokenizer = tokenizer
        self._last: tuple[tuple[Any, ...], Case] | None = None

    def case(self, cell: Cell) -> Case:
        place = cell["task"], cell["tokens"], cell["depth"], cell["case"]
        if self._last is None or self._last[0] != place:
            task, tokens, depth, number = place
            seed = f"{self._settings.seed}/{number}"
            self._last = place, case(task, tokens, depth, self._settings.keys, seed, self._tokenizer)
        return self._last[1]


def _answer(session: Session, asked: Case, variant: str) -> Row:
    enter(session, variant)
    finished = answered(session, asked.turns, ANSWER_TOKENS)
    hits = sum(part in finished.text for part in asked.answers)
    return {
        "right": hits == len(asked.answers),
        "found": hits / len(asked.answers),
        "prompt_tokens": finished.stats.prompt_tokens,
        "read_tokens": finished.stats.active_tokens,
        "coverage": finished.stats.coverage,
        "text": finished.text,
    }


def _summary(rows: Sequence[Row]) -> list[Row]:
    places = dict.fromkeys((row["task"], row["tokens"], row["depth"], row["variant"]) for row in rows)
    return [_of_place(rows, *place) for place in places]


def _of_place(rows: Sequence[Row], task: str, tokens: int, depth: float, variant: str) -> Row:
    place = {"task": task, "tokens": tokens, "depth": depth, "variant": variant}
    mine = [row for row in rows if place.items() <= row.items() and "refused" not in row]
    right = sum(row["right"] for row in mine)
    return place | {
        "cases": len(mine),
        "right": right,
        "interval": wilson(right, len(mine)),
        "found": mean(row["found"] for row in mine),
        "read_tokens": mean(row["read_tokens"] or 0 for row in mine),
        "coverage": mean(row["coverage"] for row in mine if row.get("coverage") is not None),
    }


def _line(row: Row) -> str:
    place = f"{row['task']:<8} {row['tokens']:>6,} tokens, depth {row['depth']:.2f}"
    return f"{place}  {row['variant']:<40} {'right' if row['right'] else 'wrong: ' + row['text']}"
