"""Plots of measurements, drawn with matplotlib (the extra ``plot``) to SVG or PNG by the file's ending."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvchat.bench.plot import answers, closeness, speed
from kvchat.bench.plot.calibration import calibration
from kvchat.bench.plot.canvas import check
from kvchat.bench.plot.paper import paper
from kvchat.errors import UsageError

__all__ = ["calibration", "check", "draw"]

DRAWN: dict[str, Callable[[Mapping[str, Any], Path], None]] = {
    "agreement": closeness.agreement,
    "data": answers.data,
    "decode": speed.decode,
    "lengths": speed.lengths,
    "long-run": speed.long_run,
    "passkey": answers.passkey,
    "perplexity": closeness.perplexity,
    "prefill": speed.prefill,
    "recall": answers.recall,
    "switches": answers.switches,
    "turns": answers.turns,
}


def draw(result: Mapping[str, Any], file: Path) -> None:
    """Draw a complete result.

    Raises:
        UsageError: the experiment has no picture, or the file cannot be written.
    """
    name = result["experiment"]
    drawn = paper if "parts" in result else DRAWN.get(name)
    if drawn is None:
        raise UsageError(f'There is no picture of "{name}".', hint=f"There are pictures of {', '.join(sorted(DRAWN))}.")
    try:
        drawn(result, file)
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(
            f"The result of {name} cannot be drawn.", f"{type(error).__name__}: {error}.", "Measure it again."
        ) from None
