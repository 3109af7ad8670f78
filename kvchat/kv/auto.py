"""auto: chooses the setup closest to full mode that fits in memory and decodes as fast as asked.

A token's time is predicted from the bytes that it reads: weights and slots at the rate of the device's memory, the rest
at the rate of the link. In unified memory (a CPU) a mode is assumed to read what it would keep on a device. A step
costs more than its bytes, so the prediction is multiplied by the setup's ratio of measured to predicted time or, until
it has run, by the mean ratio of those that have.

The order is: full mode, full mode with a part of the K/V over the link, speculative mode with smaller and smaller
budgets, and sync mode if the model's heads were measured. Each is followed by the same setup with 8-bit pages, which is
chosen if full precision does not fit, or to halve the bytes over the link; on a CPU its steps take 1.3 times as long.
Only pages that become full later are quantized. Drafts are not chosen, because their gain depends on the text; if the
user asked for them, they are measured like any step. Streaming is never chosen, because it forgets.

Not from a paper. Related: llama.cpp's ``--fit`` chooses the context size, Twilight (arXiv 2502.02770) the budget.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

from kvchat.config.modes import COMPARED, REFERENCE, AutoParameters, ModeParameters, Params, SyncParameters
from kvchat.errors import KvchatError
from kvchat.kv.attention import PREFILL_WORKSPACE
from kvchat.kv.geometry import Geometry
from kvchat.kv.memory import eight_bit_pages, rates
from kvchat.kv.memory.host_pool import layer_bytes
from kvchat.kv.modes import build
from kvchat.kv.modes.base import AUTO_BUDGET, Mode, ModelTraits
from kvchat.kv.prefill import CHUNKS, staging_bytes
from kvchat.units import figure, size

LEAST_BUDGET = AUTO_BUDGET["least"]
# By mode, the share of the chosen tokens that are new at a step and come over the link, until it is measured.
# Speculative: measured on an H200. Sync: half of the following heads' tokens are chosen anew every five steps.
NEW = {COMPARED: 0.25, SyncParameters.name: 0.1}
EASILY = 0.8  # A setup closer to full is entered again if it takes at most this share of the time asked for.
FORCED = 1.5  # The setup changes within an answer if a token takes longer than this multiple of the time asked for.
NEARLY = 1.15  # Setups within this factor of the fastest one are preferred to those that read less.
WORTH = 0.9  # A setup is entered within an answer only if it takes at most this share of the current time.
EARLY = 0.75  # Share of RAM for full-precision pages, so that 8-bit pages after them still have room.
APART = 64  # minimum number of steps before a change is undone
WEIGHT = 0.3  # weight of a new measurement in the running average
FADING = 0.1  # how far the ratios of other setups move towards the one measured now
UNDECIDED = "auto: chooses at the next question"
EIGHT_BIT, OVER_LINK = " with 8-bit pages", " from RAM"

Merged = Callable[[str, Params], ModeParameters]
"""Returns a mode's parameters: what the user asked for, overridden by the given changes."""


@dataclass(frozen=True)
class Machine:
    """Rates of the device's memory (``read``) and the link (0 if there is none) in bytes/s, and memory in bytes.

    A token reads ``weights`` bytes of weights. ``device_free`` and ``host_free`` are what K/V may take, including what
    they take now. ``new`` is, by mode, the share of the chosen tokens that come over the link at a step. ``cpu`` is the
    rate in bytes/s at which the CPU attends to full-precision K/V in RAM while the link is busy; 0 if it does not.
    """

    read: float
    link: float
    weights: int
    device_free: int
    host_free: int
    new: Mapping[str, float] = field(default_factory=lambda: NEW)
    cpu: float = 0.0


@dataclass(frozen=True)
class Conversation:
    """A conversation that has ``tokens`` tokens at the end of the answer.

    So far it has ``full_precision`` tokens in full-precision pages and ``quantized`` ones in 8-bit pages.
    ``quantizes``: the user asked for 8-bit pages. The first ``system_tokens`` are the system prompt; ``pins`` are the
    positions of pinned messages' tokens.
    """

    tokens: int
    full_precision: int = 0
    quantized: int = 0
    quantizes: bool = False
    system_tokens: int = 0
    pins: tuple[int, ...] = ()


@dataclass(frozen=True)
class Setup:
    """A mode's parameters, whether pages are quantized once full, and whether a part is read over the link.

    Two setups are equal if these are. ``seconds`` is a token's predicted time. If the CPU takes a share of full mode's
    attention, this saves ``saved_seconds``; without it the link would add ``link_seconds``, beyond the staged copies.
    ``lacks`` says what does not fit, if anything.
    """

    parameters: ModeParameters
    quantizes: bool
    seconds: float = field(compare=False)
    over_link: bool = False
    lacks: str = field(default="", compare=False)
    link_seconds: float = field(default=0.0, compare=False)
    saved_seconds: float = field(default=0.0, compare=False)

    @property
    def kind(self) -> str:
        """The kind of a setup; setups of one kind, with or without 8-bit pages, share a ratio."""
        return f"{self.parameters.name}{OVER_LINK * self.over_link}"

    @property
    def suffix(self) -> str:
        """How the K/V are read: `` from RAM with 8-bit pages``."""
        return f"{OVER_LINK * self.over_link}{EIGHT_BIT * self.quantizes}"

    @property
    def name(self) -> str:
        """``speculative 2048``"""
        budget = getattr(self.parameters, "budget", None)
        return f"{self.parameters.name} {budget}" if budget else self.parameters.name

    @property
    def label(self) -> str:
        """``full from RAM``"""
        return f"{self.name}{self.suffix}"


@dataclass(frozen=True)
class Choice:
    """A chosen setup, the ``seconds`` that a token should take, and a ``line`` that says what was chosen and why."""

    setup: Setup
    seconds: float
    line: str


# ---- what a token costs ----------------------------------------------------------------------------
def setups(
    machine: Machine, geometry: Geometry, traits: ModelTraits, conversation: Conversation, merged: Merged
) -> list[Setup]:
    """Return all setups for decoding at the end of a conversation, the closest to full first."""
    costs = Costs(machine, geometry, traits, conversation)
    found = list(_reading_everything(costs, merged(REFERENCE, {})))
    for name, changes in _choosing(costs, merged(COMPARED, {})):
        try:
            found += [costs.setup(merged(name, changes), quantizes) for quantizes in costs.pages]
        except KvchatError:  # the user's window exceeds a small budget, or the model has one layer
            continue
    return found


def _reading_everything(costs: Costs, parameters: ModeParameters) -> Iterator[Setup]:
    mode, is_given = costs.mode(parameters, costs.apart), getattr(parameters, "resident", None) is not None
    if costs.geometry.unified or not is_given:
        yield from (costs.setup(parameters, quantizes) for quantizes in costs.pages)
    if not costs.geometry.unified:
        mode.limit(costs.capacity, costs.machine.device_free)
        resident = min(getattr(mode, "resident", None) or costs.capacity, costs.capacity)
        if is_given or resident < costs.capacity:
            staged = mode.plan(costs.capacity).layouts[0].staged * costs.geometry.page
            yield from (costs.spilling(parameters, quantizes, resident, staged) for quantizes in costs.pages)


def _choosing(costs: Costs, asked: ModeParameters) -> Iterator[tuple[str, Params]]:
    """Yield the modes that choose what a token reads; a budget that the user gave is the largest.

    The list does not depend on the conversation's length, so it always contains the current setup.
    """
    half, given = costs.traits.context // 2, getattr(asked, "budget", None)
    budgets = [2**power for power in range(half.bit_length() - 1, LEAST_BUDGET.bit_length() - 2, -1)]
    if given is not None:
        budgets = [given, *(budget for budget in budgets if budget < given)]
    yield from ((COMPARED, {"budget": budget}) for budget in budgets)
    if costs.traits.calibration is not None:
        yield SyncParameters.name, {}


@dataclass(frozen=True)
class Costs:
    machine: Machine
    geometry: Geometry
    traits: ModelTraits
    conversation: Conversation

    @property
    def apart(self) -> Geometry:
        """The geometry with separate device memory: a token reads what a mode keeps there."""
        return replace(self.geometry, unified=False)

    @property
    def capacity(self) -> int:
        return self.geometry.grown(self.conversation.tokens + 1)

    @property
    def pages(self) -> tuple[bool, ...]:
        """The values of ``quantizes`` to try, in order; only True if the user asked for it."""
        return (True,) if self.conversation.quantizes else (False, True)

    def mode(self, parameters: ModeParameters, geometry: Geometry) -> Mode:
        """Build a mode with the conversation's pinned messages."""
        mode = build(parameters, geometry, self.traits, self.conversation.system_tokens)
        mode.pin(self.conversation.pins)
        return mode

    def setup(self, parameters: ModeParameters, quantizes: bool) -> Setup:
        """Return the setup of a mode that reads exactly its slots, without any spill.

        Raises:
            KvchatError: the mode cannot run with these parameters.
        """
        m, g = self.machine, self.geometry
        plan = self.mode(parameters, self.apart).plan(self.conversation.tokens)
        read = plan.device_bytes(self.apart)
        seconds = (m.weights + read) / m.read
        if m.link and (new := m.new.get(parameters.name)):
            chosen = sum(layout.kv_bytes(g, layout.pages * g.page) for layout in plan.layouts)  # in page slots
            seconds += new * chosen * self._share(quantizes) / m.link  # an H200 hid only a part of these copies
        held = self.mode(parameters, g).plan(self.capacity).device_bytes(g)
        return Setup(parameters, quantizes, seconds, lacks=self._lacks(parameters.name, held, quantizes))

    def spilling(self, parameters: ModeParameters, quantizes: bool, resident: int, staged: int) -> Setup:
        """Return the setup of full mode that reads all but the last ``resident`` tokens over the link.

        In each layer the first ``staged`` full-precision tokens are copied while those on the device are read.
        """
        m, token = self.machine, self.geometry.token_bytes
        over = max(0, self.conversation.tokens - resident)
        seconds = (m.weights + (self.conversation.tokens - over) * token) / m.read
        link = over * token * self._share(quantizes) / (m.link or m.read)
        saved = 0.0
        if not (quantizes or self.conversation.quantized):
            link -= min(seconds, min(over, staged) * token / (m.link or m.read))
            saved = self._saved_on_cpu(getattr(parameters, "cpu", None), over * token, link)
        lacks = self._lacks(parameters.name, 0, quantizes)
        return Setup(parameters, quantizes, seconds + link - saved, True, lacks, link, saved)

    def _saved_on_cpu(self, given: float | None, nbytes: float, link_s: float) -> float:
        """Return the seconds of ``link_s`` saved if the CPU attends to the ``given`` (or best) share of ``nbytes``."""
        m, layers = self.machine, self.geometry.layers
        if not (m.cpu and m.link):
            return 0.0
        exposed = link_s * m.link
        on_cpu = exposed * rates.share_on_cpu(exposed, m.link, m.cpu, layers) if given is None else given * nbytes
        if not on_cpu:
            return 0.0
        return link_s - max(max(0.0, exposed - on_cpu) / m.link, on_cpu / m.cpu) - rates.TURN_S * layers

    def _share(self, quantizes: bool) -> float:
        """Return the bytes of the host pool's K/V relative to full precision."""
        quantized = self._quantized(quantizes) / max(self.conversation.tokens, 1)
        return 1 - quantized * (1 - eight_bit_pages.share(self.geometry))

    def _quantized(self, quantizes: bool) -> int:
        """Return the tokens in 8-bit pages at the end of the conversation."""
        c = self.conversation
        return max(0, c.tokens - c.full_precision) if quantizes else c.quantized

    def _lacks(self, name: str, held: int, quantizes: bool) -> str:
        m, g, quantized = self.machine, self.geometry, self._quantized(quantizes)
        on_host = g.layers * layer_bytes(g, g.grown(self.conversation.tokens - quantized), g.round_up(quantized))
        if g.unified:
            on_host += held
        else:
            needed = held + staging_bytes(g, self.capacity, CHUNKS[0]) + PREFILL_WORKSPACE
            if held and needed > m.device_free:
                return f"{name} takes {size(needed)} on the device, {size(m.device_free)} are free"
        if on_host > m.host_free * (1 if quantizes else EARLY):
            return f"the K/V take {size(on_host)} of {size(m.host_free)} of RAM"
        return ""


# ---- the choice ------------------------------------------------------------------------------------
def choose(
    possible: Sequence[Setup],
    target: float,
    ratios: Mapping[str, float] | None = None,
    current: Setup | None = None,
    below: int = 0,
) -> Choice:
    """Choose the first setup that fits and takes at most ``target`` seconds per token, or hardly more than the fastest.

    Args:
        possible: at least one, the closest to full first.
        target: seconds per token.
        ratios: measured over predicted time, by kind.
        current: the setup in use; a slower one that is closer to full must stay well below the target (``EASILY``).
        below: setups before this index are not considered.
    """
    ratios = ratios or {}
    mean = fmean(ratios.values()) if ratios else 1.0
    timed = [setup.seconds * ratios.get(setup.kind, mean) for setup in possible]
    here = (current is not None and index_of(possible, current)) or 0
    allowed = range(below, len(possible))
    fitting = [at for at in allowed if not possible[at].lacks] or [*allowed]
    quickest = min(fitting, key=timed.__getitem__)
    limit = max(target, NEARLY * timed[quickest])
    easily = [EASILY if at < here and timed[at] > timed[here] else 1 for at in range(len(possible))]
    at = next((at for at in fitting if timed[at] <= limit * easily[at]), quickest)
    return Choice(possible[at], timed[at], _line(possible, timed, at, target, bool(ratios)))


def index_of(possible: Sequence[Setup], setup: Setup) -> int | None:
    """Return the index of a setup among the possible ones; None if it is not one of them."""
    return possible.index(setup) if setup in possible else None


def _line(possible: Sequence[Setup], timed: Sequence[float], at: int, target: float, is_measured: bool) -> str:
    setup, before = possible[at], possible[:at]
    taken = f"{'' if is_measured else 'at least '}{_ms(timed[at])} a token"  # unmeasured: computed from bytes alone
    if timed[at] > target:
        is_met = any(one <= target for one, other in zip(timed, possible, strict=True) if not other.lacks)
        why = "modes that read less are hardly faster" if is_met else f"nothing that fits is as fast as {_ms(target)}"
        return f"auto: {setup.label}, {taken}: {why}"
    if not before:
        return f"auto: {setup.label}, {taken}"
    slow = next((one for one in range(at) if not before[one].lacks), None)
    if slow is None:
        return f"auto: {setup.label}, because {before[0].lacks}"
    return (
        f"auto: {setup.label}, because {before[slow].name} would take {_ms(timed[slow])} a token{before[slow].suffix}"
    )


def _ms(seconds: float) -> str:
    return figure(1000 * seconds, "ms", 0 if seconds >= 0.01 else 1)


class Auto:
    """Chooses again between answers, and within an answer if memory runs short or tokens take too long.

    ``ratios`` are measured over predicted times, by kind of setup. ``refused`` are setups that could not be entered for
    this answer. ``quantizes``: the user asked for 8-bit pages.
    """

    def __init__(self, quantizes: bool = False) -> None:
        self.parameters = AutoParameters()
        self.is_on = False
        self.quantizes = quantizes
        self.choice: Choice | None = None
        self.ratios: dict[str, float] = {}
        self.refused: list[Setup] = []
        self._changed_at = -APART

    @property
    def line(self) -> str:
        """The current choice and its reason; "" if the user chose the mode."""
        return (self.choice.line if self.choice else UNDECIDED) if self.is_on else ""

    def begin(self, parameters: AutoParameters) -> None:
        """Choose from now on, whatever the current setup is."""
        self.parameters, self.is_on, self.choice, self._changed_at = parameters, True, None, -APART

    def between(self, possible: Sequence[Setup], steps: int) -> Choice | None:
        """Return the choice for the next answer, after ``steps`` steps in total; None to keep the current setup."""
        current = self.choice.setup if self.choice else None
        found, here = choose(possible, self._target, self.ratios, current), self._here(possible)
        if found.setup == current:
            self.choice = found  # with its current time
            return None
        goes_back = here is not None and possible.index(found.setup) < here
        return None if goes_back and steps - self._changed_at < APART else found

    def is_slow(self, measured: float) -> bool:
        """Return whether tokens that take ``measured`` seconds are slow enough to change the setup within an answer."""
        return measured > FORCED * self._target

    def within(self, possible: Sequence[Setup], steps: int, measured: float) -> Choice | None:
        """Return the choice within an answer whose tokens take ``measured`` seconds; None to keep the current setup."""
        here = self._here(possible)
        if here is None or here + 1 == len(possible):
            return None
        lacks = possible[here].lacks
        if not (lacks or (self.is_slow(measured) and steps - self._changed_at >= APART)):
            return None
        found = choose(possible, self._target, self.ratios, below=here + 1)
        helps = not found.setup.lacks if lacks else found.seconds <= WORTH * measured
        return found if helps else None

    def note(self, possible: Sequence[Setup], measured: float) -> None:
        """Note that a token took ``measured`` seconds; the ratios of other setups move a little towards this one's."""
        if (here := self._here(possible)) is not None:
            setup = possible[here]
            seen, before = measured / setup.seconds, self.ratios.get(setup.kind)
            self.ratios[setup.kind] = seen if before is None else before + WEIGHT * (seen - before)
            for other in self.ratios.keys() - {setup.kind}:
                self.ratios[other] += FADING * (self.ratios[setup.kind] - self.ratios[other])

    def entered(self, choice: Choice, steps: int) -> None:
        self.choice, self._changed_at = choice, steps

    def _here(self, possible: Sequence[Setup]) -> int | None:
        return index_of(possible, self.choice.setup) if self.choice else None

    @property
    def _target(self) -> float:
        return 1 / self.parameters.tokens_per_s
