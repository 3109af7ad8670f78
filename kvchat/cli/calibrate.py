"""``kvchat calibrate``: measure a model's KV heads for sync and speculative mode, with progress on stderr."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvchat import paths
from kvchat.bench import plot as plots
from kvchat.cli.output import echo, note, progress
from kvchat.config.modes import SyncParameters, parse
from kvchat.errors import UsageError
from kvchat.protocol.messages import Load


def calibrate(
    model: str,
    texts: Sequence[Path],
    clusters: int | None,
    rule: str,
    device: str,
    out: Path | None,
    plot: Path | None = None,
    corrections: float = 0.2,
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
    from kvchat.engine import calibration as engine
    from kvchat.engine.model.load import load_model

    loaded = load_model(Load(model, device), progress)
    samples = engine.file_samples(loaded, texts) if texts else engine.default_samples(loaded)
    read = f"{len(samples)} parts of {', '.join(t.name for t in texts)}" if texts else f"{len(samples)} generated texts"
    measured = engine.calibrate(
        loaded, samples, read, clusters, lambda done, total: progress(f"Reading text {done} of {total}")
    )
    progress("")
    chosen = engine.representatives(measured, rule)
    file = engine.save(measured, out)
    for layer, (heads, scores) in enumerate(zip(chosen, measured.retrieval, strict=True)):
        listed = ", ".join(f"{head} ({scores[head]:.3f})" for head in heads)
        echo(f"layer {layer:>3}: representative KV heads {listed}")
    tau = measured.tau_for(corrections)
    echo(f"speculative by pages corrects {corrections:.0%} of heads and steps in such text with tau={tau:.2f}")
    echo(f"calibration {file}")
    if plot:
        plots.calibration(measured.similarity, chosen, plot)
        echo(f"plot        {plot}")
    if out and file != paths.calibration_dir() / f"{measured.revision}.json":
        note(f"sync mode reads calibrations in {paths.calibration_dir()}, named by revision.")
