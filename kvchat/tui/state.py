"""The state of the chat: plain data, changed by the user's actions and the engine's events."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Any

from kvchat.config.modes import asked_for, registered
from kvchat.conversations import attachments
from kvchat.conversations.conversation import CUT_OFF, Conversation, Message
from kvchat.models.catalog import short_name
from kvchat.protocol.figures import Params, Price, Snapshot, Stats
from kvchat.protocol.messages import Details, Finished, Loaded, Sampling, Switched
from kvchat.tui import visibility
from kvchat.tui.gpu_history import GpuHistory
from kvchat.tui.visibility import Mark
from kvchat.units import count, figure, percent, size

Footed = tuple[Message, str]
PINNED = "◆ pinned"
ENDINGS = {"stopped": "stopped", "length": "token limit", "context": "context full", "stop": "stop string"}


CORRECTED = "choices of heads replaced before attention because the query had turned, of all choices"
RECEIPT = {
    "read": "stored tokens that a token attended to, as a share, in the mean over the answer, and how many were stored",
    "covered": "share of the attention to everything stored that fell on what was read: the least it was in the answer",
    "corrected": CORRECTED,
    "mean C": "cosine of a head's query to the one before, in the mean over the answer: 1 is no turn",
    "fetched in": "time to fetch for one token: the median, and what 95 % of the last tokens stay below",
    "waited": "the part of that time that the model waited, again the median and what 95 % stay below",
}
"""What the words of a receipt mean, but for those that the status bar has too."""
SUMS = {
    "answers": "how many, those on other branches included; the rows below add them up or take their mean",
    "generated": "tokens that the model wrote",
    "prefilled": "tokens of prompts that the model read, each after what was stored already",
    "reused": "tokens of prompts that were stored already, so that they were not read again",
    "speed": "tokens written a second, by the time that all answers took",
    "first token": "from a question to the first token of its answer, in the mean",
    "read": "stored tokens that a token attended to, as a share, in the mean over all tokens",
    "covered": "share of the attention to everything stored that fell on what was read, on average over all tokens",
    "fetched": "copied from host to device",
    "already there": "of what was chosen, the share that was on the device already",
    "corrected": CORRECTED,
}
"""What the rows of ``/stats`` mean."""


class Phase(Enum):
    """The engine's present work."""

    LOADING = auto()
    READY = auto()
    PREFILL = auto()
    ANSWERING = auto()
    COMPARING = auto()
    DOWN = auto()

    @property
    def busy(self) -> bool:
        """True if an answer or a comparison is under way."""
        return self in (Phase.PREFILL, Phase.ANSWERING, Phase.COMPARING)


@dataclass
class ChatState:
    """``mode`` and ``params`` are in force; ``wanted`` is the mode last asked for, ``stage`` a step of loading.
    ``download`` tells how far a download is, empty without one.

    ``given`` holds the values given at run time by the mode they were given for, as the engine last said, ``pending``
    those it has not answered yet, ``later`` those kept for the next mode that has them, ``awaiting`` those kept for a
    mode by its name. ``first_mode`` is that of the answer's start, ``prompt_tokens`` the length of its prompt, empty
    and None while they are not known. ``edited`` is the id of the message that the next text sent takes the place of.
    ``is_stored`` says whether the engine's K/V are of this conversation, not of the one before. ``settings`` are those
    of the modes.
    """

    conversation: Conversation
    sampling: Sampling
    mode: str
    params: Params = field(default_factory=dict)
    settings: Mapping[str, Params] = field(default_factory=dict)
    wanted: str = ""
    given: dict[str, Params] = field(default_factory=dict)
    pending: dict[str, Params] = field(default_factory=dict)
    later: Params = field(default_factory=dict)
    awaiting: dict[str, Params] = field(default_factory=dict)
    first_mode: str = ""
    prompt_tokens: int | None = None
    phase: Phase = Phase.LOADING
    stage: str = ""
    download: str = ""
    edited: str | None = None
    is_stored: bool = False
    info: Loaded | None = None
    snapshot: Snapshot | None = None
    details: Details | None = None
    gpu_history: GpuHistory = field(default_factory=GpuHistory)

    @property
    def parameters(self) -> Mapping[str, Any]:
        """The fields of the present mode's parameters by name; none of a mode that only the engine knows."""
        return registered()[self.mode].model_fields if self.mode in registered() else {}

    @property
    def model_name(self) -> str:
        """The name of the model in use and what its weights are, "" before one is loaded: ``Qwen3-4B, int4``."""
        return f"{short_name(self.info.model)}, {self.info.weights or self.info.dtype}" if self.info else ""

    def note_mode(self) -> None:
        """Note in the conversation which mode it is in, and what was asked for in it."""
        self.conversation.mode = self.mode
        self.conversation.params = asked_for(self.mode, self.settings, self.given)

    def marks(self, snapshot: Snapshot) -> Callable[[str], Mark | None]:
        """The mark of a message of the path by its id: how much of it the model reads, None where nothing is stored."""
        ranges, messages = self._ranges(snapshot.total), self.conversation.messages

        def mark(id: str) -> Mark | None:
            pinned = id in messages and messages[id].pinned
            return visibility.mark(*ranges[id], snapshot, pinned) if id in ranges else None

        return mark

    def message_at(self, position: int) -> str | None:
        """The id of the message in which a stored token lies; None where it is not known."""
        return visibility.message_at(self._ranges(self.snapshot.total), position) if self.snapshot else None

    def _ranges(self, total: int) -> visibility.Ranges:
        in_progress = self.prompt_tokens if self.phase.busy else None
        return visibility.message_ranges(self.conversation.path, in_progress, total)

    @property
    def edits_answer(self) -> bool:
        """True if the next text sent takes the place of an answer."""
        return self.edited is not None and self.conversation.messages[self.edited].role == "assistant"

    @property
    def file_limit(self) -> int:
        """The most bytes that files in a question may have: more than the context would hold is not read."""
        return self.info.context * attachments.BYTES_PER_TOKEN if self.info else attachments.MAX_BYTES

    def enter_phase(self, phase: Phase, stage: str = "") -> None:
        """Set what the engine is doing."""
        self.phase, self.stage = phase, stage

    def enter_mode(self, mode: str, params: Params) -> None:
        """Set the mode and parameters in force; the next F6 counts from them."""
        self.mode, self.params, self.wanted = mode, params, mode

    def update_params(self, snapshot: Snapshot) -> None:
        """Take the parameters of a snapshot of the present mode: values chosen by kvchat change while it runs."""
        if snapshot.mode == self.mode:
            self.params = snapshot.params

    def exchange(self, conversation: Conversation) -> None:
        """Go over to another conversation, of which nothing is stored yet."""
        self.conversation, self.edited, self.is_stored = conversation, None, False
        self.details = None
        if self.snapshot is not None:
            self.snapshot = without_conversation(self.snapshot)

    def forget_engine(self) -> None:
        """The engine or its model is gone, with all that was stored."""
        self.is_stored, self.snapshot, self.details = False, None, None

    def footer(self, message: Message) -> str:
        """The line under a message: the receipt of an answer, and its place among its siblings."""
        return _footer(message, self.conversation.siblings(message.id))

    def footed(self) -> list[Footed]:
        """The messages of the path with their footers."""
        families: defaultdict[str | None, list[Message]] = defaultdict(list)
        for message in self.conversation.messages.values():
            families[message.parent].append(message)
        return [(message, _footer(message, families[message.parent])) for message in self.conversation.path]

    def take_later(self, mode: str) -> Params:
        """Remove and return the values kept for ``mode``, or for a later mode that has them."""
        known = registered()[mode].model_fields.keys() - registered()[mode].own.keys()
        taken = {name: value for name, value in self.later.items() if name in known}
        self.later = {name: value for name, value in self.later.items() if name not in known}
        return {**taken, **self.awaiting.pop(mode, {})}

    def receipt(self, finished: Finished) -> str:
        """Return the line under an answer."""
        s = finished.stats
        modes = self.mode if self.first_mode in ("", self.mode) else f"{self.first_mode} → {self.mode}"
        if len(s.switches) == 1 and isinstance(at := s.switches[0].get("at"), int):
            modes += f" at {count(at)}"
        parts = [f"{count(s.generated_tokens)} tok"]
        if s.decode_tokens_per_s is not None:
            parts.append(figure(s.decode_tokens_per_s, "tok/s", 1))
        if s.ttft_s is not None:
            parts.append(f"TTFT {figure(s.ttft_s, 's', 2)}")
        parts.append(modes)
        if s.read_share is not None:
            parts.append(f"read {percent(s.read_share)} of {count(s.total_tokens)}")
        if s.lowest_coverage is not None:
            parts.append(f"covered {percent(s.lowest_coverage)}")
        if s.corrected_share is not None:
            mean = "" if s.mean_cosine is None else f", mean C {figure(s.mean_cosine, digits=2)}"
            parts.append(f"corrected {percent(s.corrected_share)}{mean}")
        parts += _recall(s)
        if finished.reason in ENDINGS:
            parts.append(ENDINGS[finished.reason])
        return " · ".join(parts)


def _recall(s: Stats) -> list[str]:
    """The time of fetching for a token and the part of it waited for, each with the median and the 95th percentile."""
    if s.recall_ms_p95 is None:
        return []
    rate = "" if s.recall_bytes_per_s is None else f" at {figure(s.recall_bytes_per_s / 1e9, 'GB/s', 1)}"
    parts = [f"fetched in {figure(s.recall_ms_p50, digits=1)} / {figure(s.recall_ms_p95, 'ms', 1)}{rate}"]
    if s.exposed_ms_p95 != s.recall_ms_p95:  # without a GPU nothing is hidden
        parts.append(f"waited {figure(s.exposed_ms_p50, digits=1)} / {figure(s.exposed_ms_p95, 'ms', 1)}")
    return parts


def _footer(message: Message, siblings: list[Message]) -> str:
    place = f"{siblings.index(message) + 1} of {len(siblings)}" if len(siblings) > 1 else ""
    cut = CUT_OFF if message.role == "assistant" and message.ending in ("", CUT_OFF) else ""
    return " · ".join(filter(None, (message.receipt or cut, place, PINNED * message.pinned)))


def without_conversation(snapshot: Snapshot) -> Snapshot:
    """The part of a snapshot that holds for any conversation: the figures of the machine, the model and the mode."""
    return replace(
        snapshot, active=0.0, total=0, ribbon="", attended="", reduced_tokens=0, extras={}, tokens_per_s=None,
        ttft_s=None, step_bytes=0.0, recall_hit_rate=None, recall_bytes_per_s=None, recall_ms_p50=None,
        recall_ms_p95=None, exposed_ms_p50=None, exposed_ms_p95=None,
    )  # fmt: skip


def describe_modes(state: ChatState) -> str:
    """List all modes, a line each, with the price of entering them."""
    prices = {price.mode: describe_price(price) for price in state.snapshot.prices} if state.snapshot else {}
    lines = []
    for mode in registered().values():
        here = "●" if mode.name == state.mode else " "
        price = f"   ({prices[mode.name]})" if mode.name in prices else ""
        lines.append(f"{here} {mode.name:<12} {mode.title}{price}")
    return "\n".join(lines)


def describe_price(price: Price) -> str:
    """Bytes to move and the estimated time."""
    if price.refusal:
        return "refused"
    moved = size(price.moved_bytes)
    return moved if price.seconds is None else f"{moved} · {figure(1000 * price.seconds, 'ms')}"


def describe_switch(switched: Switched, before: float | None, after: float | None) -> str:
    """A live switch in a line, with the speeds in tokens/s before and after it where they are known."""
    name = switched.mode if switched.before == switched.mode else f"{switched.before} -> {switched.mode}"
    parts = [name, *(f"{key} {value}" for key, value in switched.params.items() if key == "budget" and value)]
    if switched.total:
        parts.append(f"{count(switched.total)} tok")
    speeds = [figure(speed) for speed in (before, after) if speed is not None]
    if speeds:
        parts.append(f"{'then ' if before is None else ''}{' -> '.join(speeds)} tok/s")
    if switched.moved_bytes:
        parts.append(f"moved {size(switched.moved_bytes)}")
    if switched.reduced_tokens:
        parts.append(f"{count(switched.reduced_tokens)} tok computed with less context, /rebuild recomputes them")
    return " · ".join(parts)


def summarize(stats: Iterable[Stats]) -> str:
    """Sum up the answers as an aligned table of numbers."""
    answers = list(stats)
    if not answers:
        return "No answers yet: ask something first."
    rows = [
        ("answers", count(len(answers))),
        ("generated", f"{count(sum(s.generated_tokens for s in answers))} tok"),
        ("prefilled", f"{count(sum(s.prompt_tokens - s.reused_tokens for s in answers))} tok"),
        ("reused", f"{count(sum(s.reused_tokens for s in answers))} tok"),
        ("speed", figure(_speed(answers), "tok/s", 1)),
        ("first token", figure(_mean([(s.ttft_s, 1) for s in answers]), "s", 2)),
        ("read", percent(_mean([(s.read_share, s.generated_tokens) for s in answers]))),
        ("covered", percent(_mean([(s.coverage, s.generated_tokens) for s in answers]))),
        ("fetched", size(sum(s.recalled_bytes for s in answers))),
        ("already there", percent(_mean([(s.recall_hit_rate, s.generated_tokens) for s in answers]))),
        ("corrected", percent(_mean([(s.corrected_share, s.generated_tokens) for s in answers]))),
    ]
    return "\n".join(f"{label:<14}{value:>14}" for label, value in rows)


def _speed(answers: Iterable[Stats]) -> float | None:
    """Tokens per second over all answers: a long one counts more than a short one."""
    timed = [(s.generated_tokens, s.generated_tokens / s.decode_tokens_per_s) for s in answers if s.decode_tokens_per_s]
    tokens, taken = (sum(column) for column in zip(*timed, strict=True)) if timed else (0, 0.0)
    return tokens / taken if taken else None


def _mean(values: Iterable[tuple[float | None, int]]) -> float | None:
    """The mean of values with weights."""
    known = [(value, weight) for value, weight in values if value is not None]
    weights = sum(weight for _, weight in known)
    return sum(value * weight for value, weight in known) / weights if weights else None
