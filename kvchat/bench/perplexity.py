"""Perplexity of book text, mode against full: every token of the text is decoded by a step in the mode.

Only a short prompt of each passage is prefilled, as in a long generation, so that tokens that a mode does not read
count from the start. Full decodes the same passages in the same run: ratios do not depend on the load of the machine.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from kvchat.bench.frame import Experiment, Frame, ModelChoice, Result, Row, enter, methods, model_identity
from kvchat.bench.texts import Passage, passages
from kvchat.bench.timing import fingerprint
from kvchat.bench.walk import tokens_read
from kvchat.engine.session import Session

PROMPT = 16
FULL = "full"
STANDARD = ("freeze", "streaming:budget=288")
RESAMPLES = 2000


@dataclass(frozen=True)
class Settings:
    """The measurement: ``modes`` against full, on at most ``passages`` passages of ``tokens`` decoded tokens."""

    modes: tuple[str, ...] = STANDARD
    tokens: int = 1000
    passages: int | None = None
    texts: tuple[str, ...] = ()


def run(settings: Settings = Settings(), choice: ModelChoice = ModelChoice(), frame: Frame | None = None) -> Result:
    """Measure and return plain data, ready for JSON: a row for each passage and variant, ``summary`` for each variant.

    Raises:
        UsageError: no text is long enough; KvchatError: the model cannot be loaded, or a mode refuses.
    """
    frame, variants = frame or Frame(), tuple(dict.fromkeys((FULL, *settings.modes)))
    found = methods(variants)
    session = choice.open(frame.report)
    texts = passages(settings.texts, PROMPT + settings.tokens, session.model.tokenizer)[: settings.passages]
    experiment = Experiment(
        "perplexity",
        "perplexity of text decoded step by step, tokens read (mean over layers, KV heads and steps) and time, each "
        "against full's in the same run",
        asdict(settings) | {"prompt": PROMPT} | choice.settings(),
        found,
        model_identity(session.model),
        fingerprint(session.model.device),
    )
    result = frame.measure(
        experiment,
        [{"passage": number, "variant": variant} for number in range(len(texts)) for variant in variants],
        lambda cell: [_read(session, texts[cell["passage"]], cell["variant"])],
        lambda row: f"{row['text']}: {row['variant']:<40} {math.exp(row['nats_mean']):7.2f}",
    )
    rows = {variant: [row for row in result["rows"] if row["variant"] == variant] for variant in variants}
    return frame.finish(result, [_summary(rows[FULL], rows[variant], variant) for variant in variants])


def _read(session: Session, passage: Passage, variant: str) -> Row:
    """Prefill the prompt, then decode the rest of the text token by token.

    ``nats`` are those of each token, ``dropped_at`` the steps at which fewer tokens were read than at the one before:
    a prune, or tokens that froze.
    """
    enter(session, variant)
    session.truncate(0)
    logits = session.prefill(passage.ids[:PROMPT])
    nats, read, seconds = [], [], 0.0
    for token in passage.ids[PROMPT:]:
        nats.append(-float(logits.float().log_softmax(-1)[token]))
        began = time.perf_counter()
        logits = session.step(token)
        logits[0].item()  # waits for the device
        seconds += time.perf_counter() - began
        read.append(tokens_read(session))
    return {
        "text": passage.text,
        "nats_mean": statistics.fmean(nats),
        "read_mean": statistics.fmean(read),
        "read_end": read[-1],
        "seconds": seconds,
        "nats": [round(nat, 4) for nat in nats],
        "dropped_at": [step for step, (before, now) in enumerate(itertools.pairwise(read), 1) if now < before],
    }


def _summary(full: Sequence[Row], mine: Sequence[Row], variant: str) -> Row:
    """One variant over the passages that full decoded too; by itself where full decoded none, such as long ones."""
    decoded = [row for row in mine if "refused" not in row]
    if not decoded:
        return {"variant": variant, "refused": mine[0]["refused"]}
    by_passage = {row["passage"]: row for row in full if "refused" not in row}
    pairs = [(row, by_passage[row["passage"]]) for row in decoded if row["passage"] in by_passage]
    chosen = [row for row, _ in pairs] or decoded
    ratios = {row["passage"]: math.exp(row["nats_mean"] - its["nats_mean"]) for row, its in pairs}
    return {
        "variant": variant,
        "perplexity": math.exp(statistics.fmean(row["nats_mean"] for row in chosen)),
        "read_mean": statistics.fmean(row["read_mean"] for row in chosen),
        "read_end": statistics.fmean(row["read_end"] for row in chosen),
        "ms": 1000 * statistics.median(row["seconds"] / len(row["nats"]) for row in chosen),
        **(_against_full(pairs) if pairs else {}),
        "passages": [
            {"text": row["text"], "perplexity": math.exp(row["nats_mean"]), "ratio": ratios.get(row["passage"])}
            for row in chosen
        ],
    }


def _against_full(pairs: Sequence[tuple[Row, Row]]) -> Row:
    differences = [row["nats_mean"] - its["nats_mean"] for row, its in pairs]
    return {
        "ratio": math.exp(statistics.fmean(differences)),
        "ratio_standard_error": _standard_error(differences),
        "read_share": sum(row["read_mean"] for row, _ in pairs) / sum(its["read_mean"] for _, its in pairs),
        "wall_ratio": statistics.median(row["seconds"] / its["seconds"] for row, its in pairs),
    }


def _standard_error(differences: Sequence[float]) -> float:
    """Bootstrap the standard error of the ratio over passages."""
    random_ = random.Random(0)
    drawn = [random_.choices(differences, k=len(differences)) for _ in range(RESAMPLES)]
    return statistics.pstdev(math.exp(statistics.fmean(sample)) for sample in drawn)
