"""A long generation in one mode: device memory and time per step over its length."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import kvchat
from kvchat import units
from kvchat.bench.corpus import prose
from kvchat.bench.environment import fingerprint
from kvchat.bench.variant import parsed
from kvchat.engine.generate.sampler import Sampler, read
from kvchat.protocol.messages import Sampling

ROWS = 10


def run(
    tokens: int = 20_000, mode: str = "streaming", budget: int = 512, report: Callable[[str], None] = lambda line: None
) -> dict[str, Any]:
    """Generate ``tokens`` tokens after a short prompt, sampled with a seed; one row for each tenth."""
    session = kvchat.load()
    session.enter(parsed(mode, budget))
    sampler = Sampler(Sampling(temperature=0.8, seed=0), session.model.vocab, session.model.device)
    logits = session.prefill(prose(session.model.tokenizer, 64))
    rows = []
    for _ in range(ROWS):
        times = []
        for _ in range(tokens // ROWS):
            began = time.perf_counter()
            logits = session.step(read(sampler(logits)))
            times.append(time.perf_counter() - began)
        snapshot = session.snapshot()
        row = {
            "stored": session.total,
            "ms": 1000 * statistics.median(times),
            "kv_device_bytes": snapshot.kv_device_bytes,
            "kv_host_bytes": snapshot.kv_host_bytes,
            "read": snapshot.active,
            "finite": bool(logits.isfinite().all()),
        }
        size = units.size(row["kv_device_bytes"])
        report(f"{row['stored']:>7,} tokens stored  {row['ms']:6.2f} ms  {size} on the device")
        rows.append(row)
    environment = fingerprint(torch.device(session.info.device))
    named = f"{mode}, budget {budget}" if session.info.params.get("budget") else mode
    return {"what": f"{named}, {tokens} tokens", "environment": environment, "rows": rows}
