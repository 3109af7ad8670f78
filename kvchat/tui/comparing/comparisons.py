"""Comparisons: a question answered in several modes at once, beside the conversation, which stays as it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvchat.config import modes
from kvchat.protocol.messages import (
    MAX_VARIANTS,
    Compare,
    Compared,
    Comparing,
    HideNeedle,
    NeedleHidden,
    Prefilled,
    Sampling,
    Stop,
    Turn,
    Variant,
)
from kvchat.tui.client import EngineClient
from kvchat.tui.comparing.variants import completed, seeded
from kvchat.tui.kept.branches import Branches
from kvchat.tui.running_comparison import RunningComparison
from kvchat.tui.state import ChatState, Phase
from kvchat.tui.view import ChatView


class Comparisons:
    """At most one at a time; ``running`` is None between them."""

    def __init__(self, state: ChatState, client: EngineClient, branches: Branches, view: ChatView) -> None:
        self.state = state
        self.client = client
        self.view = view
        self._branches = branches
        self.running: RunningComparison | None = None

    def begin(self, variants: Sequence[Variant]) -> None:
        """Compare modes on the question chosen in the transcript, else on the last one.

        No variant: full and the present mode; one: full and that one.

        Raises:
            UsageError: the engine is busy, there is no question, a variant is unknown or named twice, or the
                conversation is too long to send.
        """
        self._branches.require_ready()
        question = self._branches.chosen("user")
        chosen = completed(variants, self.state.mode)
        conversation, sampling = self.state.conversation, seeded(self.state.sampling)
        system = (Turn("system", conversation.system),) if conversation.system else ()
        path = (message.turn for message in conversation.path_to(question.id))
        self.client.send(Compare((*system, *path), chosen, sampling))
        self._start(RunningComparison(question.text, self._model, chosen, sampling))

    def search_needle(self, tokens: int) -> None:
        """Ask every mode for a fact hidden in a text of about ``tokens`` tokens.

        Raises:
            UsageError: the engine is busy.
        """
        self._branches.require_ready()
        sampling = seeded(Sampling(temperature=0.0))
        self.client.send(HideNeedle(tokens, sampling.seed or 0))
        variants = tuple(map(Variant, modes.mode_names()[:MAX_VARIANTS]))
        stage = "writing a long text …"
        self._start(RunningComparison("", self._model, variants, sampling, stage, fact=""))

    def ask_for(self, hidden: NeedleHidden) -> bool:
        """Ask the modes for the fact that has been hidden; False if it was stopped meanwhile."""
        running = self.running
        if running is None or running.is_stopping:
            self.abandon("Stopped before a mode was asked.")
            return False
        running.question, running.fact = hidden.turns[-1].content, hidden.fact
        running.sampling = replace(running.sampling, max_new_tokens=hidden.tokens)
        self.client.send(Compare(hidden.turns, running.variants, running.sampling))
        return True

    def note(self, progress: Prefilled | Comparing) -> None:
        """Show how far the comparison is."""
        if self.running is not None:
            if isinstance(progress, Prefilled):
                self.running.read(progress.done, progress.total)
            elif progress.index < len(self.running.variants):
                self.running.note(progress)
            self.view.show_comparison(self.running)

    def finish(self, compared: Compared) -> None:
        """Show the result."""
        running, self.running = self.running, None
        if running is not None:
            running.finish(compared)
            self.view.show_comparison(running)

    def abandon(self, reason: str) -> None:
        """No result will come."""
        running, self.running = self.running, None
        if running is not None:
            running.error = reason
            self.view.show_comparison(running)

    def stop(self) -> None:
        """End it early; what the variants have answered until then is the result."""
        if self.running is not None:
            self.client.send(Stop())
            self.running.stage, self.running.is_stopping = "stopping …", True
            self.view.show_comparison(self.running)

    @property
    def _model(self) -> str:
        return self.state.model_name

    def _start(self, running: RunningComparison) -> None:
        self.running = running
        self.state.enter_phase(Phase.COMPARING)
        self.view.show_state(self.state)
        self.view.show_comparison(running)
