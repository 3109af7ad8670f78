"""A long generation in one mode: device memory and time per step over its length."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from kvchat import units
from kvchat.bench.decoding import prose
from kvchat.bench.frame import Experiment, Frame, ModelChoice, Result, Row, methods, model_identity, parsed
from kvchat.bench.timing import fingerprint
from kvchat.engine.runner import geometry_of, traits_of
from kvchat.engine.sampler import Sampler, read
from kvchat.engine.session import Session
from kvchat.errors import DoesNotFitError
from kvchat.kv.modes import build
from kvchat.models.load import LoadedModel
from kvchat.protocol.messages import Sampling

ROWS = 10
PROMPT = 64


@dataclass(frozen=True)
class Settings:
    """The measurement: ``tokens`` tokens sampled in ``mode``, ``MODE[:KEY=VALUE,...]``, after a short prompt."""

    mode: str = "streaming"
    budget: int = 512
    tokens: int = 20_000


def run(settings: Settings = Settings(), choice: ModelChoice = ModelChoice(), frame: Frame | None = None) -> Result:
    """Generate the tokens, sampled with seeds; one row for each tenth.

    A run that goes on reads again what was generated before, as a prompt.

    Raises:
        KvchatError: the model or mode is refused, or its context ends before so many tokens.
    """
    frame, found = frame or Frame(), methods([settings.mode], settings.budget)
    session = choice.open(frame.report)
    _refuse_beyond_context(session.model, settings)
    session.enter(parsed(settings.mode, settings.budget))
    experiment = Experiment(
        "long-run",
        f"{settings.mode}, {settings.tokens:,} tokens",
        asdict(settings),
        found,
        model_identity(session.model),
        fingerprint(session.model.device),
    )
    generation = Generation(session, settings.tokens // ROWS)
    result = frame.measure(
        experiment,
        [{"variant": settings.mode, "tenth": tenth} for tenth in range(ROWS)],
        lambda cell: [generation.tenth(cell["tenth"], frame.rows)],
        _line,
    )
    return frame.finish(result, [{name: row[name] for name in row if name != "ids"} for row in result["rows"]])


def _refuse_beyond_context(model: LoadedModel, settings: Settings) -> None:
    mode = build(parsed(settings.mode, settings.budget), geometry_of(model), traits_of(model))
    needed = PROMPT + settings.tokens
    if mode.context_end.is_final and needed > model.context:
        raise DoesNotFitError(
            "The long run does not fit the model.",
            f"{needed:,} tokens are needed; {model.name} reads {model.context:,} in {mode.name} mode.",
            "Take fewer --tokens, or --mode streaming.",
        )


class Generation:
    """One text in a session, generated ``tokens`` at a time."""

    def __init__(self, session: Session, tokens: int) -> None:
        self._session = session
        self._tokens = tokens
        self._prompt = prose(session.model.tokenizer, PROMPT)
        self._logits = session.prefill(self._prompt)

    def tenth(self, number: int, before: Sequence[Row]) -> Row:
        """Generate the next tokens after the rows ``before``; ``ids`` are these tokens."""
        self._go_on([*self._prompt, *(token for row in before for token in row.get("ids", ()))])
        model = self._session.model
        sampler = Sampler(Sampling(temperature=0.8, seed=number), model.vocab, model.device)
        times, ids = [], []
        for _ in range(self._tokens):
            began = time.perf_counter()
            ids.append(read(sampler(self._logits)))
            self._logits = self._session.step(ids[-1])
            times.append(time.perf_counter() - began)
        snapshot = self._session.snapshot()
        return {
            "stored": self._session.total,
            "ms": 1000 * statistics.median(times),
            "kv_device_bytes": snapshot.kv_device_bytes,
            "kv_host_bytes": snapshot.kv_host_bytes,
            "read": snapshot.active,
            "finite": bool(self._logits.isfinite().all()),
            "ids": ids,
        }

    def _go_on(self, ids: Sequence[int]) -> None:
        """Read what is not stored of ``ids``, where another run generated it or a tenth was refused midway."""
        if self._session.total != len(ids):
            self._session.truncate(len(self._prompt) - 1)
            self._logits = self._session.prefill(ids[self._session.total :])


def _line(row: Row) -> str:
    size = units.size(row["kv_device_bytes"])
    return f"{row['stored']:>7,} tokens stored  {row['ms']:6.2f} ms  {size} on the device"
