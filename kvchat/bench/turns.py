"""Ten questions over one text, scored by turn; and what is told in one mode and asked for in another.

``run``: facts stand anywhere in one long text, and a turn asks for each. The model's own answers stay in the
conversation, so that what a mode lost or got wrong in earlier turns is part of later ones.

``switches``: a fact is told, an answer is decoded in mode A, then mode B is entered, and the question and its answer
are decoded in B. The K/V of the answer in between are those that A computed.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from kvchat.bench import passkey
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
from kvchat.bench.recall_tasks import NAMES, Draw
from kvchat.bench.timing import fingerprint
from kvchat.bench.walk import answered, decode
from kvchat.engine import synthetic_text
from kvchat.engine.prompt import PromptEncoder, Stored
from kvchat.engine.session import Session
from kvchat.engine.synthetic_text import sentences
from kvchat.protocol.messages import Turn

QUESTIONS = 10
ANSWER_TOKENS = 24
STANDARD = ("full", "streaming", "speculative", "freeze", "sync")


@dataclass(frozen=True)
class Settings:
    """The measurement: ``cases`` texts of about ``tokens`` tokens."""

    modes: tuple[str, ...]
    cases: int = 4
    tokens: int = 3000
    seed: int = 0


@dataclass(frozen=True)
class SwitchSettings(Settings):
    """``inside`` is the number of tokens decoded in the first mode."""

    tokens: int = 1400
    inside: int = 128


# ---- ten questions ---------------------------------------------------------------------------------


def run(settings: Settings, choice: ModelChoice = ModelChoice(), frame: Frame | None = None) -> Result:
    """Measure and return plain data, ready for JSON: ten rows for each case and variant.

    Raises:
        KvchatError: an unknown mode or parameter, the model cannot be loaded, or all modes refuse.
    """
    frame, found = frame or Frame(), methods(settings.modes)
    session = choice.open(frame.report)
    experiment = _experiment("turns", "ten questions over one text, by turn", settings, found, session)
    result = frame.measure(
        experiment,
        [{"case": number, "variant": variant} for number in range(settings.cases) for variant in settings.modes],
        lambda cell: list(_conversation(session, settings, cell)),
        lambda row: f"turn {row['turn']:>2}  {row['variant']:<48} {_verdict(row)}",
    )
    return frame.finish(result, _by(result["rows"], ("variant", "turn")))


def _conversation(session: Session, settings: Settings, cell: Cell) -> Iterator[Row]:
    draw = Draw(
        settings.tokens, 0, QUESTIONS, random.Random(f"{settings.seed}/{cell['case']}"), session.model.tokenizer
    )
    facts = {name: draw.number() for name in draw.random_.sample(NAMES, QUESTIONS)}
    text = draw.filler(settings.tokens)
    for name, number in facts.items():
        text.insert(draw.random_.randrange(len(text) + 1), f"The value of {name} is {number}.")
    turns = [Turn("user", " ".join(text)), Turn("assistant", "I see.")]
    enter(session, cell["variant"])
    session.truncate(0)
    for turn, (name, value) in enumerate(facts.items(), 1):
        turns.append(Turn("user", f"What is the value of {name}?"))
        finished = answered(session, turns, ANSWER_TOKENS)
        turns.append(Turn("assistant", finished.text))
        read = finished.stats.active_tokens
        yield {"turn": turn, "right": value in finished.text, "text": finished.text, "read_tokens": read}


# ---- the switch matrix -----------------------------------------------------------------------------


def switches(settings: SwitchSettings, choice: ModelChoice = ModelChoice(), frame: Frame | None = None) -> Result:
    """Measure and return plain data, ready for JSON: a row for each case, told mode and asked mode.

    Raises:
        KvchatError: as ``run``.
    """
    frame, found = frame or Frame(), methods(settings.modes)
    session = choice.open(frame.report)
    experiment = _experiment("switches", "told in one mode, asked in another", settings, found, session)
    told = list(passkey.cases(settings.seed, settings.cases, settings.tokens, session.model.tokenizer))
    result = frame.measure(
        experiment,
        [{"case": number, "told": mode} for number in range(settings.cases) for mode in settings.modes],
        lambda cell: list(_told(session, told[cell["case"]], cell["told"], settings)),
        lambda row: f"told in {row['told']:<32} asked in {row['asked']:<32} {_verdict(row)}",
    )
    return frame.finish(result, _by(result["rows"], ("told", "asked")))


def _told(session: Session, case: synthetic_text.Case, told: str, settings: SwitchSettings) -> Iterator[Row]:
    """Tell, decode a story in the mode ``told``, then ask in every mode."""
    tokenizer = session.model.tokenizer
    begun = (*case.turns[:-1], Turn("user", "Tell me a story."))
    story = synthetic_text.passage(sentences(int(case.answer)), settings.inside, tokenizer)
    encoder = PromptEncoder(tokenizer)
    prompt, with_story, whole = (
        encoder.encode(turns, Stored()).ids
        for turns in (begun, (*begun, Turn("assistant", story)), (*begun, Turn("assistant", story), case.turns[-1]))
    )
    end = _agreed(with_story, whole)
    enter(session, told)
    session.truncate(0)
    session.prefill(prompt)
    for token in whole[len(prompt) : end]:
        session.step(token)
    for asked in settings.modes:
        # The last token again: what the mode asked in finds is what the mode told in left.
        enter(session, told)
        session.truncate(end - 1)
        session.step(whole[end - 1])
        enter(session, asked)
        answer = decode(session, whole[end:], ANSWER_TOKENS)
        yield {
            "asked": asked,
            "right": case.answer in answer.text,
            "text": answer.text,
            "read_tokens": statistics.fmean(answer.read),
        }


def _agreed(one: Sequence[int], other: Sequence[int]) -> int:
    """Ids that both begin with."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


# ---- both ------------------------------------------------------------------------------------------


def _experiment(name: str, what: str, settings: Settings, found: dict[str, object], session: Session) -> Experiment:
    model = session.model
    return Experiment(name, what, asdict(settings), found, model_identity(model), fingerprint(model.device))


def _by(rows: Sequence[Row], names: tuple[str, str]) -> list[Row]:
    """Shares right by two coordinates, in the order of the rows."""
    measured = [row for row in rows if "refused" not in row]
    found = []
    for place in dict.fromkeys(tuple(row[name] for name in names) for row in measured):
        mine = [row for row in measured if tuple(row[name] for name in names) == place]
        right = sum(row["right"] for row in mine)
        found.append(
            dict(zip(names, place, strict=True))
            | {
                "right": right,
                "cases": len(mine),
                "interval": wilson(right, len(mine)),
                "read_tokens": mean(row["read_tokens"] or 0 for row in mine),
            }
        )
    return found


def _verdict(row: Row) -> str:
    return "right" if row["right"] else f"wrong: {row['text']}"
