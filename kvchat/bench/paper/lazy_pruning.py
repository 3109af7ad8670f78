"""Lazy Pruning, Slack and Max_Drop (streaming mode): Tables 1 to 3, with the cells that the paper leaves empty.

As in the paper, the baseline has no cache: for every token it recomputes the last C tokens.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvchat.bench.external.baselines import as_written
from kvchat.bench.frame import Row, parsed
from kvchat.bench.paper.study import Lab, Part, Study, row
from kvchat.errors import UsageError

PROMPT = 16
SINK = 4
WARM_UP = 32  # tokens
BASELINE = "sliding window, recomputed"
# R, sigma and delta are from the paper's toy example, its only values; each ablation turns one mechanism off.
OURS = {
    "StreamingLLM": "R=1,sigma=0,delta=0",
    "Ours (Lazy, Slack, Max_Drop)": "R=32,sigma=16,delta=32",
}
ABLATIONS = {
    "w/o Slack (sigma=0)": "R=32,sigma=0,delta=32",
    "w/o Max_Drop (delta=0)": "R=32,sigma=16,delta=0",
    "Full (Lazy, Slack, Max_Drop)": "R=32,sigma=16,delta=32",
}


@dataclass(frozen=True)
class Settings:
    """``cap`` is the effective context C; ``long`` and ``short`` are text lengths in tokens, after a warm-up."""

    cap: int = 256
    long: int = 600
    short: int = 200
    trials: int = 3


def _variants(settings: Settings) -> list[str]:
    return ["full", *(_streaming(settings, params) for params in {**OURS, **ABLATIONS}.values())]


def _streaming(settings: Settings, params: str) -> str:
    if settings.cap <= SINK:
        raise UsageError(
            f"cap={settings.cap} is not valid.", hint=f"It must hold {SINK} sinks and a window after them."
        )
    return f"streaming:sink={SINK},window={settings.cap - SINK},{params}"


def _table(lab: Lab, tokens: int, variants: dict[str, str], published: dict[str, float]) -> list[Row]:
    """Run every configuration in each trial, so that other load on the machine affects all equally."""
    lines: dict[str, str | None] = {BASELINE: None, **variants}
    ids = lab.passage(PROMPT + tokens)
    for params in lines.values():
        _decoded(lab, ids[: PROMPT + WARM_UP], params)
    labels = [f"{name}, trial {number + 1}" for number in range(lab.settings.trials) for name in lines]
    decoded = lab.each(labels, lambda label: _decoded(lab, ids, lines[label.rpartition(", trial ")[0]]))
    trials = {name: decoded[place :: len(lines)] for place, name in enumerate(lines)}
    base = statistics.fmean(each["tpot"] for each in trials[BASELINE])
    return [row(name, _figures(trials[name], base), published if name == BASELINE else None) for name in lines]


def _figures(trials: Sequence[dict[str, Any]], base: float) -> dict[str, Any]:
    ttft, tpot = ([each[name] for each in trials] for name in ("ttft", "tpot"))
    peaks = [each["peak"] for each in trials if each["peak"]]
    return {
        "PPL": trials[0]["perplexity"],
        "TPOT in ms": statistics.fmean(tpot),
        "TPOT std": _deviation(tpot),
        "speedup": base / statistics.fmean(tpot),
        "TTFT in ms": statistics.fmean(ttft),
        "TTFT std": _deviation(ttft),
        "tokens/s": statistics.fmean(1000 / each for each in tpot),
        "seconds": statistics.fmean(each["seconds"] for each in trials),
        "K/V MB": trials[0]["kv"] / 1e6,
        "peak MB": max(peaks) / 1e6 if peaks else None,
    }


def _deviation(values: Sequence[float]) -> float | None:
    return statistics.stdev(values) if len(values) > 1 else None


def _decoded(lab: Lab, ids: Sequence[int], params: str | None) -> dict[str, Any]:
    """Decode the text once: time to the first token and per token in ms, perplexity, peak bytes on a GPU."""
    device = lab.model.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    began = time.perf_counter()
    step = _recomputing(lab, ids) if params is None else _stepping(lab, ids, params)
    logits = step(PROMPT)
    first = time.perf_counter() - began
    nats, began = [], time.perf_counter()
    for position in range(PROMPT, len(ids)):
        nats.append(-float(logits.float().log_softmax(-1)[ids[position]]))  # waits for the device
        logits = step(position + 1)
    seconds = time.perf_counter() - began
    return {
        "ttft": 1000 * first,
        "seconds": first + seconds,
        "kv": 0 if params is None else lab.walk.runner.kv.device_bytes,
        "tpot": 1000 * seconds / len(nats),
        "perplexity": float(torch.tensor(nats, dtype=torch.float64).mean().exp()),
        "peak": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
    }


def _stepping(lab: Lab, ids: Sequence[int], params: str) -> Callable[[int], Tensor]:
    chosen = parsed(_streaming(lab.settings, params))

    def step(end: int) -> Tensor:
        """Return the logits after the first ``end`` ids."""
        if end == PROMPT:
            return lab.walk.begin(ids[:PROMPT], chosen, len(ids) - PROMPT)
        return lab.walk.step(ids[end - 1])

    return step


def _recomputing(lab: Lab, ids: Sequence[int]) -> Callable[[int], Tensor]:
    tokens = torch.tensor([ids], device=lab.model.device)

    def step(end: int) -> Tensor:
        with as_written(lab.model.model):
            window = tokens[:, max(0, end - lab.settings.cap) : end]
            logits: Tensor = lab.model.model(window, use_cache=False, logits_to_keep=1).logits[0, -1]
            return logits

    return step


PARTS = {
    "table-1": Part(
        "Table 1: a text longer than C (PG19 in the paper)",
        "The paper ran Pythia-2.8B with C = 2,048 and leaves the rows of StreamingLLM and Ours empty. StreamingLLM is "
        "kvchat's code with the three mechanisms off. Mean and standard deviation of the trials after a warm-up; times "
        "depend on what else runs on the machine. K/V MB is on the device; peak memory is measured on a GPU only.",
        lambda lab: _table(
            lab, lab.settings.long, OURS, {"TPOT in ms": 100.53, "speedup": 1.0, "PPL": 19.761, "peak MB": 5722}
        ),
    ),
    "table-2": Part(
        "Table 2: a text shorter than C (WikiText-103 in the paper)",
        "Nothing is pruned, so every perplexity is that of full attention.",
        lambda lab: _table(lab, lab.settings.short, OURS, {"TPOT in ms": 98.86, "speedup": 1.0, "PPL": 9.359}),
    ),
    "table-3": Part(
        "Table 3: ablations",
        "The paper leaves all cells empty. By Eq. 8, sigma = 0 and delta = 0 both prune to C, and so does the full "
        "method with the paper's delta = R when it decodes one token at a time: the perplexities must be equal.",
        lambda lab: _table(lab, lab.settings.long, ABLATIONS, {}),
    ),
}
STUDY = Study("lazy-pruning", "streaming mode: a bounded cache against recomputing a window", PARTS, _variants)
