"""The state of the chat, plain data that user actions and engine events change, and the options it starts with."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from pathlib import Path
from typing import Any, NamedTuple

from kvchat.config import sources
from kvchat.config.modes import (
    AUTO,
    ENTERED_BY_AUTO,
    AutoParameters,
    accepting,
    choosable,
    grouped,
    registered,
    to_keep,
)
from kvchat.config.sources import Resolved
from kvchat.conversations import attachments
from kvchat.conversations.comparison import Comparison, label
from kvchat.conversations.conversation import CUT_OFF, Conversation, Message
from kvchat.errors import INSTEAD, UsageError
from kvchat.models.catalog import short_name
from kvchat.protocol.figures import LOW_COVERAGE, Gpu, Params, Price, Snapshot, Stats
from kvchat.protocol.messages import Compared, Comparing, Details, Finished, Load, Loaded, Sampling, Switched, Variant
from kvchat.protocol.recording import Recorder
from kvchat.units import MISSING, count, figure, percent, size

Footed = tuple[Message, str]
PINNED = "◆ pinned"
ENDINGS = {
    "stopped": "stopped",
    "length": "token limit, /continue",
    "context": "context full",
    "stop": "stop string",
    CUT_OFF: CUT_OFF,
}
REUSED = "not read again"
CORRECTED = "share of heads' choices replaced before attention because the query had turned"
RECEIPT = {
    "read": "share of stored tokens that a token read, on average over the answer, and how many were stored",
    "covered": "share of full attention that fell on the tokens read: its lowest value in the answer",
    REUSED: "prompt tokens that a server already had, out of the whole prompt",
    "corrected": CORRECTED,
    "mean C": "cosine between a head's query and its previous one, on average over the answer: 1 is no change",
    "fetched in": "time to fetch for one token: the median and the 95th percentile",
    "waited": "the part of that time the model waited: the median and the 95th percentile",
    "recovered": "how often the text looked like going wrong and tokens that were not read were brought back",
}
"""What the words of a receipt mean, except those that the status bar shows too."""
SUMS = {
    "answers": "how many, including other branches; the rows below are sums or means over them",
    "generated": "tokens the model generated",
    "prefilled": "prompt tokens the model processed, not counting those already stored",
    "reused": "prompt tokens already stored, so not processed again",
    "speed": "tokens generated per second, over all answers",
    "first token": "from a question to the first token of its answer, on average",
    "read": "share of stored tokens that a token read, on average over all tokens",
    "covered": "share of full attention that fell on the tokens read, on average over all tokens",
    "fetched": "copied from RAM to the GPU",
    "hit rate": "share of the choice that was already on the device",
    "corrected": CORRECTED,
}
"""What the rows of ``/stats`` mean."""
Ranges = dict[str, tuple[int, int]]
LETTER_OF_PINNED = "P"  # the ribbon's letter
UNFINISHED = ""  # in place of the id of the answer in progress
EVERY_S = 1.0
POINTS = 240
SETTLED_TOKENS = 64
TIMED_S = 0.2  # a shorter time gives no speed, because text that was held up arrives all at once


class Phase(Enum):
    """The engine's current work."""

    LOADING = auto()
    READY = auto()
    PREFILL = auto()
    ANSWERING = auto()
    COMPARING = auto()
    DOWN = auto()

    @property
    def busy(self) -> bool:
        """True if an answer or a comparison is in progress."""
        return self in (Phase.PREFILL, Phase.ANSWERING, Phase.COMPARING)


@dataclass(frozen=True)
class Moment:
    """A GPU's used and total memory in bytes, utilization in percent, power in watts and PCIe traffic in bytes/s."""

    used: int | None = None
    total: int | None = None
    utilization: int | None = None
    power: float | None = None
    pcie: int | None = None


class GpuHistory:
    """At most one ``Moment`` per second, the oldest first; ``clock`` returns seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.moments: deque[Moment] = deque(maxlen=POINTS)
        self._clock = clock
        self._noted = float("-inf")

    def note(self, gpu: Gpu | None, details: Details | None) -> None:
        """Add a reading; the PCIe traffic is known only while details are shown."""
        if gpu is None or self._clock() - self._noted < EVERY_S:
            return
        directions = (details.pcie_to_device, details.pcie_to_host) if details else ()
        known = [one for one in directions if one is not None]
        moment = Moment(gpu.used, gpu.total, gpu.utilization, gpu.power, sum(known) if known else None)
        if moment != Moment():  # NVML said something
            self.moments.append(moment)
            self._noted = self._clock()


@dataclass
class ChatState:
    """The state of the chat.

    Attributes:
        mode: the current mode, and ``params`` its parameters; ``wanted`` is the mode requested last.
        auto: why kvchat chose this mode; empty if the user did.
        settings: parameters of each mode from the settings.
        given: parameters changed at run time for each mode, as the engine last reported; it has not confirmed the
            ``pending`` ones yet. ``later`` waits for the next mode that has them, ``awaiting`` for the named mode.
        first_mode: the mode in which the answer began; ``prompt_tokens`` is the length of its prompt, once known.
        stage: the current step of loading; ``download`` is that of a download.
        edited: the id of the message that the next text sent replaces.
        is_stored: True if the engine's K/V are those of this conversation, not of the previous one.
    """

    conversation: Conversation
    sampling: Sampling
    mode: str
    params: Params = field(default_factory=dict)
    settings: Mapping[str, Params] = field(default_factory=dict)
    wanted: str = ""
    auto: str = ""
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
    def asked(self) -> str:
        """The mode, or auto if kvchat chose it."""
        return AUTO if self.auto else self.mode

    @property
    def parameters(self) -> Mapping[str, Any]:
        """The current mode's fields by name, with auto's if it chose the mode; empty if only the engine knows it."""
        current = registered()[self.mode].model_fields if self.mode in registered() else {}
        return {**current, **AutoParameters.model_fields} if self.asked == AUTO else current

    @property
    def model_name(self) -> str:
        """The model in use and the format of its weights, such as ``Qwen3-4B, int4``; empty before one is loaded."""
        return described(self.info) if self.info else ""

    @property
    def coming_mode(self) -> str:
        """The mode that was requested and is not entered yet; "" if it is, or was refused."""
        return self.wanted if self.pending and self.wanted != self.asked else ""

    @property
    def is_served(self) -> bool:
        """True if the model in use runs on a server, which decides how K/V are kept and read."""
        return self.info is not None and bool(self.info.server)

    def refuse_served(self) -> None:
        """Refuse what only a model on this machine can do."""
        if self.info is not None and self.info.server:
            raise UsageError(f"{self.info.server} decides how K/V are kept and read.", self.info.offers, INSTEAD)

    def note_mode(self) -> None:
        """Note the mode and its changed parameters in the conversation, unless the model runs on a server."""
        if not self.is_served:
            self.conversation.mode = self.asked
            self.conversation.params = to_keep(self.asked, self.settings, self.given)

    def marks(self, snapshot: Snapshot) -> Callable[[str], Mark | None]:
        """Return a function from a message's id to its mark (how much of it is read), None if nothing is stored."""
        ranges, messages = self._ranges(snapshot.total), self.conversation.messages

        def mark_of(id: str) -> Mark | None:
            pinned = id in messages and messages[id].pinned
            return mark(*ranges[id], snapshot, pinned) if id in ranges else None

        return mark_of

    def message_at(self, position: int) -> str | None:
        """Return the id of the message that a stored token belongs to; None if unknown."""
        ranges = self._ranges(self.snapshot.total) if self.snapshot else {}
        return next((id for id, (start, end) in ranges.items() if start <= position < end), None)

    def _ranges(self, total: int) -> Ranges:
        in_progress = self.prompt_tokens if self.phase.busy else None
        return message_ranges(self.conversation.path, in_progress, total)

    @property
    def edits_answer(self) -> bool:
        """True if the next text sent replaces an answer."""
        return self.edited is not None and self.conversation.messages[self.edited].role == "assistant"

    @property
    def file_limit(self) -> int:
        """The most bytes that the files in a question may have; the context would not hold more."""
        known = self.info.context if self.info else 0
        return known * attachments.BYTES_PER_TOKEN if known else attachments.MAX_BYTES

    def enter_phase(self, phase: Phase, stage: str = "") -> None:
        self.phase, self.stage = phase, stage

    def enter_mode(self, mode: str, params: Params, auto: str = "") -> None:
        """Set the current mode and parameters, from which the next F6 switches."""
        self.mode, self.params, self.auto = mode, params, auto
        self.wanted = self.asked

    def exchange(self, conversation: Conversation, continues: bool) -> None:
        """Change the conversation; what is stored belongs to it only if it ``continues`` the previous one."""
        self.conversation, self.edited = conversation, None
        if not continues:
            self.forget_stored()

    def forget_stored(self) -> None:
        """Forget the figures of the stored tokens, which belong to another conversation or another branch."""
        self.is_stored, self.details = False, None
        if self.snapshot is not None:
            self.snapshot = without_conversation(self.snapshot)

    def forget_engine(self) -> None:
        """Forget what was stored, because the engine or its model is gone."""
        self.is_stored, self.snapshot, self.details = False, None, None

    def footer(self, message: Message) -> str:
        """Return the line under a message: an answer's receipt, its number among its siblings, whether it is pinned."""
        siblings = self.conversation.siblings(message.id)
        place = f"branch {siblings.index(message) + 1} of {len(siblings)}" if len(siblings) > 1 else ""
        cut = ENDINGS.get(message.ending or CUT_OFF, "") if message.role == "assistant" else ""
        return " · ".join(filter(None, (message.receipt or cut, place, PINNED * message.pinned)))

    def footed(self) -> list[Footed]:
        return [(message, self.footer(message)) for message in self.conversation.path]

    def take_later(self, mode: str) -> Params:
        """Remove and return the values kept for ``mode``, or for the next mode that has them.

        For auto, add those of each mode that it enters, under the mode's name; one that several have goes to each.
        """
        known = choosable()[mode].model_fields.keys() - choosable()[mode].own.keys()
        taken = {name: self.later.pop(name) for name in known & self.later.keys()}
        found = {**taken, **self.awaiting.pop(mode, {})}
        entered = {one: self.awaiting.pop(one, {}) for one in ENTERED_BY_AUTO if mode == AUTO}
        for name in list(self.later):
            if having := entered.keys() & accepting(name, self.later[name]):
                value = self.later.pop(name)
                for one in having:
                    entered[one] = {name: value, **entered[one]}
        return found | {one: params for one, params in entered.items() if params}

    def receipt(self, finished: Finished) -> str:
        s = finished.stats
        modes = self.mode if self.first_mode in ("", self.mode) else f"{self.first_mode} → {self.mode}"
        parts = [f"{count(s.generated_tokens)} tok"]
        if s.decode_tokens_per_s is not None:
            parts.append(figure(s.decode_tokens_per_s, "tok/s", 1))
        if s.ttft_s is not None:
            parts.append(f"first token {figure(s.ttft_s, 's', 2)}")
        parts.append(modes)
        if self.is_served and s.reused_tokens:
            parts.append(f"{REUSED} {count(s.reused_tokens)} of {count(s.prompt_tokens)}")
        if s.read_share is not None:
            parts.append(f"read {percent(s.read_share)} of {count(s.total_tokens)}")
        if s.lowest_coverage is not None:
            parts.append(f"covered {percent(s.lowest_coverage)}")
        if s.corrected_share is not None:
            mean = "" if s.mean_cosine is None else f", mean C {figure(s.mean_cosine, digits=2)}"
            parts.append(f"corrected {percent(s.corrected_share)}{mean}")
        if s.recall_ms_p95 is not None:
            rate = "" if s.recall_bytes_per_s is None else f" at {figure(s.recall_bytes_per_s / 1e9, 'GB/s', 1)}"
            parts.append(f"fetched in {percentiles(s.recall_ms_p50, s.recall_ms_p95)}{rate}")
            if s.exposed_ms_p95 != s.recall_ms_p95:  # without a GPU nothing is hidden
                parts.append(f"waited {percentiles(s.exposed_ms_p50, s.exposed_ms_p95)}")
        if s.recoveries:
            parts.append(f"recovered {count(s.recoveries)}×")
        if finished.reason in ENDINGS:
            parts.append(ENDINGS[finished.reason])
        return " · ".join(parts)


def no_engine() -> UsageError:
    """Return the error for a command that needs a running engine."""
    return UsageError("No model is loaded.", hint="/restart or the next question loads it again.")


def described(info: Loaded) -> str:
    """Return a model's name and the format of its weights, if known."""
    return ", ".join(filter(None, (short_name(info.model), info.weights or info.dtype)))


def percentiles(p50: float | None, p95: float | None) -> str:
    """Return the median and the 95th percentile, such as ``1.2 / 3.4 ms``."""
    return f"{figure(p50, digits=1)} / {figure(p95, 'ms', 1)}"


def without_conversation(snapshot: Snapshot) -> Snapshot:
    """Return the snapshot without the conversation's figures; those of machine, model and mode remain."""
    return replace(
        snapshot, active=0.0, total=0, ribbon="", attended="", reduced_tokens=0, extras={}, tokens_per_s=None,
        ttft_s=None, step_bytes=0.0, recall_hit_rate=None, recall_bytes_per_s=None, recall_ms_p50=None,
        recall_ms_p95=None, exposed_ms_p50=None, exposed_ms_p95=None,
        coverage=None, badges=tuple(badge for badge in snapshot.badges if not badge.startswith(LOW_COVERAGE)),
    )  # fmt: skip


def describe_modes(state: ChatState) -> str:
    """List all modes, a line each, with the price of entering them."""
    if state.info is not None and state.info.server:
        return " ".join((f"{state.info.server} decides how K/V are kept and read.", state.info.offers, INSTEAD))
    prices = {price.mode: describe_price(price) for price in state.snapshot.prices} if state.snapshot else {}
    lines = []
    for group, modes in grouped().items():
        lines += [f"  {group}:"] if group else []
        for mode in modes:
            here = "●" if mode.name in (state.mode, state.asked) else " "
            price = f"   ({prices[mode.name]})" if mode.name in prices else ""
            lines.append(f"{here} {mode.name:<12} {mode.title}{price}")
    return "\n".join(lines)


def describe_price(price: Price) -> str:
    """Return the bytes to move and the estimated time."""
    if price.refusal:
        return "refused"
    moved = size(price.moved_bytes)
    return moved if price.seconds is None else f"{moved} · {figure(1000 * price.seconds, 'ms')}"


def describe_switch(switched: Switched, before: float | None, after: float | None) -> str:
    """Describe a live switch in a line: the parameters that the user set, and tokens/s before and after, if known."""
    name = switched.mode if switched.before == switched.mode else f"{switched.before} → {switched.mode}"
    shown = {"budget", *switched.given.get(switched.mode, {})}
    values = ((key, value) for key, value in switched.params.items() if key in shown and value is not None)
    parts = [name, *(f"{key} {str(value).lower()}" for key, value in values)]
    if switched.total:
        parts.append(f"at {count(switched.total)} tok")
    speeds = [figure(speed) for speed in (before, after) if speed is not None]
    if speeds:
        parts.append(f"{'then ' if before is None else ''}{' → '.join(speeds)} tok/s")
    if switched.moved_bytes:
        parts.append(f"moved {size(switched.moved_bytes)}")
    if switched.reduced_tokens:
        parts.append(f"{count(switched.reduced_tokens)} tok with reduced context, /rebuild recomputes them")
    return " · ".join(parts)


def summarize(stats: Iterable[Stats]) -> str:
    """Return an aligned table of the known sums and averages over the answers."""
    answers = list(stats)
    if not answers:
        return "There are no answers yet: ask something first."
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
        ("hit rate", percent(_mean([(s.recall_hit_rate, s.generated_tokens) for s in answers]))),
        ("corrected", percent(_mean([(s.corrected_share, s.generated_tokens) for s in answers]))),
    ]
    return "\n".join(f"{label:<14}{value:>14}" for label, value in rows if value != MISSING)


def _speed(answers: Iterable[Stats]) -> float | None:
    """Return tokens per second over all answers, weighted by their lengths."""
    timed = [(s.generated_tokens, s.generated_tokens / s.decode_tokens_per_s) for s in answers if s.decode_tokens_per_s]
    tokens, taken = (sum(column) for column in zip(*timed, strict=True)) if timed else (0, 0.0)
    return tokens / taken if taken else None


def _mean(values: Iterable[tuple[float | None, int]]) -> float | None:
    """Return the average of the known values, each with its weight."""
    known = [(value, weight) for value, weight in values if value is not None]
    weights = sum(weight for _, weight in known)
    return sum(value * weight for value, weight in known) / weights if weights else None


class Mark(NamedTuple):
    """A message's most common ``letter`` of the ribbon, and the mean ``share`` of it that is read, 0 to 1."""

    letter: str
    share: float


def message_ranges(path: Iterable[Message], prompt_tokens: int | None, total: int) -> Ranges:
    """Return the positions of each message's stored tokens by its id; template tokens before a message belong to it.

    They follow from the answers' counts, so a message without counts, such as an answer cut off by a crash, has none.
    ``prompt_tokens`` precede the answer in progress (None without one); ``total`` tokens are stored.
    """
    ranges: Ranges = {}
    question, end = "", 0
    for message in path:
        if message.role == "user":
            question = message.id
        elif message.stats is not None:
            begin = message.stats.prompt_tokens
            ranges[question], ranges[message.id] = (end, begin), (begin, message.stats.total_tokens)
            question, end = "", message.stats.total_tokens
    if prompt_tokens is not None and question:
        ranges[question], ranges[UNFINISHED] = (end, min(prompt_tokens, total)), (prompt_tokens, total)
    return ranges


def mark(start: int, end: int, s: Snapshot, pinned: bool = False) -> Mark | None:
    """Return the mark of a message whose tokens are ``start`` to ``end``; None if none of them is stored."""
    cells = slice(start // s.cell_tokens, -(-min(end, s.total) // s.cell_tokens))
    letters, digits = s.ribbon[cells], s.attended[cells]
    if start >= end or not letters or len(digits) != len(letters):
        return None
    shares = [int(digit) / 9 for digit in digits if digit in "0123456789"]
    letter = LETTER_OF_PINNED if pinned else Counter(letters).most_common(1)[0][0]
    return Mark(letter, sum(shares) / len(letters))


@dataclass
class RunningComparison:
    """A comparison in progress or finished.

    Attributes:
        stage: what the engine is doing.
        progress: the answers so far, by the index of their variant.
        result: set at the end, unless an ``error`` says why not.
        fact: what the answers are searched for; empty until the engine has hidden it, None if nothing is hidden.
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
        """True if it has a result or failed."""
        return self.result is not None or bool(self.error)

    def read(self, done: int, total: int) -> None:
        """Note that ``done`` of ``total`` tokens of the prompt have been processed."""
        self.stage = f"processing {count(done)} of {count(total, 'token')} …"

    def note(self, comparing: Comparing) -> None:
        self.progress[comparing.index] = comparing
        name = label(self.variants[comparing.index])
        if comparing.checked:
            self.stage = f"{name} is compared with the first answer: {count(comparing.checked)} tok"
        else:
            self.stage = f"{name} answers: {count(comparing.tokens)} tok"

    def finish(self, compared: Compared) -> None:
        self.result = Comparison(
            self.question, self.model, self.sampling, compared.prompt_tokens, self.variants, compared.runs
        )


class SwitchLine:
    """The line of a switch, such as ``full → speculative · at 14,203 tok · 41 → 58 tok/s``.

    ``speed`` is measured before the switch, in tokens/s; the speed after it is added once it is measured.
    """

    def __init__(self, switched: Switched, speed: float | None) -> None:
        self.switched = switched
        self.speed = speed
        self.settled = False
        self._after: float | None = None
        self._tokens = 0
        self._begun: float | None = None

    @property
    def line(self) -> str:
        return describe_switch(self.switched, self.speed, self._after)

    @property
    def is_idle(self) -> bool:
        """True if no token has come after the switch."""
        return self._begun is None

    def count(self, tokens: int, now: float) -> None:
        """Count tokens after the switch, at ``now`` seconds; the speed is final after ``SETTLED_TOKENS``."""
        if self.settled:
            return
        if self._begun is None:
            self._begun = now
            return
        self._tokens += tokens
        if self._tokens >= SETTLED_TOKENS:
            self.close(now)

    def close(self, now: float) -> None:
        """Show the speed of the tokens so far, unless they took less than ``TIMED_S``, and count no more."""
        if self.settled or self._begun is None:
            return
        self.settled = True
        if self._tokens and now - self._begun >= TIMED_S:
            self._after = self._tokens / (now - self._begun)
            self.show_line()

    def show_line(self) -> None:
        """Redraw the line."""
        raise NotImplementedError

    def remove(self) -> Awaitable[None]:
        """Take the line out of the transcript."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class AppConfig:
    """Options of the application; paths are absolute and need not exist yet.

    Attributes:
        theme_dirs: the user's, in addition to the bundled themes.
        keys: the changed keys, by the id of their action.
        history_file: None keeps the prompt history in memory, ``database`` None the conversations.
        resume: opens the latest conversation; ``keeps_new`` saves new ones.
        asked_mode: the command line's mode; it and its ``asked_params`` override those of a resumed conversation.
        prompt: sent first, as if typed, with ``piped`` before it.
        model_folders: searched for models; ``servers`` are asked for theirs.
        engine_command: None starts the real one, as does ``download_command``.
        profile: names the active profiles.
        recorder: records what the engine reports; ``replay`` names the recording that the engine plays.
        problems: settings that could not be used, shown once.
        resolved: all settings with their sources; ``config_file`` is where changes are saved, None for nowhere.
    """

    log_file: Path
    load: Load = field(default_factory=Load)
    sampling: Sampling = field(default_factory=Sampling)
    system: str | None = None
    theme: str = "kvchat-dark"
    theme_dirs: tuple[Path, ...] = ()
    keys: dict[str, str] = field(default_factory=dict)
    history_file: Path | None = None
    database: Path | None = None
    resume: bool = False
    keeps_new: bool = True
    asked_mode: str = ""
    asked_params: dict[str, Params] = field(default_factory=dict)
    prompt: str = ""
    piped: str = ""
    model_folders: tuple[Path, ...] = ()
    servers: tuple[str, ...] = ()
    engine_command: tuple[str, ...] | None = None
    download_command: tuple[str, ...] | None = None
    profile: str = ""
    recorder: Recorder | None = None
    replay: str = ""
    problems: tuple[str, ...] = ()
    resolved: Resolved = field(default_factory=sources.resolve)
    config_file: Path | None = None
