"""Answers with drafts and the same answers without: speed, and the share of drafts accepted.

Tasks that repeat what was told and tasks that do not, after a part of a book, greedy and sampled. The ways have their
turns in each round, each entered anew; what is stored of the prompt is not read again.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict
from typing import Any, NamedTuple

from kvchat.bench.frame import Cell, Experiment, Frame, ModelChoice, Result, Row, methods
from kvchat.bench.settings import Draft
from kvchat.bench.texts import passages
from kvchat.engine.session import Session
from kvchat.errors import UsageError
from kvchat.protocol.messages import Finished, Sampling, Turn

OFF = "off"
READ = "I have read it."
PASSAGE = 200  # tokens of a book that is quoted
CODE = """class Box:
    def __init__(self, width, height, depth):
        self.width = width
        self.height = height
        self.depth = depth

    def volume(self):
        return self.width * self.height * self.depth

    def surface(self):
        return 2 * (self.width * self.height + self.width * self.depth + self.height * self.depth)
"""
NAMES = "Anna Weaver, Bruno Castle, Clara Field, David North, Emma Stone, Felix Green, Greta Winter, Hugo Black"
TASKS = {
    "quote": "Repeat this text word for word:\n\n{passage}",
    "edit": f"Rename the class Box to Crate and write the whole program again:\n\n```python\n{CODE}```",
    "list": f"These people are coming: {NAMES}. Write them as a list, one on each line, last name first.",
    "code": "Write a Python class for a bank account, with deposit, withdraw and balance, and a test of each.",
    "story": "Tell me a story about a lighthouse keeper who finds a letter.",
}


class Answer(NamedTuple):
    """An answer's ids, their speed and its drafter's counts."""

    ids: list[int]
    tokens_per_s: float
    drafted: int
    accepted: int
    tried: int
    rounds: int


def run(settings: Draft, choice: ModelChoice = ModelChoice(), frame: Frame | None = None) -> Result:
    """Measure and return plain data, ready for JSON: a row for each task, temperature and kind of drafts.

    Raises:
        UsageError: there is no such task or kind, or the books are too short; KvchatError: the model cannot be loaded.
    """
    for task in settings.tasks:
        if task not in TASKS:
            raise UsageError(f'There is no task "{task}".', hint=f"Use one of {', '.join(TASKS)}.")
    frame, found = frame or Frame(), methods([f"full:draft={draft}" for draft in settings.drafts])
    model = choice.load(frame.report)
    what = "full mode with drafts: speed relative to the same answer without drafts, and the share of drafts accepted"
    experiment = Experiment.of("draft", what, asdict(settings) | choice.settings(), found, model)
    quoted = model.tokenizer.decode(passages((), PASSAGE, model.tokenizer)[-1].ids, skip_special_tokens=True)
    told: tuple[Turn, ...] = ()
    if settings.context:
        told = Turn("user", f"Read this:\n\n{_books(settings.context, model.tokenizer)}"), Turn("assistant", READ)
    session = Session(model, choice.asked)
    cells: list[Cell] = [
        {"task": task, "temperature": temperature} for task in settings.tasks for temperature in settings.temperatures
    ]

    def measure(cell: Cell) -> list[Row]:
        turns = (*told, Turn("user", TASKS[cell["task"]].format(passage=quoted)))
        sampling = Sampling(temperature=cell["temperature"], seed=1, max_new_tokens=settings.tokens)
        answers: dict[str, list[Answer]] = {draft: [] for draft in (OFF, *settings.drafts)}
        for _ in range(settings.rounds):
            for draft, its in answers.items():
                its.append(_answer(session, draft, turns, sampling))
        without = answers.pop(OFF)
        return [_row(draft, its, without) for draft, its in answers.items()]

    return frame.measure(experiment, cells, measure, _line)


def _books(tokens: int, tokenizer: Any) -> str:
    """The first ``tokens`` of the books, one after the other."""
    parts = passages((), min(tokens, PASSAGE), tokenizer)
    ids = [token for part in parts for token in part.ids][:tokens]
    if len(ids) < tokens:
        raise UsageError(f"The books have {len(ids):,} tokens.", hint="Use a smaller --context.")
    return str(tokenizer.decode(ids, skip_special_tokens=True))


def _answer(session: Session, draft: str, turns: tuple[Turn, ...], sampling: Sampling) -> Answer:
    session.switch("full", draft=draft)
    *_, finished = session.answer(turns, sampling)
    assert isinstance(finished, Finished)
    drafter = session._kv.mode.drafter
    counted = (drafter.drafted, drafter.accepted, drafter.tried, drafter.rounds) if drafter else (0, 0, 0, 0)
    return Answer(session.token_ids, finished.stats.decode_tokens_per_s or 0.0, *counted)


def _row(draft: str, answers: list[Answer], without: list[Answer]) -> Row:
    speed, its = (statistics.median(answer.tokens_per_s for answer in each) for each in (answers, without))
    last = answers[-1]
    return {
        "draft": draft,
        "tokens": len(last.ids),
        "forwards": len(last.ids) - last.accepted,
        "drafted": last.drafted,
        "accepted": last.accepted / last.drafted if last.drafted else None,
        "goes_on": last.accepted / last.tried if last.tried else None,  # each, given that those before it did
        "tokens_a_round": 1 + last.accepted / last.rounds if last.rounds else None,
        "ms": 1000 / speed if speed else None,
        "ms_without": 1000 / its if its else None,
        "gain": speed / its if its else None,
        "same": all(answer.ids == without[0].ids for answer in (*answers, *without)),
    }


def _line(row: Row) -> str:
    gain = "nothing measured" if row["gain"] is None else f"{row['gain']:.2f} x without"
    return f"{row['task']} at {row['temperature']:g}, {row['draft']}: {row['tokens']} tokens, {gain}"
