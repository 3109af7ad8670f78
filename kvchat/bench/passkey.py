"""Recall of one fact told in an earlier turn, mode against mode, on the same stored prompts.

Each case is a conversation of a given length: passages of text, a passkey in one early turn, the question at the end.
The prompt is prefilled once, exactly; then every variant answers greedily from it, so that variants differ only in the
tokens that their decode steps read. With ``inside`` the question comes after so many tokens of an answer, decoded in
the variant's mode as the question is: what left by then must be found again.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvchat.bench.frame import Experiment, Frame, ModelChoice, Result, Row, enter, mean, methods, model_identity, wilson
from kvchat.bench.timing import fingerprint
from kvchat.bench.walk import answered, decode
from kvchat.engine.prompt import PromptEncoder, Stored
from kvchat.engine.session import Session
from kvchat.engine.synthetic_text import ANSWER_TOKENS, Case, hide, passage, sentences
from kvchat.protocol.messages import Turn

STANDARD = (
    "full",
    "freeze",
    "streaming:budget=512",
    "speculative:budget=512",
    "sync",
    "sync:representatives=centroid",
    "sync:clusters=2,mem=0.7",
    "sync:clusters=2,mem=0.7,representatives=centroid",
    "sync:budget=260",
)


def cases(seed: int, n: int, tokens: int, tokenizer: Any) -> Iterator[Case]:
    """``n`` conversations of about ``tokens`` tokens, the same for the same seed."""
    return (hide(f"{seed}/{index}", tokens, tokenizer) for index in range(n))


@dataclass(frozen=True)
class Settings:
    """The measurement: ``cases`` conversations of about ``tokens`` tokens from ``seed``.

    ``inside`` is how many tokens of an answer precede the question, 0 for a question that is a turn of its own.
    """

    modes: tuple[str, ...] = STANDARD
    cases: int = 40
    tokens: int = 3000
    inside: int = 0
    seed: int = 0


def run(settings: Settings, choice: ModelChoice = ModelChoice(), frame: Frame | None = None) -> Result:
    """Measure and return plain data, ready for JSON: a row for each case and variant, ``summary`` for each variant.

    Raises:
        KvchatError: an unknown mode or parameter, the model cannot be loaded, or a mode refuses.
    """
    frame, found = frame or Frame(), methods(settings.modes)
    session = choice.open(frame.report)
    experiment = Experiment(
        "passkey",
        "passkeys recalled; tokens read are the mean over layers, KV heads, steps and cases",
        asdict(settings),
        found,
        model_identity(session.model),
        fingerprint(session.model.device),
    )
    told = list(cases(settings.seed, settings.cases, settings.tokens, session.model.tokenizer))
    result = frame.measure(
        experiment,
        [{"case": case, "variant": variant} for case in range(settings.cases) for variant in settings.modes],
        lambda cell: [_recalled(session, told[cell["case"]], cell["variant"], settings.inside)],
        lambda row: f"{row['variant']:<48} {'recalled' if row['right'] else 'not: ' + row['text']}",
    )
    return frame.finish(result, [_summary(result["rows"], variant) for variant in dict.fromkeys(settings.modes)])


def _summary(rows: Sequence[Row], variant: str) -> Row:
    mine = [row for row in rows if row["variant"] == variant and "refused" not in row]
    right = sum(row["right"] for row in mine)
    return {
        "variant": variant,
        "right": right,
        "cases": len(mine),
        "interval": wilson(right, len(mine)),
        "prompt_tokens": mean(row["prompt_tokens"] for row in mine),
        "read_tokens": mean(row["read_tokens"] for row in mine),
        "coverage": mean(row["coverage"] for row in mine if row.get("coverage") is not None),
        "kv_device_bytes": max((row["kv_device_bytes"] for row in mine), default=None),
    }


def _recalled(session: Session, case: Case, variant: str, inside: int) -> Row:
    enter(session, variant)
    row = _answer_inside(session, case, inside) if inside else _answer(session, case)
    return row | {"right": case.answer in row["text"], "kv_device_bytes": session.snapshot().kv_device_bytes}


def _answer(session: Session, case: Case) -> Row:
    finished = answered(session, case.turns, ANSWER_TOKENS)
    stats = finished.stats
    read = {"read_tokens": stats.active_tokens or 0, "coverage": stats.coverage}
    return {"text": finished.text, "prompt_tokens": stats.prompt_tokens} | read


def _answer_inside(session: Session, case: Case, inside: int) -> Row:
    """As ``_answer``, but the prompt asks for a story, and ``inside`` tokens of one precede the question."""
    tokenizer = session.model.tokenizer
    encoder, begun = PromptEncoder(tokenizer), (*case.turns[:-1], Turn("user", "Tell me a story."))
    story = passage(sentences(int(case.answer)), inside, tokenizer)
    prompt, whole = (
        encoder.encode(turns, Stored()).ids for turns in (begun, (*begun, Turn("assistant", story), case.turns[-1]))
    )
    session.truncate(0)
    session.prefill(prompt)
    answer = decode(session, whole[len(prompt) :], ANSWER_TOKENS)
    return {"text": answer.text, "read_tokens": statistics.fmean(answer.read), "prompt_tokens": len(prompt)}
