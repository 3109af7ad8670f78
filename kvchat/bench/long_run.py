"""A long generation in one mode: device memory and time per step over its length."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from kvchat import units
from kvchat.bench.corpus import prose
from kvchat.bench.environment import fingerprint
from kvchat.bench.frame import Frame, Row
from kvchat.bench.identity import Experiment, Result, methods, model_identity
from kvchat.bench.model_choice import ModelChoice
from kvchat.bench.variant import parsed
from kvchat.engine.generate.sampler import Sampler, read
from kvchat.engine.session import Session
from kvchat.protocol.messages import Sampling

ROWS = 10
PROMPT = 64


@dataclass(frozen=True)
class Settings:
    """What to measure: ``tokens`` tokens sampled in ``mode``, ``MODE[:KEY=VALUE,...]``, after a short prompt."""

    mode: str = "streaming"
    budget: int = 512
    tokens: int = 20_000


def run(settings: Settings = Settings(), choice: ModelChoice = ModelChoice(), frame: Frame | None = None) -> Result:
    """Generate the tokens, sampled with a seed; one row for each tenth.

    The text is one generation: an interrupted one begins anew.

    Raises:
        KvchatError: the model or mode is refused.
    """
    frame, found = frame or Frame(), methods([settings.mode], settings.budget)
    session = choice.open(frame.report)
    session.enter(parsed(settings.mode, settings.budget))
    experiment = Experiment(
        "long-run",
        f"{settings.mode}, {settings.tokens:,} tokens",
        asdict(settings),
        found,
        model_identity(session.model),
        fingerprint(session.model.device),
    )
    cell = {"variant": settings.mode}
    result = frame.measure(experiment, [cell], lambda _: list(_tenths(session, settings.tokens)), _line)
    return frame.finish(result, result["rows"])


def _tenths(session: Session, tokens: int) -> Iterator[Row]:
    sampler = Sampler(Sampling(temperature=0.8, seed=0), session.model.vocab, session.model.device)
    logits = session.prefill(prose(session.model.tokenizer, PROMPT))
    for _ in range(ROWS):
        times = []
        for _ in range(tokens // ROWS):
            began = time.perf_counter()
            logits = session.step(read(sampler(logits)))
            times.append(time.perf_counter() - began)
        snapshot = session.snapshot()
        yield {
            "stored": session.total,
            "ms": 1000 * statistics.median(times),
            "kv_device_bytes": snapshot.kv_device_bytes,
            "kv_host_bytes": snapshot.kv_host_bytes,
            "read": snapshot.active,
            "finite": bool(logits.isfinite().all()),
        }


def _line(row: Row) -> str:
    size = units.size(row["kv_device_bytes"])
    return f"{row['stored']:>7,} tokens stored  {row['ms']:6.2f} ms  {size} on the device"
