"""A comparison while it is made: plain data, changed by the engine's events and drawn by its screen."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvchat.conversations.comparison import Comparison, label
from kvchat.protocol.messages import Compared, Comparing, Sampling, Variant
from kvchat.units import count


@dataclass
class RunningComparison:
    """``progress`` has what each variant has answered so far, ``result`` comes at the end.

    ``stage`` says what is being done, ``error`` why there is no result. ``fact`` is what the answers are searched for,
    empty until the engine has hidden it, None where nothing is hidden.
    """

    question: str
    model: str
    variants: tuple[Variant, ...]
    sampling: Sampling
    stage: str = "waiting for the engine …"
    progress: dict[int, Comparing] = field(default_factory=dict)
    result: Comparison | None = None
    error: str = ""
    fact: str | None = None
    is_stopping: bool = False

    @property
    def is_over(self) -> bool:
        """True if nothing more will come."""
        return self.result is not None or bool(self.error)

    def read(self, done: int, total: int) -> None:
        """Note that ``done`` of ``total`` tokens of the prompt have been read."""
        self.stage = f"reading {count(done)} of {count(total)} tokens …"

    def note(self, comparing: Comparing) -> None:
        """A variant has come so far."""
        self.progress[comparing.index] = comparing
        name = label(self.variants[comparing.index])
        if comparing.checked:
            self.stage = f"{name} is given the first answer: {count(comparing.checked)} tok"
        else:
            self.stage = f"{name} answers: {count(comparing.tokens)} tok"

    def finish(self, compared: Compared) -> None:
        """All has come."""
        self.result = Comparison(
            self.question, self.model, self.sampling, compared.prompt_tokens, self.variants, compared.runs
        )
