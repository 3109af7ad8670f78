"""Decode speed of the modes against transformers' ``generate``, in one run, in turns, as ratios.

Readings on a shared machine scatter by a quarter, so nothing is compared across runs: in each round every contender
decodes the same number of tokens after the same prompt, and the ratios are of one round's medians.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import kvchat
from kvchat.bench.environment import fingerprint
from kvchat.bench.text import prose
from kvchat.engine.session import Session
from kvchat.parameters import PARAMETERS
from kvchat.protocol import Params

GENERATE = "generate"


@dataclass(frozen=True)
class Settings:
    """What to measure: ``contexts`` in tokens, ``modes`` with ``budget`` (tokens), ``steps`` per round."""

    model: str = "bundled"
    device: str = "auto"
    dtype: str = "auto"
    contexts: tuple[int, ...] = (512, 8192)
    modes: tuple[str, ...] = ("full", "streaming", "speculative", "freeze", "sync")
    budget: int = 512
    steps: int = 64
    rounds: int = 5


def run(settings: Settings, report: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Measure; the result is plain data, ready for JSON. ``report`` is told each row."""
    session = kvchat.load(settings.model, device=settings.device, dtype=settings.dtype)
    rows = [row for context in settings.contexts for row in _context(session, context, settings, report)]
    return {
        "what": "median ms per decoded token",
        "settings": vars(settings) | {"model": session.info.model, "dtype": session.info.dtype},
        "environment": fingerprint(torch.device(session.info.device)),
        "rows": rows,
    }


def _context(session: Session, context: int, settings: Settings, report: Callable[[str], None]) -> list[dict[str, Any]]:
    ids = prose(session, context)
    session.truncate(0)
    session.switch("full")
    session.prefill(ids)
    times: dict[str, list[float]] = {name: [] for name in (GENERATE, *settings.modes)}
    device_bytes: dict[str, int] = {}
    for _ in range(settings.rounds):
        times[GENERATE].append(_generate_ms(session, ids, settings.steps))
        for mode in settings.modes:
            session.switch(mode, **_params(mode, settings))
            times[mode].append(_mode_ms(session, ids, settings.steps))
            device_bytes[mode] = session.snapshot().kv_device_bytes
    rows = [_row(context, name, times, device_bytes.get(name)) for name in times]
    for row in rows:
        report(_line(row))
    return rows


def _params(mode: str, settings: Settings) -> Params:
    return {"budget": settings.budget} if "budget" in PARAMETERS[mode].model_fields else {}


def _row(context: int, name: str, times: dict[str, list[float]], device_bytes: int | None) -> dict[str, Any]:
    ratios = [theirs / ours for theirs, ours in zip(times[GENERATE], times[name], strict=True)]
    return {
        "context": context,
        "who": name,
        "ms": statistics.median(times[name]),
        "times_faster_than_generate": statistics.median(ratios),
        "ratios": ratios,
        "kv_device_bytes": device_bytes,
    }


def _line(row: dict[str, Any]) -> str:
    ratio = row["times_faster_than_generate"]
    return f"{row['context']:>7} {row['who']:<12} {row['ms']:8.2f} ms  {ratio:5.2f} x generate"


def _mode_ms(session: Session, ids: Sequence[int], steps: int) -> float:
    """Median step after ``ids``, which are stored up to the last; the store is left as it was."""
    times = []
    session.truncate(len(ids) - 1)
    token = ids[-1]
    for _ in range(steps):
        began = time.perf_counter()
        token = int(session.step(token).argmax())
        times.append(time.perf_counter() - began)
    return 1000 * statistics.median(times[1:])


class _Clock:
    """A transformers streamer that notes when each token comes."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, _ids: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def _generate_ms(session: Session, ids: Sequence[int], steps: int) -> float:
    """Median interval between tokens of transformers' ``generate`` with its own cache and attention."""
    model, clock = session.model.model, _Clock()
    before = model.config._attn_implementation
    model.set_attn_implementation("sdpa")
    try:
        prompt = torch.tensor([list(ids)], device=session.model.device)
        arguments: dict[str, Any] = {"do_sample": False, "max_new_tokens": steps, "min_new_tokens": steps}
        with torch.inference_mode():
            model.generate(prompt, streamer=clock, **arguments)
    finally:
        model.set_attn_implementation(before)
    stamps = clock.times[1:]  # the first is the prompt's echo
    return 1000 * statistics.median(b - a for a, b in itertools.pairwise(stamps[1:]))
