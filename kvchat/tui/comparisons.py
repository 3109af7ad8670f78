"""Comparing modes on a question or on a hidden fact, without touching the conversation.

Variants are written as ``streaming budget=256 sync``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvchat.config import modes
from kvchat.conversations.comparison import label
from kvchat.errors import UsageError, resolve
from kvchat.foreign_text import visible
from kvchat.protocol import messages
from kvchat.protocol.client import EngineClient
from kvchat.protocol.figures import Run
from kvchat.tui.branches import Branches
from kvchat.tui.prompt.arguments import parse_assignments
from kvchat.tui.state import ChatState, Phase, RunningComparison
from kvchat.tui.view import ChatView
from kvchat.units import figure, percent, size

HEADINGS = ("", "answer", "", "read", "fetched", "tok/s")
FOUND, MISSED, STOPPED, WAITING = "✓ found", "✗ missed", "stopped", "…"


@dataclass(eq=False)
class Comparisons:
    """Starts and follows comparisons, one at a time; ``running`` is None between them."""

    state: ChatState
    client: EngineClient
    branches: Branches
    view: ChatView
    running: RunningComparison | None = None

    def begin(self, variants: Sequence[messages.Variant]) -> None:
        """Compare modes on the question chosen in the transcript, else on the last one; ``completed`` adds variants."""
        self.state.refuse_served()
        self.branches.require_ready()
        question = self.branches.chosen_question()
        chosen = completed(variants, self.state.mode)
        conversation, sampling = self.state.conversation, self.state.sampling.seeded()
        system = (messages.Turn("system", conversation.system),) if conversation.system else ()
        path = (message.turn for message in conversation.path_to(question.id))
        self.client.send(messages.Compare((*system, *path), chosen, sampling))
        self._start(RunningComparison(question.text, self.state.model_name, chosen, sampling))

    def search_needle(self, tokens: int) -> None:
        """Ask every mode for a fact hidden in a text of about ``tokens`` tokens."""
        self.state.refuse_served()
        self.branches.require_ready()
        sampling = messages.Sampling(temperature=0.0).seeded()
        self.client.send(messages.HideNeedle(tokens, sampling.seed or 0))
        variants = tuple(map(messages.Variant, modes.mode_names()[: messages.MAX_VARIANTS]))
        stage = "writing a long text …"
        self._start(RunningComparison("", self.state.model_name, variants, sampling, stage, fact=""))

    def ask_for(self, hidden: messages.NeedleHidden) -> bool:
        """Ask the modes for the hidden fact; return False if the comparison was stopped meanwhile."""
        running = self.running
        if running is None or running.is_stopping:
            self.abandon("Stopped before any mode was asked.")
            return False
        running.question, running.fact = hidden.turns[-1].content, hidden.fact
        running.sampling = replace(running.sampling, max_new_tokens=hidden.tokens)
        self.client.send(messages.Compare(hidden.turns, running.variants, running.sampling))
        return True

    def note(self, progress: messages.Prefilled | messages.Comparing) -> None:
        if self.running is not None:
            if isinstance(progress, messages.Prefilled):
                self.running.read(progress.done, progress.total)
            elif progress.index < len(self.running.variants):
                self.running.note(progress)
            self.view.show_comparison(self.running)

    def finish(self, compared: messages.Compared) -> None:
        running, self.running = self.running, None
        if running is not None:
            running.finish(compared)
            self.view.show_comparison(running)

    def abandon(self, reason: str) -> None:
        running, self.running = self.running, None
        if running is not None:
            running.error = reason
            self.view.show_comparison(running)

    def stop(self) -> None:
        """End the comparison early; its result is what the variants have answered so far."""
        if self.running is not None:
            self.client.send(messages.Stop())
            self.running.stage, self.running.is_stopping = "stopping …", True
            self.view.show_comparison(self.running)

    def _start(self, running: RunningComparison) -> None:
        self.running = running
        self.state.enter_phase(Phase.COMPARING)
        self.view.show_state(self.state)
        self.view.show_comparison(running)


def parse_variants(words: Sequence[str]) -> list[messages.Variant]:
    """Parse ``["streaming", "budget=256", "sync"]``: each mode, followed by its parameters."""
    groups: list[list[str]] = []
    for word in words:
        if "=" not in word:
            groups.append([word])
        elif groups:
            groups[-1].append(word)
        else:
            raise UsageError(f"{word} is before the first mode.", hint="Put a mode first: full streaming budget=256")
    if len(groups) > messages.MAX_VARIANTS:
        raise UsageError(
            f"{len(groups)} modes are too many.",
            f"At most {messages.MAX_VARIANTS} are compared at once.",
            "Drop some of them.",
        )
    known = modes.registered()
    return [messages.Variant(resolve(mode, known, "KV mode"), parse_assignments(words)) for mode, *words in groups]


def completed(variants: Sequence[messages.Variant], mode: str) -> tuple[messages.Variant, ...]:
    """Return at least two variants: add full mode and, if none or only full is given, the current ``mode``."""
    chosen = tuple(variants)
    if len(chosen) < 2:
        first = messages.Variant(modes.REFERENCE)
        current = messages.Variant(modes.COMPARED if mode in (modes.REFERENCE, modes.AUTO) else mode)
        chosen = (first, *([one for one in chosen if one != first] or [current]))
    for variant in chosen:
        modes.parse(variant.mode, variant.params)
    if len(set(map(label, chosen))) < len(chosen):
        raise UsageError("A mode is listed twice.", hint="Use another budget for one: sync sync budget=256")
    return chosen


def needle_rows(shown: RunningComparison) -> list[tuple[str, ...]]:
    """Return a row per mode: name, answer, whether it has the fact, share of the text read, bytes fetched, tokens/s."""
    runs = dict(enumerate(shown.result.runs)) if shown.result else {}
    rows = list[tuple[str, ...]]()
    for index, variant in enumerate(shown.variants):
        if (run := runs.get(index)) and run.refusal:
            rows.append((variant.mode, _line(run.refusal), "refused", "", "", ""))
        elif run:
            s = run.stats
            figures = percent(s.read_share), size(s.recalled_bytes), figure(s.decode_tokens_per_s, digits=1)
            rows.append((variant.mode, _line(run.text), _outcome(run, shown.fact), *figures))
        else:
            said = shown.progress[index].text if index in shown.progress else ""
            rows.append((variant.mode, _line(said), "" if shown.is_over else WAITING, "", "", ""))
    return rows


def verdict(shown: RunningComparison) -> str:
    """Say which mode found the fact with the least reading, and which missed it; if full mode did, what that means."""
    if shown.result is None:
        return shown.error
    runs = [run for run in shown.result.runs if not run.refusal and _outcome(run, shown.fact) != STOPPED]
    found = [run for run in runs if is_found(run, shown.fact)]
    if runs and runs[0].mode == modes.REFERENCE and runs[0] not in found:
        return (
            f"{modes.REFERENCE} misses it: this model cannot answer at this length, so the answers say nothing"
            " about the modes; try a shorter text, as in /needle 256, or a larger model."
        )
    missed = [run.mode for run in runs if run not in found]
    sentences = [f"{', '.join(missed)} did not find it."] if missed else []
    if found:
        least = min(found, key=lambda run: 1.0 if run.stats.read_share is None else run.stats.read_share)
        sentences.insert(
            0, f"{least.mode} found it and read {percent(least.stats.read_share)} of the text at each token."
        )
    if found and runs[0].mode == modes.REFERENCE and (runs[0].stats.read_share or 1.0) < 1.0:
        sentences.append(f"{modes.REFERENCE} does not read all of it either: some layers have a sliding window.")
    return " ".join(sentences) or "No mode answered."


def is_found(run: Run, fact: str | None) -> bool:
    """Return whether the answer contains the fact, ignoring case."""
    return bool(fact) and (fact or "").lower() in run.text.lower()


def _outcome(run: Run, fact: str | None) -> str:
    missed = STOPPED if run.reason == "stopped" else MISSED  # it might still have found it
    return FOUND if is_found(run, fact) else missed


def _line(text: str) -> str:
    return visible(" ".join(text.split()))
