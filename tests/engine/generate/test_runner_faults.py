"""Memory that runs out at the n-th operation of torch, anywhere: what is stored stays, and the same works afterwards.

Every operation of every mode is cut short at some places on one architecture; at all places on all architectures with
KVCHAT_TEST_FAULTS=all.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import cycle, product

import pytest
import torch
from support.memory_faults import EVERYWHERE, MemoryRunsOut
from support.tiny_runner import PARAMS, loaded, mode_of, prefilled, runner_of, token_ids

from kvchat.engine.generate.runner import ModelRunner
from kvchat.errors import DoesNotFitError
from kvchat.kv.inspect import check_integrity

PLACES = 4
ARCHITECTURES = ("llama", "gemma2", "deepseek_v3")
ROWS = list(product(ARCHITECTURES, PARAMS) if EVERYWHERE else zip(cycle(ARCHITECTURES), PARAMS, strict=False))
TOKENS, KEPT, NEW = 90, 50, token_ids(24, seed=3)


def grown(runner: ModelRunner) -> None:
    """The step that needs more slots and pages, and those before it."""
    while runner.kv.total <= 128:
        runner.step(7)


tiny = cache(loaded)

OPERATIONS: dict[str, Callable[[ModelRunner], object]] = {
    "step": lambda runner: runner.step(7),
    "growth": grown,
    "prefill": lambda runner: list(runner.prefill(NEW[runner.kv.total - TOKENS :])),
    "truncate": lambda runner: runner.truncate(KEPT),
}


def fresh(model, row: str, operation: str) -> ModelRunner:
    runner = runner_of(model)
    runner.chunk = 16
    with torch.inference_mode():
        runner.kv.switch(mode_of(model, row))
    prefilled(runner, token_ids(TOKENS - 4))
    for token in token_ids(4, seed=1):
        runner.step(token)
    while operation == "growth" and runner.kv.total < 127:
        runner.step(7)
    return runner


def dense(runner: ModelRunner, tokens: int) -> list[torch.Tensor]:
    layers = range(runner.kv.state.geometry.layers)
    return [part[..., :tokens, :].clone() for layer in layers for part in runner.kv.state.host.dense(layer, tokens)]


@pytest.mark.slow
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(("architecture", "row"), ROWS)
def test_nothing_is_lost_wherever_memory_runs_out(architecture: str, row: str, operation: str) -> None:
    model = tiny(architecture)
    clean = fresh(model, row, operation)
    run = OPERATIONS[operation]
    with MemoryRunsOut() as counting:
        run(clean)
    logits = clean.step(9)
    step = 1 if EVERYWHERE else max(1, counting.count // PLACES)
    for place in range(1, counting.count + 1, step):
        for places in ((place,), (place, place + 1)):
            runner = fresh(model, row, operation)
            before, held = runner.kv.total, dense(runner, runner.kv.total)
            with pytest.raises(DoesNotFitError), MemoryRunsOut(*places):
                run(runner)
            total = runner.kv.total
            assert total >= (KEPT if operation == "truncate" else before), places
            kept = min(before, total)
            now = dense(runner, kept)
            assert all(torch.equal(a[..., :kept, :], b) for a, b in zip(held, now, strict=True)), places
            run(runner)
            assert runner.kv.total == clean.kv.total - 1, places
            again = runner.step(9)
            assert again.isfinite().all()
            if row == "full":
                assert torch.equal(again, logits), places
            check_integrity(runner.kv.state)
