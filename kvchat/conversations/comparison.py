"""A comparison of modes: its table, its verdict in words, and both as a Markdown or JSON file."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvchat import files
from kvchat.conversations import export
from kvchat.protocol.figures import Run
from kvchat.protocol.messages import Sampling, Variant
from kvchat.units import MISSING, count, figure, percent, size

FIGURES = {
    "tok/s": "tokens written per second",
    "read": "share of stored tokens that a token read, on average over the answer",
    "fetched": "copied from RAM to the GPU for the answer",
    "hits": "share of the choice that was already on the device",
    "alike": "tokens at the start that match the first answer",
    "agree": "share of the first answer's tokens for which both find the same token most likely",
    "KL": "Kullback-Leibler divergence of the next token from the first answer, on average over its tokens, in nats",
}
"""The columns of figures, and their meanings."""
COLUMNS = ("", *FIGURES)
NOTHING = "–"  # in place of a figure that does not apply, such as a hit rate if nothing is recalled


@dataclass(frozen=True)
class Comparison:
    """``question``, answered by a model in the ``variants``; one run for each, fewer if it was stopped."""

    question: str
    model: str
    sampling: Sampling
    prompt_tokens: int
    variants: tuple[Variant, ...]
    runs: tuple[Run, ...]


def label(variant: Variant) -> str:
    """Return a variant as text: ``speculative budget=512``."""
    return " ".join((variant.mode, *(f"{name}={value}" for name, value in variant.params.items())))


def rows(comparison: Comparison) -> list[tuple[str, ...]]:
    """Return a row of ``COLUMNS`` for each run."""
    return [_row(label(v), run) for v, run in zip(comparison.variants, comparison.runs, strict=False)]


def verdicts(comparison: Comparison) -> list[str]:
    """Return a sentence for each run after the first: where its text first differs, and how well they agree."""
    names = [label(variant) for variant in comparison.variants]
    others = list(zip(names, comparison.runs, strict=False))[1:]
    return [_verdict(name, run, names[0]) for name, run in others]


def first_difference(runs: Sequence[Run]) -> int | None:
    """Return how many tokens all answers have in common at the start; None if they do not differ."""
    found = [run.agreement.first_difference for run in runs if run.agreement]
    return min((at for at in found if at is not None), default=None)


def to_text(comparison: Comparison) -> str:
    """Return the answers, the table in aligned columns and the verdict, as lines for a terminal."""
    answers = [
        f"── {label(variant)} ──\n{run.text.strip() or run.refusal}"
        for variant, run in zip(comparison.variants, comparison.runs, strict=False)
    ]
    lines = [COLUMNS, *rows(comparison)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    table = "\n".join(
        "  ".join((f"{line[0]:<{widths[0]}}", *map(str.rjust, line[1:], widths[1:]))).rstrip() for line in lines
    )
    head = f"seed {comparison.sampling.seed}, {count(comparison.prompt_tokens, 'prompt token')} processed once"
    return "\n\n".join(filter(None, (*answers, table, "\n".join(verdicts(comparison)), head)))


def to_markdown(comparison: Comparison) -> str:
    """Return the question, the table, the verdict and the answers, as Markdown."""
    sampling = comparison.sampling
    drawn = "the model's own temperature" if sampling.temperature is None else f"temperature {sampling.temperature:g}"
    head = f"{comparison.model}, {drawn}, seed {sampling.seed}"
    lines = [COLUMNS, ("---", *["---:"] * (len(COLUMNS) - 1)), *rows(comparison)]
    parts = [
        "# Comparison",
        comparison.question.strip(),
        f"{head}, {count(comparison.prompt_tokens, 'prompt token')} processed once.",
        "\n".join(f"| {' | '.join(line)} |" for line in lines),
        "\n".join(f"- {sentence}" for sentence in verdicts(comparison)),
    ]
    for variant, run in zip(comparison.variants, comparison.runs, strict=False):
        parts.append(f"## {label(variant)}\n\n{run.text.strip() or run.refusal}")
    return "\n\n".join(part for part in parts if part) + "\n"


def to_json(comparison: Comparison) -> str:
    """Return all figures, with the text of each token, as JSON."""
    return json.dumps({"format": "kvchat-comparison", "version": 1, **dataclasses.asdict(comparison)}, indent=2) + "\n"


def write(comparison: Comparison, path: Path) -> None:
    """Write a comparison to a new file, in the format of its ending.

    Raises:
        UsageError: the same as ``check``, or it cannot be written.
    """
    check(path)
    export.write_new(path, FORMATS[path.suffix](comparison))


def check(path: Path) -> None:
    """Refuse a file that ``write`` would refuse, before the work of comparing.

    Raises:
        UsageError: the ending names no format, the file exists, or its folder does not.
    """
    export.check_ending(path, FORMATS)
    files.check_new(path)


def _row(name: str, run: Run) -> tuple[str, ...]:
    if run.refusal:
        return (name, "refused", *[NOTHING] * (len(COLUMNS) - 2))
    s, agreement = run.stats, run.agreement
    figures = (figure(s.decode_tokens_per_s, digits=1), percent(s.read_share), size(s.recalled_bytes))
    hits = NOTHING if s.recall_hit_rate is None else percent(s.recall_hit_rate)
    if agreement is None:
        return (name, *figures, hits, *[NOTHING] * 3)
    alike = "all" if agreement.first_difference is None else count(agreement.first_difference)
    divergence = MISSING if agreement.kl_mean is None else f"{agreement.kl_mean:.3f}"
    return (name, *figures, hits, alike, percent(agreement.same_choice), divergence)


def _verdict(name: str, run: Run, first: str) -> str:
    if run.refusal:
        return f"{name} is refused: {run.refusal}"
    if run.agreement is None:
        return f"{name} cannot be compared."
    a = run.agreement
    text = f"draws the same tokens as {first}"
    if a.first_difference is not None:
        text = f"differs from token {count(a.first_difference + 1)} on"
    if a.same_choice is None:
        return f"{name} {text}."
    divergence = "" if a.kl_mean is None else f" (KL {a.kl_mean:.3f} nats on average, {a.kl_max:.3f} at worst)"
    chosen = f"given {first}'s text, it agrees on the next token for {percent(a.same_choice)} of {count(a.tokens)}"
    may_be_smaller = "budget" in run.params and run.stats.read_share == 1
    advice = " It read everything: a smaller budget would tell them apart." if may_be_smaller else ""
    return f"{name} {text}; {chosen}{divergence}.{advice}"


FORMATS: dict[str, Callable[[Comparison], str]] = {".md": to_markdown, ".json": to_json}
