"""Scores of a data set's questions, mode against mode, full beside them.

The prompt of a row is read once, exactly; every variant answers from it. One that is longer than the model's context is
cut in the middle, as LongBench does it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from kvchat.bench.datasets.long_texts import ENDINGS
from kvchat.bench.datasets.tasks import QUESTIONS, Item
from kvchat.bench.environment import fingerprint
from kvchat.bench.frame import Cell, Frame, Row
from kvchat.bench.identity import Experiment, Result, methods, model_identity
from kvchat.bench.intervals import mean
from kvchat.bench.model_choice import ModelChoice
from kvchat.bench.variant import parsed
from kvchat.bench.walk import Walk
from kvchat.engine.prompt import PromptEncoder, Stored
from kvchat.engine.sampler import Sampler, read
from kvchat.errors import UsageError, did_you_mean
from kvchat.protocol.messages import Sampling, Turn

FULL = "full"


@dataclass(frozen=True)
class Settings:
    """The measurement: at most ``rows`` rows of each task of the data set in ``folder``, ``samples`` answers to each.

    One answer is greedy; several are sampled as reasoning models are, at temperature 0.6 and top-p 0.95. ``tokens``
    limits an answer where the data set's own limit is not wanted.
    """

    name: str
    folder: str
    modes: tuple[str, ...]
    rows: int | None = None
    samples: int = 1
    tokens: int | None = None
    seed: int = 0


def run(settings: Settings, choice: ModelChoice = ModelChoice(), frame: Frame | None = None) -> Result:
    """Measure and return plain data, ready for JSON: a row for each row of the data set, sample and variant.

    ``summary`` has a row for each task and variant, and one for the mean of all tasks.

    Raises:
        UsageError: an unknown data set, or a bad row of it, before anything is measured; KvchatError: the model cannot
            be loaded, or all modes refuse.
    """
    frame, items = frame or Frame(), chosen(settings)
    variants = tuple(dict.fromkeys((FULL, *settings.modes)))
    found = methods(variants)
    model = choice.load(frame.report)
    experiment = Experiment(
        "data",
        f"{settings.name}: mean scores in percent",
        asdict(settings),
        found,
        model_identity(model),
        fingerprint(model.device),
    )
    asker = _Asker(Walk(model), settings)
    cells = [{"task": item.task, "place": item.place, "variant": variant} for item in items for variant in variants]
    by_place = {item.place: item for item in items}
    result = frame.measure(experiment, cells, lambda cell: asker.rows(by_place[cell["place"]], cell), _line)
    return frame.finish(result, _summary(result["rows"], variants))


def chosen(settings: Settings) -> list[Item]:
    """The rows that are measured, all of them read and checked.

    Raises:
        UsageError: an unknown data set, or a bad row.
    """
    if settings.name not in QUESTIONS:
        raise UsageError(
            f'There is no data set "{settings.name}".', did_you_mean(settings.name, (*QUESTIONS, *ENDINGS))
        )
    items = list(QUESTIONS[settings.name](Path(settings.folder)))
    by_task: dict[str, list[Item]] = {}
    for item in items:
        by_task.setdefault(item.task, []).append(item)
    return [item for of_task in by_task.values() for item in of_task[: settings.rows]]


class _Asker:
    """Asks one model every item in every variant."""

    def __init__(self, walk: Walk, settings: Settings) -> None:
        self._walk = walk
        self._settings = settings

    def rows(self, item: Item, cell: Cell) -> list[Row]:
        tokens = min(self._settings.tokens or item.tokens, self._walk.model.context // 2)
        prompt, cut = self._prompt(item, self._walk.model.context - tokens)
        return [
            self._answered(item, cell, prompt, tokens, sample) | {"cut": cut}
            for sample in range(self._settings.samples)
        ]

    def _answered(self, item: Item, cell: Cell, prompt: Sequence[int], tokens: int, sample: int) -> Row:
        walk, model = self._walk, self._walk.model
        sampler = Sampler(self._sampling(sample), model.vocab, model.device)
        logits = walk.begin(prompt, parsed(cell["variant"]), tokens)
        ids, tokens_read = list[int](), list[float]()
        while len(ids) < tokens and (token := read(sampler(logits))) not in model.eos_ids:
            ids.append(token)
            logits = walk.step(token)
            tokens_read.append(walk.tokens_read())
        text = model.tokenizer.decode(ids, skip_special_tokens=True)
        return {
            "sample": sample,
            "score": item.score(text),
            "text": text,
            "prompt_tokens": len(prompt),
            "answer_tokens": len(ids),
            "read_tokens": mean(tokens_read),
        }

    def _sampling(self, sample: int) -> Sampling:
        if self._settings.samples == 1:
            return Sampling(temperature=0)
        return Sampling(temperature=0.6, top_p=0.95, seed=self._settings.seed + sample)

    def _prompt(self, item: Item, room: int) -> tuple[Sequence[int], int]:
        """The prompt's ids, and how many tokens were cut from its middle."""
        tokenizer = self._walk.model.tokenizer
        text, cut = item.prompt, 0
        while True:
            ids = self._encoded(item, text)
            if len(ids) <= room or not text:
                return ids, cut
            of_text = tokenizer.encode(text, add_special_tokens=False)
            kept = max(0, len(of_text) - (len(ids) - room) - 1)
            text = tokenizer.decode(of_text[: kept // 2]) + tokenizer.decode(
                of_text[len(of_text) - (kept - kept // 2) :]
            )
            cut += len(of_text) - kept

    def _encoded(self, item: Item, text: str) -> Sequence[int]:
        tokenizer = self._walk.model.tokenizer
        if item.chat:
            return PromptEncoder(tokenizer).encode((Turn("user", text),), Stored()).ids
        ids: Sequence[int] = tokenizer.encode(text)
        return ids


def _summary(rows: Sequence[Row], variants: Sequence[str]) -> list[Row]:
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    by_task = [_of_task(rows, task, variant) for task in tasks for variant in variants]
    means = [_mean_of_tasks([row for row in by_task if row["variant"] == variant], variant) for variant in variants]
    return [*by_task, *means] if len(tasks) > 1 else by_task


def _of_task(rows: Sequence[Row], task: str, variant: str) -> Row:
    mine = [row for row in rows if (row["task"], row["variant"]) == (task, variant) and "refused" not in row]
    best: dict[str, float] = {}
    for row in mine:
        best[row["place"]] = max(best.get(row["place"], 0.0), row["score"])
    return {
        "task": task,
        "variant": variant,
        "score": mean(row["score"] for row in mine),
        "best_of_samples": mean(best.values()),
        "cases": len(best),
        "cut": sum(bool(row["cut"]) for row in mine),
        "read_tokens": mean(row["read_tokens"] or 0 for row in mine),
    }


def _mean_of_tasks(rows: Sequence[Row], variant: str) -> Row:
    """Every task counts the same."""
    scored = [row for row in rows if row["cases"]]
    names = ("score", "best_of_samples", "read_tokens")
    return {
        "task": "mean",
        "variant": variant,
        **{name: mean(row[name] for row in scored) for name in names},
        **{name: sum(row[name] for row in scored) for name in ("cases", "cut")},
    }


def _line(row: Row) -> str:
    return f"{row['task']:<20} {row['variant']:<40} {100 * row['score']:5.1f}  {row['text'][:60]!r}"
