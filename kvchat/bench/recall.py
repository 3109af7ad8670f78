"""Recall of facts in long texts by mode: tasks, lengths, depths and budgets, with Wilson intervals.

Full attention prefills the prompt of a case once; every variant answers greedily from it, so that variants differ only
in the tokens that their decode steps read. Full is always among the variants, because a question that it cannot answer
is beyond the model, not lost by a mode. With ``inside`` the question follows that many tokens of a story, both decoded
in the variant's mode, which must then find tokens that it has evicted.

The task ``switches`` decodes the story in one mode and the question in each of the modes, with the K/V of the story
that the first mode computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import lru_cache

from kvchat.bench.frame import Cell, Frame, ModelChoice, Result, Row, experiment, mean, methods, parsed, wilson
from kvchat.bench.recall_tasks import NAMES, TASKS, WITHOUT_DEPTH, case, inside_answer
from kvchat.bench.settings import Recall
from kvchat.bench.walk import answered, decode
from kvchat.engine.session import Session
from kvchat.engine.synthetic_text import Case
from kvchat.errors import UsageError, check_known

FULL = "full"
ANSWER_TOKENS = 48
SWITCHES = "switches"
INSIDE = 128  # tokens of the story in switches
COORDINATES = ("task", "tokens", "depth", "variant", "asked")


def run(settings: Recall, choice: ModelChoice = ModelChoice(), frame: Frame | None = None) -> Result:
    """Measure and return plain data, ready for JSON: a row for each case and variant.

    ``summary`` has a row for each task, length, depth and variant; in ``switches`` also for each mode ``asked`` in.

    Raises:
        UsageError: a task is unknown, or a depth or number of keys is out of range; KvchatError: the model cannot be
            loaded, or all modes refuse.
    """
    for task in settings.tasks:
        check_known(task, TASKS, "task")
    for depth in settings.depths:
        if not 0 <= depth <= 1:
            raise UsageError(f"The depth {depth:g} is not valid.", hint="0 is the start of the text, 1 its end.")
    if not 2 <= settings.keys <= len(NAMES):
        raise UsageError(f"{settings.keys} keys are not possible.", hint=f"Use 2 to {len(NAMES)}.")
    frame, variants = frame or Frame(), tuple(dict.fromkeys((FULL, *settings.modes)))
    found = methods(variants)
    session = Session(choice.load(frame.progress), choice)
    head = experiment("recall", "facts found in a long text", asdict(settings), found, session.model)
    cells = [{**place, "variant": variant} for place in _places(settings) for variant in variants]

    @lru_cache(maxsize=1)  # the variants of a case follow each other
    def drawn(task: str, tokens: int, depth: float, number: int) -> Case:
        return case(task, tokens, depth, settings.keys, f"{settings.seed}/{number}", session.model.tokenizer)

    def rows(cell: Cell) -> list[Row]:
        asked = drawn(cell["task"], cell["tokens"], cell["depth"], cell["case"])
        return list(_rows(session, asked, cell, settings, variants))

    return frame.measure(head, cells, rows, _line, _summary)


def _places(settings: Recall) -> list[Row]:
    """Return task, length, depth and number of every case."""
    return [
        {"task": task, "tokens": tokens, "depth": depth, "case": number}
        for task in settings.tasks
        for tokens in settings.lengths
        for depth in ((0.0,) if task in WITHOUT_DEPTH else settings.depths)
        for number in range(settings.cases)
    ]


def _rows(session: Session, asked: Case, cell: Cell, settings: Recall, variants: Sequence[str]) -> Iterator[Row]:
    """Yield the row of a case; in ``switches``, a row for each mode that the question is asked in."""
    session.enter(parsed(cell["variant"]))
    if cell["task"] == SWITCHES:
        yield from _switched(session, asked, cell, settings.inside or INSIDE, variants)
    elif settings.inside:
        prompt, story, question = inside_answer(asked.turns, settings.inside, cell["case"], session.model.tokenizer)
        session.truncate(0)
        session.prefill(prompt)
        text, read = decode(session, [*story, *question], ANSWER_TOKENS)
        yield _row(session, text, asked) | {"prompt_tokens": len(prompt), "read_tokens": read}
    else:
        finished = answered(session, asked.turns, ANSWER_TOKENS)
        stats = finished.stats
        yield {
            **_row(session, finished.text, asked),
            "prompt_tokens": stats.prompt_tokens,
            "read_tokens": stats.active_tokens,
            "coverage": stats.coverage,
        }


def _switched(session: Session, asked: Case, cell: Cell, inside: int, variants: Sequence[str]) -> Iterator[Row]:
    """Decode the story in the cell's variant, then ask in every variant."""
    prompt, story, question = inside_answer(asked.turns, inside, cell["case"], session.model.tokenizer)
    session.truncate(0)
    session.prefill(prompt)
    for token in story:
        session.step(token)
    for mode in variants:
        # Decode the last token again, so that every mode starts from the state that the first one left.
        session.enter(parsed(cell["variant"]))
        session.truncate(len(prompt) + len(story) - 1)
        session.step(story[-1])
        session.enter(parsed(mode))
        text, read = decode(session, question, ANSWER_TOKENS)
        row = _row(session, text, asked)
        yield {"asked": mode} | row | {"prompt_tokens": len(prompt), "read_tokens": read}


def _row(session: Session, text: str, asked: Case) -> Row:
    return {"right": asked.answer in text, "text": text, "kv_device_bytes": session.snapshot().kv_device_bytes}


def _summary(rows: Sequence[Row]) -> list[Row]:
    """Return a row for each place, without refused rows of ``switches``, which lack the coordinate ``asked``."""
    placed = [row for row in rows if "refused" not in row or row["task"] != SWITCHES]
    places = [{name: row[name] for name in COORDINATES if name in row} for row in placed]
    return [_of_place(rows, dict(place)) for place in dict.fromkeys(tuple(place.items()) for place in places)]


def _of_place(rows: Sequence[Row], place: Row) -> Row:
    mine = [row for row in rows if place.items() <= row.items() and "refused" not in row]
    right = sum(row["right"] for row in mine)
    return place | {
        "cases": len(mine),
        "right": right,
        "interval": wilson(right, len(mine)),
        "read_tokens": mean(row["read_tokens"] or 0 for row in mine),
        "coverage": mean(row["coverage"] for row in mine if row.get("coverage") is not None),
        "kv_device_bytes": max((row["kv_device_bytes"] for row in mine), default=None),
    }


def _line(row: Row) -> str:
    place = f"{row['task']:<8} {row['tokens']:>6,} tokens, depth {row['depth']:.2f}"
    asked = f", asked in {row['asked']}" if "asked" in row else ""
    return f"{place}  {row['variant'] + asked:<40} {'right' if row['right'] else 'wrong: ' + row['text']}"
