"""The needle demonstration's table: what each mode answered, whether the fact is in it, what was read for it."""

from __future__ import annotations

from kvchat.config.modes import REFERENCE
from kvchat.foreign_text import visible
from kvchat.protocol.figures import Run
from kvchat.tui.running_comparison import RunningComparison
from kvchat.units import figure, percent, size

HEADINGS = ("", "answer", "", "read", "fetched", "tok/s")
FOUND, MISSED, WAITING = "✓ found", "✗ missed", "…"


def needle_rows(shown: RunningComparison) -> list[tuple[str, ...]]:
    """Mode, answer, whether the fact is in it, share of the text read, bytes fetched and tokens per second."""
    runs = dict(enumerate(shown.result.runs)) if shown.result else {}
    rows = []
    for index, variant in enumerate(shown.variants):
        if run := runs.get(index):
            rows.append((variant.mode, *_cells(run, shown.fact or "")))
        else:
            said = shown.progress[index].text if index in shown.progress else ""
            rows.append((variant.mode, _line(said), "" if shown.is_over else WAITING, "", "", ""))
    return rows


def verdict(shown: RunningComparison) -> str:
    """Who found it with the least read, and who did not; where full mode misses, what that means."""
    if shown.result is None:
        return shown.error
    runs = [run for run in shown.result.runs if not run.refusal]
    found = [run for run in runs if is_found(run, shown.fact)]
    if runs and runs[0].mode == REFERENCE and runs[0] not in found:
        return (
            f"{REFERENCE} reads everything and misses it: this model cannot answer at this length, and the other modes"
            " say nothing about it; try a shorter text, as in /needle 500."
        )
    missed = [run.mode for run in runs if run not in found]
    sentences = [f"{', '.join(missed)} did not find it."] if missed else []
    if found:
        least = min(found, key=lambda run: 1.0 if run.stats.read_share is None else run.stats.read_share)
        sentences.insert(
            0, f"{least.mode} found it and read {percent(least.stats.read_share)} of the text at each token."
        )
    return " ".join(sentences) or "No mode has answered."


def is_found(run: Run, fact: str | None) -> bool:
    """True if the answer has the fact in it, in whatever case."""
    return bool(fact) and (fact or "").lower() in run.text.lower()


def _cells(run: Run, fact: str) -> tuple[str, ...]:
    if run.refusal:
        return (_line(run.refusal), "refused", "", "", "")
    s = run.stats
    found = FOUND if is_found(run, fact) else MISSED
    return (
        _line(run.text), found, percent(s.read_share), size(s.recalled_bytes), figure(s.decode_tokens_per_s, digits=1),
    )  # fmt: skip


def _line(text: str) -> str:
    return visible(" ".join(text.split()))
