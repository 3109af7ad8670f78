"""A conversation taken up again, from memory and from disk, against reading its prompt."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from kvchat import units
from kvchat.bench import model_shapes
from kvchat.bench.decoding import prose
from kvchat.bench.frame import Experiment, Frame, ModelChoice, Result, Row, methods, model_identity, parsed
from kvchat.bench.timing import fingerprint
from kvchat.engine.session import Session
from kvchat.errors import DoesNotFitError
from kvchat.models.load import LoadedModel
from kvchat.protocol.messages import Event, Keeping, Load, Noted, Resumed, Sampling, Turn

WAYS = ("prompt", "memory", "disk")
PASSAGE = 2000  # tokens that are repeated: the corpus ends somewhere
WRITING_S = 600.0
ROOM = 2**40  # no conversation is left out for its size
OTHER = (Turn("user", "Hello."),)


@dataclass(frozen=True)
class Settings:
    """The measurement: so many ``rounds`` of about ``tokens`` tokens in ``mode``, which is ``MODE[:KEY=VALUE,...]``.

    ``shape`` names a model shape with random weights instead of the chosen model, for conversations longer than that
    reads.
    """

    tokens: int = 8000
    rounds: int = 3
    mode: str = "full"
    budget: int = 512
    shape: str = ""


def run(settings: Settings = Settings(), choice: ModelChoice = ModelChoice(), frame: Frame | None = None) -> Result:
    """Read the conversation in each round and take it up again; a row of the summary for each way.

    Raises:
        KvchatError: the model or mode is refused, or the conversation is longer than its context.
    """
    frame, found = frame or Frame(), methods([settings.mode], settings.budget)
    model = model_shapes.with_tokenizer(model_shapes.choose(settings.shape, choice, frame.report))
    experiment = Experiment(
        "resume",
        f"{settings.mode}, {settings.tokens:,} tokens",
        asdict(settings) | choice.settings(),
        found,
        model_identity(model),
        fingerprint(model.device),
    )
    turns = (Turn("user", _text(model, settings.tokens)),)
    result = frame.measure(
        experiment,
        [{"variant": settings.mode, "round": number} for number in range(settings.rounds)],
        lambda cell: [{**cell, **row} for row in _round(settings, choice, model, turns)],
        lambda row: f"{row['tokens']:>7,} tokens from {row['way']:<6}  {units.seconds(row['seconds'])}",
    )
    return frame.finish(result, _summary(result["rows"]))


def _round(settings: Settings, choice: ModelChoice, model: LoadedModel, turns: Sequence[Turn]) -> Iterator[Row]:
    """A row for each of ``WAYS``."""
    with tempfile.TemporaryDirectory() as folder:
        asked = replace(Load(**vars(choice)), keeping=Keeping(ROOM, ROOM, folder))
        session = _session(model, asked, settings)
        began = time.perf_counter()
        for _ in session.answer(turns, Sampling(temperature=0, max_new_tokens=1), conversation="long"):
            pass
        yield _row("prompt", session, session.total, time.perf_counter() - began)
        list(session.resume("other", OTHER))
        yield _taken_up(session, turns, "memory")
        session.close(WRITING_S)
        session = _session(model, asked, settings)
        yield _taken_up(session, turns, "disk")
        session.close()


def _session(model: LoadedModel, asked: Load, settings: Settings) -> Session:
    session = Session(model, asked)
    session.enter(parsed(settings.mode, settings.budget))
    return session


def _taken_up(session: Session, turns: Sequence[Turn], way: str) -> Row:
    began = time.perf_counter()
    events: list[Event] = list(session.resume("long", turns))
    seconds = time.perf_counter() - began
    tokens = next((event.tokens for event in events if isinstance(event, Resumed) and event.where == way), 0)
    if not tokens:
        said = [event.text for event in events if isinstance(event, Noted)]
        raise DoesNotFitError(
            f"The conversation did not come back from {way}.",
            " ".join(said) or "Nothing of it was kept there.",
            "Free memory, and space where temporary files lie; or give fewer --tokens.",
        )
    return _row(way, session, tokens, seconds)


def _row(way: str, session: Session, tokens: int, seconds: float) -> Row:
    kv_host_bytes = session.snapshot().kv_host_bytes
    return {"way": way, "tokens": tokens, "seconds": seconds, "kv_host_bytes": kv_host_bytes}


def _text(model: LoadedModel, tokens: int) -> str:
    tokenizer: Any = model.tokenizer
    passage = prose(tokenizer, min(tokens, PASSAGE))
    text: str = tokenizer.decode((passage * (tokens // len(passage) + 1))[:tokens])
    return text


def _summary(rows: Sequence[Row]) -> list[Row]:
    """A row for each way, with the median of its times."""
    measured = [row for row in rows if "refused" not in row]
    summary = []
    for way in WAYS:
        of_way = [row for row in measured if row["way"] == way]
        summary.append({**of_way[0], "seconds": statistics.median(row["seconds"] for row in of_way)})
    return [{**row, "times_read": summary[0]["seconds"] / row["seconds"]} for row in summary]
