"""What the chat screen knows: plain data, changed by the user's actions and the engine's events."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, auto

from kvchat.config.modes import registered
from kvchat.protocol.messages import Finished, Loaded, Params, Sampling, Snapshot, Stats
from kvchat.tui.conversation import Conversation
from kvchat.units import count, figure, percent, size

ENDINGS = {"stopped": "stopped", "length": "token limit", "context": "context full", "stop": "stop string"}


class Phase(Enum):
    """What the engine is doing."""

    LOADING = auto()
    READY = auto()
    PREFILL = auto()
    ANSWERING = auto()
    DOWN = auto()

    @property
    def busy(self) -> bool:
        """Whether an answer is under way."""
        return self in (Phase.PREFILL, Phase.ANSWERING)


@dataclass
class ChatState:
    """``mode`` and ``params`` are what the engine is in; ``wanted`` is the mode last asked for.

    ``given`` are the values given at run time, by the mode they were given for, ``pending`` those the engine has not
    answered yet, ``later`` those that wait for a mode that has them.
    """

    conversation: Conversation
    sampling: Sampling
    mode: str
    params: Params = field(default_factory=dict)
    wanted: str = ""
    given: dict[str, Params] = field(default_factory=dict)
    pending: Params = field(default_factory=dict)
    later: Params = field(default_factory=dict)
    first_mode: str = ""
    phase: Phase = Phase.LOADING
    info: Loaded | None = None
    snapshot: Snapshot | None = None
    stats: list[Stats] = field(default_factory=list)

    def accept(self, mode: str, params: Params) -> None:
        """The engine is in ``mode`` with these parameters: of what was asked for it took what is among them."""
        taken = {name: value for name, value in self.pending.items() if params.get(name) == value}
        # Behind all others: of values given for several modes the last one counts.
        self.given[mode] = {**self.given.pop(mode, {}), **taken}
        self.pending.clear()

    def take_later(self, mode: str) -> Params:
        """What waits for a mode with such parameters, if ``mode`` has them; it waits no more."""
        known = registered()[mode].model_fields
        taken = {name: value for name, value in self.later.items() if name in known}
        self.later = {name: value for name, value in self.later.items() if name not in known}
        return taken

    def receipt(self, finished: Finished) -> str:
        """The line under an answer."""
        s = finished.stats
        modes = self.mode if self.first_mode in ("", self.mode) else f"{self.first_mode} → {self.mode}"
        parts = [f"{count(s.generated_tokens)} tok"]
        if s.decode_tokens_per_s is not None:
            parts.append(figure(s.decode_tokens_per_s, "tok/s", 1))
        if s.ttft_s is not None:
            parts.append(f"TTFT {figure(s.ttft_s, 's', 2)}")
        parts.append(modes)
        if s.active_tokens is not None:
            parts.append(f"mean active {count(s.active_tokens)} of {count(s.total_tokens)}")
        if finished.reason in ENDINGS:
            parts.append(ENDINGS[finished.reason])
        return " · ".join(parts)


def summary(stats: Iterable[Stats]) -> str:
    """All answers of this conversation, as an aligned table of numbers."""
    answers = list(stats)
    if not answers:
        return "No answers yet."
    rows = [
        ("answers", count(len(answers))),
        ("generated", f"{count(sum(s.generated_tokens for s in answers))} tok"),
        ("prefilled", f"{count(sum(s.prompt_tokens - s.reused_tokens for s in answers))} tok"),
        ("reused", f"{count(sum(s.reused_tokens for s in answers))} tok"),
        ("speed", figure(_mean(s.decode_tokens_per_s for s in answers), "tok/s", 1)),
        ("first token", figure(_mean(s.ttft_s for s in answers), "s", 2)),
        ("recalled", size(sum(s.recalled_bytes for s in answers))),
        ("hit rate", percent(_mean(s.recall_hit_rate for s in answers))),
        ("corrections", count(sum(s.corrections for s in answers))),
    ]
    return "\n".join(f"{label:<14}{value:>14}" for label, value in rows)


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
