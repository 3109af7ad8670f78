"""Perplexity of book text, mode against full: every token of the text is decoded by a step in the mode.

Only a short prompt of each passage is prefilled, as in a long generation, so that tokens that a mode does not read
count from the start. Full decodes the same passages in the same run: ratios do not depend on the load of the machine.
"""

from __future__ import annotations

import math
import random
import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import kvchat
from kvchat.bench.environment import fingerprint
from kvchat.bench.reading import tokens_read
from kvchat.bench.variant import enter
from kvchat.engine.session import Session
from kvchat.errors import UsageError

BOOKS = Path(__file__).parent / "books"
BREAK = "\n* * *\n"
PROMPT = 16
FULL = "full"
STANDARD = ("freeze", "streaming:budget=288")
RESAMPLES = 2000


@dataclass(frozen=True)
class Passage:
    """Consecutive ids of a text."""

    text: str
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Reading:
    """One passage decoded in one mode: nats per token, tokens read per step (mean over layers and heads), seconds."""

    nats: tuple[float, ...]
    read: tuple[float, ...]
    seconds: float


@dataclass
class Row:
    """One variant; ``readings`` in the order of the passages."""

    variant: str
    readings: list[Reading] = field(default_factory=list)


def passages(texts: Sequence[Path], tokens: int, tokenizer: Any) -> Iterator[Passage]:
    """Cut each part of the texts into passages of ``PROMPT + tokens`` ids.

    A line of three asterisks separates parts, an empty line paragraphs; a single line break is a space.
    """
    begin = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    size = PROMPT + tokens - len(begin)
    for path in texts:
        for part in path.read_text(encoding="utf-8").split(BREAK):
            ids = tokenizer.encode(re.sub(r"(?<!\n)\n(?!\n)", " ", part.strip()), add_special_tokens=False)
            for start in range(0, len(ids) - size + 1, size):
                yield Passage(path.stem, (*begin, *ids[start : start + size]))


def run(
    variants: Sequence[str] = STANDARD,
    *,
    texts: Sequence[Path] = (),
    model: str = "bundled",
    device: str = "auto",
    tokens: int = 1000,
    limit: int | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Measure ``variants`` against full on at most ``limit`` passages of ``texts`` (default: the shipped books).

    Raises:
        UsageError: no text is long enough; KvchatError: the model cannot be loaded, or a mode refuses.
    """
    session = kvchat.load(model, device=device)
    found = list(passages(texts or sorted(BOOKS.glob("*.txt")), tokens, session.model.tokenizer))[:limit]
    if not found:
        raise UsageError(
            "The text is too short to measure on.",
            f"A passage has {PROMPT + tokens:,} tokens; none of the texts has that many in one piece.",
            "Give a longer text, or fewer tokens.",
        )
    rows = [Row(name) for name in (FULL, *variants)]
    for done, passage in enumerate(found, 1):
        for row in rows:
            enter(session, row.variant)
            row.readings.append(_read(session, passage))
        report(f"{done} of {len(found)} ({passage.text}): " + ", ".join(f"{_ratio(rows[0], r, -1):.4f}" for r in rows))
    results = [_summary(rows[0], row, found) for row in rows]
    for result in results:
        report(_line(result))
    return {
        "what": "perplexity of text decoded step by step, tokens read (mean over layers, KV heads and steps) and "
        "time, each against full's in the same run",
        "settings": {"model": session.info.model, "dtype": session.info.dtype, "tokens": tokens, "prompt": PROMPT},
        "environment": fingerprint(torch.device(session.info.device)),
        "rows": results,
    }


def _read(session: Session, passage: Passage) -> Reading:
    """Prefill the prompt, then decode the rest of the text token by token."""
    session.truncate(0)
    logits = session.prefill(passage.ids[:PROMPT])
    nats, read, seconds = [], [], 0.0
    for token in passage.ids[PROMPT:]:
        nats.append(_nats(logits, token))
        began = time.perf_counter()
        logits = session.step(token)
        logits[0].item()  # waits for the device
        seconds += time.perf_counter() - began
        read.append(tokens_read(session))
    return Reading(tuple(nats), tuple(read), seconds)


def _nats(logits: torch.Tensor, token: int) -> float:
    return -float(logits.float().log_softmax(-1)[token])


def _summary(full: Row, row: Row, found: Sequence[Passage]) -> dict[str, Any]:
    readings = row.readings
    nats = [statistics.fmean(reading.nats) for reading in readings]
    differences = [mine - statistics.fmean(its.nats) for mine, its in zip(nats, full.readings, strict=True)]
    read, stored = (sum(sum(reading.read) for reading in of.readings) for of in (row, full))
    return {
        "variant": row.variant,
        "perplexity": math.exp(statistics.fmean(nats)),
        "ratio": math.exp(statistics.fmean(differences)),
        "ratio_standard_error": _standard_error(differences),
        "read_mean": read / sum(len(reading.read) for reading in readings),
        "read_share": read / stored,
        "read_end": statistics.fmean(reading.read[-1] for reading in readings),
        "wall_ratio": statistics.median(
            mine.seconds / its.seconds for mine, its in zip(readings, full.readings, strict=True)
        ),
        "ms": 1000 * statistics.median(reading.seconds / len(reading.nats) for reading in readings),
        "passages": [
            {"text": passage.text, "perplexity": math.exp(nat), "ratio": math.exp(difference)}
            for passage, nat, difference in zip(found, nats, differences, strict=True)
        ],
    }


def _standard_error(differences: Sequence[float]) -> float:
    """Bootstrap the standard error of the ratio over passages."""
    random_ = random.Random(0)
    drawn = [random_.choices(differences, k=len(differences)) for _ in range(RESAMPLES)]
    return statistics.pstdev(math.exp(statistics.fmean(sample)) for sample in drawn)


def _ratio(full: Row, row: Row, index: int) -> float:
    return math.exp(statistics.fmean(row.readings[index].nats) - statistics.fmean(full.readings[index].nats))


def _line(result: dict[str, Any]) -> str:
    return (
        f"{result['variant']:<40} {result['perplexity']:7.2f}  {100 * (result['ratio'] - 1):+6.2f} % "
        f"(s.e. {100 * result['ratio_standard_error']:.2f})  {100 * (1 - result['read_share']):5.1f} % fewer read  "
        f"{result['read_end']:6.0f} at the end  {result['wall_ratio']:5.2f} x full's time"
    )
