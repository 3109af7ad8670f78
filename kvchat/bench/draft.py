"""Answers with drafts beside the same answers without: their speed, and the share of drafts that was accepted.

Greedy or sampled answers to tasks that repeat what was told, and to one that does not. The two ways have their turns in
each round; each answer begins with nothing stored.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict

from kvchat.bench.frame import Experiment, Frame, ModelChoice, Result, Row, methods
from kvchat.bench.settings import Draft
from kvchat.bench.texts import passages
from kvchat.engine.session import Session
from kvchat.errors import UsageError
from kvchat.protocol.messages import Finished, Sampling, Turn

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
    "story": "Tell me a story about a lighthouse keeper who finds a letter.",
}


def run(settings: Draft, choice: ModelChoice = ModelChoice(), frame: Frame | None = None) -> Result:
    """Measure and return plain data, ready for JSON: a row for each task.

    Raises:
        UsageError: there is no such task; KvchatError: the model cannot be loaded.
    """
    for task in settings.tasks:
        if task not in TASKS:
            raise UsageError(f'There is no task "{task}".', hint=f"Give one of {', '.join(TASKS)}.")
    frame, found = frame or Frame(), methods(["full:draft=lookup"])
    model = choice.load(frame.report)
    what = "full mode with drafts by lookup: speed of answers, in times of the same without"
    experiment = Experiment.of("draft", what, asdict(settings), found, model)
    passage = model.tokenizer.decode(passages((), PASSAGE, model.tokenizer)[0].ids)
    session = Session(model)
    cells = [{"task": task} for task in settings.tasks]
    return frame.measure(experiment, cells, lambda cell: [_row(session, settings, cell["task"], passage)], _line)


def _row(session: Session, settings: Draft, task: str, passage: str) -> Row:
    turns = (Turn("user", TASKS[task].format(passage=passage)),)
    speeds: dict[str, list[float]] = {"off": [], "lookup": []}
    ids: dict[str, list[int]] = {}
    for _ in range(settings.rounds):
        for draft, rates in speeds.items():
            session.truncate(0)
            session.switch("full", draft=draft)
            sampling = Sampling(temperature=settings.temperature, seed=1, max_new_tokens=settings.tokens)
            *_, finished = session.answer(turns, sampling)
            assert isinstance(finished, Finished)
            rates.append(finished.stats.decode_tokens_per_s or 0.0)
            ids[draft] = session.token_ids
    without, with_drafts = (statistics.median(rates) for rates in speeds.values())
    drafter = session._kv.mode.drafter
    assert drafter is not None
    return {
        "tokens": len(ids["lookup"]),
        "tokens_per_s": with_drafts,
        "tokens_per_s_without": without,
        "gain": with_drafts / without if without else None,
        "accepted": drafter.accepted / drafter.drafted if drafter.drafted else None,
        "drafted": drafter.drafted,
        "forwards": len(ids["lookup"]) - drafter.accepted,
        "same": ids["off"] == ids["lookup"],
    }


def _line(row: Row) -> str:
    gain = "nothing measured" if row["gain"] is None else f"{row['gain']:.2f} x without"
    return f"{row['task']}: {row['tokens']} tokens, {row['tokens_per_s']:.1f} tok/s, {gain}"
