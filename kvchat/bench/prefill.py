"""Time and memory of prefill, compared with one forward pass of transformers in the same run.

The forward pass keeps the K/V of all layers on the device; kvchat keeps those of one layer there and the rest in RAM.
Both have a turn in each round, and a ratio compares times of the same round.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

from kvchat import units
from kvchat.bench import model_shapes, timing
from kvchat.bench.external.baselines import as_written
from kvchat.bench.frame import Frame, ModelChoice, Result, Row, experiment, methods, parsed
from kvchat.bench.settings import Prefill
from kvchat.engine.runner import ModelRunner, geometry_of, prefill_bytes_per_token, traits_of
from kvchat.errors import UsageError
from kvchat.kv import prefill
from kvchat.kv.manager import is_out_of_memory
from kvchat.kv.modes import build
from kvchat.models.load import LoadedModel


@dataclass(frozen=True)
class Reading:
    """Seconds, and peak bytes: allocated on a GPU, else the process's RAM; None if the system does not report it."""

    seconds: float
    peak_bytes: int | None


def run(settings: Prefill, choice: ModelChoice = ModelChoice(), frame: Frame | None = None) -> Result:
    """Measure and return plain data, ready for JSON: a row for each length.

    Raises:
        KvchatError: the model or mode is refused, or a prompt does not fit.
    """
    frame, found = frame or Frame(), methods([settings.mode])
    model = model_shapes.choose(settings.shape, choice, frame.progress)
    longest = max(settings.lengths) + settings.turn
    if longest > model.context:
        raise UsageError(
            "The prompt is longer than the model's context.",
            f"{max(settings.lengths):,} tokens and a turn of {settings.turn:,} after them are {longest:,}; "
            f"{model.name} reads {model.context:,}.",
            "Use shorter prompts.",
        )
    runner = ModelRunner(model, build(parsed(settings.mode), geometry_of(model), traits_of(model)))
    token_bytes = prefill_bytes_per_token(model) if model.device.type == "cuda" else None
    head = experiment(
        "prefill", "seconds and peak bytes", asdict(settings), found, model, weight_bytes=model.weight_bytes
    )
    cells = [{"tokens": length} for length in settings.lengths]
    return frame.measure(head, cells, lambda cell: [_row(settings, runner, cell["tokens"], token_bytes)], _line)


def _row(settings: Prefill, runner: ModelRunner, length: int, token_bytes: int | None) -> Row:
    model = runner.model
    draw = torch.Generator().manual_seed(length)
    ids = torch.randint(model.vocab, (length + settings.turn,), generator=draw).tolist()
    prompt, turn = ids[:length], ids[length:]
    chunk, predicted = _prepared(runner, prompt, token_bytes)
    _one_shot(model, prompt)
    ours, turns, theirs = [], [], []
    for _ in range(settings.rounds):
        theirs.append(_one_shot(model, prompt))
        _forget(runner)
        ours.append(_measured(model, lambda: _read(runner, prompt)))
        turns.append(_measured(model, lambda: _read(runner, turn)))
    ratios = [our.seconds / their.seconds for our, their in zip(ours, theirs, strict=True) if their]
    return {
        "tokens": length,
        "chunk": chunk,
        "seconds": statistics.median(reading.seconds for reading in ours),
        "peak_bytes": ours[-1].peak_bytes,
        "predicted_peak_bytes": predicted,
        "one_shot_seconds": statistics.median(their.seconds for their in theirs if their) if ratios else None,
        "one_shot_peak_bytes": _without_pool(runner, theirs[-1]),
        "times_one_shot": statistics.median(ratios) if ratios else None,
        "ratios": ratios,
        "turn_seconds": statistics.median(reading.seconds for reading in turns),
    }


def _without_pool(runner: ModelRunner, theirs: Reading | None) -> int | None:
    """Return the peak of the single forward pass without kvchat's host pool, which stays in RAM.

    If the pool were freed, kvchat's next prefill would have to allocate it again.
    """
    if theirs is None or theirs.peak_bytes is None:
        return None
    pool = 0 if runner.model.device.type == "cuda" else runner.kv.state.host.nbytes
    return theirs.peak_bytes - pool


def _prepared(runner: ModelRunner, prompt: list[int], token_bytes: int | None) -> tuple[int, int | None]:
    """Prefill once, untimed; return the size of the largest chunk and the predicted peak, None on a CPU."""
    _forget(runner)
    chunk = _read(runner, prompt)
    _forget(runner)
    if token_bytes is None:
        return chunk, None
    held = torch.cuda.memory_allocated(runner.model.device)
    taken = prefill.prefill_bytes(runner.kv.state.geometry, len(prompt) - chunk, chunk, token_bytes)
    return chunk, held + taken


def _forget(runner: ModelRunner) -> None:
    with torch.inference_mode():
        runner.kv.truncate(0)


def _read(runner: ModelRunner, ids: list[int]) -> int:
    """Store ``ids``; return the size of the largest chunk."""
    return max(len(chunk) for chunk, _ in runner.prefill(ids))


def _one_shot(model: LoadedModel, prompt: list[int]) -> Reading | None:
    """Time one forward pass of transformers with its own cache; None if it does not fit on the device."""
    tokens = torch.tensor([prompt], device=model.device)
    with as_written(model.model):
        try:
            return _measured(model, lambda: model.model(tokens, use_cache=True, logits_to_keep=1))
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return None


def _measured(model: LoadedModel, work: Callable[[], object]) -> Reading:
    device = model.device
    if device.type != "cuda":
        has_peak = timing.forget_peak()
        began = time.perf_counter()
        work()
        return Reading(time.perf_counter() - began, timing.read_peak() if has_peak else None)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    torch.cuda.synchronize(device)
    began = time.perf_counter()
    work()
    torch.cuda.synchronize(device)
    return Reading(time.perf_counter() - began, torch.cuda.max_memory_allocated(device))


def _line(row: Row) -> str:
    ratio, peaks = row["times_one_shot"], (row["peak_bytes"], row["one_shot_peak_bytes"])
    against = "one forward does not fit" if ratio is None else f"{ratio:5.2f} x one forward"
    memory = "" if peaks[0] is None else f"  peak {units.size(peaks[0])} ({units.size(peaks[1])})"
    turn = f"  then a turn {1000 * row['turn_seconds']:.0f} ms"
    return f"{row['tokens']:>7} tokens  {row['seconds']:7.3f} s  {against}{memory}{turn}"
