"""``kvchat calibrate``: measure a model for sync and speculative mode, with progress on stderr."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from kvchat import paths
from kvchat.bench import plot as plots
from kvchat.cli.output import echo, note, progress
from kvchat.config.modes import SyncParameters, parse
from kvchat.errors import UsageError
from kvchat.protocol.messages import Load

# Tokens of a text, those decoded after it in each way, and how many texts the budget is chosen on.
CONTEXT, STEPS, BOOKS, FACTS = 3072, 16, 1, 3


def calibrate(
    model: str,
    texts: Sequence[Path],
    clusters: int | None,
    rule: str,
    device: str,
    out: Path | None,
    plot: Path | None = None,
    coverage: float = 0.9,
) -> None:
    """Measure and save a calibration; print the representatives and the files' locations.

    Raises:
        KvchatError: the model, a text or an option is refused.
    """
    if out and not out.absolute().parent.is_dir():
        raise UsageError(f"There is no folder {out.absolute().parent}.", hint="Make it first.")
    parse(SyncParameters.name, {"representatives": rule, "clusters": clusters})
    if plot:
        plots.check(plot)
    # Imports torch, so after the checks.
    from kvchat.bench.coverage import Settings, choose
    from kvchat.engine import calibration as engine
    from kvchat.kv.coverage import BUDGETS
    from kvchat.models.load import load_model

    loaded = load_model(Load(model, device), progress)
    samples = engine.file_samples(loaded, texts) if texts else engine.default_samples(loaded)
    read = f"{len(samples)} parts of {', '.join(t.name for t in texts)}" if texts else f"{len(samples)} generated texts"
    measured = engine.calibrate(
        loaded, samples, read, clusters, lambda done, total: progress(f"Reading text {done} of {total}")
    )
    file = engine.save(measured, out)
    choice = choose(loaded, Settings((), min(CONTEXT, loaded.context // 2), STEPS, BOOKS, FACTS), coverage, progress)
    measured = replace(measured, choice=choice)
    progress("")
    chosen = engine.representatives(measured, rule)
    file = engine.save(measured, out)
    for layer, (heads, scores) in enumerate(zip(chosen, measured.retrieval, strict=True)):
        listed = ", ".join(f"{head} ({scores[head]:.3f})" for head in heads)
        echo(f"layer {layer:>3}: representative KV heads {listed}")
    given = ", ".join(f"{name}={value}" for name, value in choice.params.items())
    echo(f"speculative covers {choice.covered:.1%} of the attention in {choice.measured_on} with {given}")
    if choice.covered < coverage:
        note(f"No budget up to {max(BUDGETS):,} covers {coverage:.0%}: facts may be missed in speculative mode.")
    echo(f"calibration {file}")
    if plot:
        plots.calibration(measured.similarity, chosen, plot)
        echo(f"plot        {plot}")
    if out and file != paths.calibration_dir() / f"{measured.revision}.json":
        note(f"sync mode reads calibrations in {paths.calibration_dir()}, named by revision.")
