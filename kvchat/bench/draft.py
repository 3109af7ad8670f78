"""Measures answers with drafts and the same answers without: speed, and the share of drafts accepted.

Some tasks repeat parts of the prompt and some do not. They follow a part of a book, and are greedy or sampled. In each
round every kind of draft has its turn, entered again; a stored prompt is not prefilled again. No token ends an answer,
so that all have the same length. The fastest round counts, by wall time and by this process's CPU time: the latter
hardly depends on other programs, but means nothing on a GPU.
"""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from itertools import cycle, islice
from typing import NamedTuple

from kvchat.bench.frame import Cell, Frame, ModelChoice, Result, Row, experiment, methods
from kvchat.bench.settings import Draft
from kvchat.bench.texts import passages
from kvchat.engine.session import Session
from kvchat.errors import check_known
from kvchat.protocol.messages import Sampling, Turn

OFF = "off"
READ = "I have read it."
PASSAGE = 200  # tokens of the quoted passage
CODE = """class Box:
    def __init__(self, width, height, depth):
        self.width = width
        self.height = height
        self.depth = depth

    def volume(self):
        return self.width * self.height * self.depth

    def surface(self):
        return 2 * (self.width * self.height + self.width * self.depth + self.height * self.depth)

    def holds(self, other):
        return self.width > other.width and self.height > other.height and self.depth > other.depth
"""
NAMES = (
    "Anna Weaver, Bruno Castle, Clara Field, David North, Emma Stone, Felix Green, Greta Winter, Hugo Black, "
    "Ida Marsh, Jonas Reed, Karla Bishop, Leo Fisher, Marta Hill, Nils Carter, Olga Brook, Paul Archer, Simon Wood"
)
TASKS = {
    "quote": "Repeat this text word for word:\n\n{passage}",
    "edit": f"Rename the class Box to Crate and write the whole program again:\n\n```python\n{CODE}```",
    "list": f"These people are coming: {NAMES}. Write them as a list, one on each line, last name first.",
    "code": "Write a Python class for a bank account, with deposit, withdraw and balance, and a test of each.",
    "story": "Tell me a story about a lighthouse keeper who finds a letter.",
}


class Answer(NamedTuple):
    """An answer's ids, milliseconds per token after the first round, and its drafter's counts."""

    ids: list[int]
    ms: float
    processor_ms: float
    drafted: int
    accepted: int
    tried: int
    rounds: int


def run(settings: Draft, choice: ModelChoice = ModelChoice(), frame: Frame | None = None) -> Result:
    """Measure and return plain data, ready for JSON: a row for each task, temperature and kind of draft.

    Raises:
        UsageError: a task or kind is unknown; KvchatError: the model cannot be loaded.
    """
    for task in settings.tasks:
        check_known(task, TASKS, "task")
    frame, found = frame or Frame(), methods([f"full:draft={draft}" for draft in settings.drafts])
    model = choice.load(frame.progress)
    what = "full mode with drafts: speed relative to the same answer without drafts, and the share of drafts accepted"
    head = experiment("draft", what, asdict(settings) | choice.settings(), found, model)
    quoted = model.tokenizer.decode(passages((), PASSAGE, model.tokenizer)[-1].ids, skip_special_tokens=True)
    session = Session(replace(model, eos_ids=frozenset()), choice)
    session._loop.encoder.turn_end = frozenset()
    cells: list[Cell] = [
        {"context": context, "task": task, "temperature": temperature}
        for context in settings.contexts
        for task in settings.tasks
        for temperature in settings.temperatures
    ]

    def measure(cell: Cell) -> list[Row]:
        # All books, starting again after the last.
        ids = cycle(token for part in passages((), PASSAGE, model.tokenizer) for token in part.ids)
        books = model.tokenizer.decode(list(islice(ids, cell["context"])), skip_special_tokens=True)
        told = f"Read this:\n\n{books}"
        read = (Turn("user", told), Turn("assistant", READ)) if cell["context"] else ()
        turns = (*read, Turn("user", TASKS[cell["task"]].format(passage=quoted)))
        sampling = Sampling(temperature=cell["temperature"], seed=1, max_new_tokens=settings.tokens)
        answers: dict[str, list[Answer]] = {draft: [] for draft in (OFF, *settings.drafts)}
        for _ in range(settings.rounds):
            for draft, runs in answers.items():
                session.switch("full", draft=draft, resident=settings.resident)
                runs.append(_answer(session, turns, sampling))
        without = answers.pop(OFF)
        return [_row(draft, runs, without) for draft, runs in answers.items()]

    return frame.measure(head, cells, measure, _line)


def _answer(session: Session, turns: tuple[Turn, ...], sampling: Sampling) -> Answer:
    begun: list[tuple[int, float, float]] = []

    def between(generated: int) -> None:
        if generated and not begun:  # the time to the first token belongs to the prompt
            begun.append((generated, time.perf_counter(), time.process_time()))

    for _ in session.answer(turns, sampling, between):
        pass
    now = len(session.token_ids), time.perf_counter(), time.process_time()
    tokens, seconds, processor_s = (end - begin for end, begin in zip(now, begun[0], strict=True))
    drafter = session._kv.mode.drafter
    counted = (drafter.drafted, drafter.accepted, drafter.tried, drafter.rounds) if drafter else (0, 0, 0, 0)
    return Answer(session.token_ids, 1000 * seconds / tokens, 1000 * processor_s / tokens, *counted)


def _row(draft: str, answers: list[Answer], without: list[Answer]) -> Row:
    ms, ms_without = (min(answer.ms for answer in each) for each in (answers, without))
    processor_ms, processor_ms_without = (min(answer.processor_ms for answer in each) for each in (answers, without))
    last = answers[-1]
    return {
        "draft": draft,
        "tokens": len(last.ids),
        "forwards": len(last.ids) - last.accepted,
        "drafted": last.drafted,
        "accepted": last.accepted / last.drafted if last.drafted else None,
        "goes_on": last.accepted / last.tried if last.tried else None,  # acceptance if all drafts before were accepted
        "tokens_a_round": 1 + last.accepted / last.rounds if last.rounds else None,
        "ms": ms,
        "ms_without": ms_without,
        "gain": ms_without / ms,
        "processor_gain": processor_ms_without / processor_ms,
        "same": all(answer.ids == without[0].ids for answer in (*answers, *without)),
    }


def _line(row: Row) -> str:
    what = f"{row['task']} after {row['context']:,} tokens at {row['temperature']:g}, {row['draft']}"
    return f"{what}: {row['gain']:.2f} x without, {row['processor_gain']:.2f} x by processor time"
