"""auto: the most faithful way to decode that fits and in which a token takes no longer than asked for.

A token's time is predicted from the bytes that it reads: the weights and what the mode keeps on the device at the rate
of its memory, what comes over the link at the link's. In unified memory (a CPU) a mode is taken to read what it would
keep on a device. A way that has run is corrected by what was measured over what was predicted, one that has not by the
mean of those that have: a step costs more than its bytes in all of them.

The order is: everything, everything in 8-bit pages, everything with a part of it over the link (the same with 8-bit
pages), speculative with smaller and smaller budgets, sync once the model's heads were measured; these with 8-bit pages
behind each, too. 8-bit pages are those that get full from then on; what was stored before stays exact. They are taken
where exact ones do not fit, or halve what comes over a link; on a CPU a step with them takes 1.3 times as long. Drafts
are not chosen, because what they bring depends on the text; where a person asked for them they are measured like any
step. Streaming is never chosen: it forgets.

Ours. Others choose a size by themselves: llama.cpp's ``--fit`` the context, Twilight (arXiv 2502.02770) the budget.
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
# Of what is on a GPU, the share that is new at a step and comes over the link, where it was not measured yet: of
# speculative that of an H200, of sync's following heads half is chosen anew every five steps.
NEW = {COMPARED: 0.25, SyncParameters.name: 0.1}
EASILY = 0.8  # of the time asked for: what a more faithful way may take to be gone back to
FORCED = 1.5  # of the time asked for: beyond it the way changes in an answer
NEARLY = 1.15  # of the least time: what is as quick as this is taken before what reads less
WORTH = 0.9  # of the present time: what a way may take to be entered in an answer
EARLY = 0.75  # of the host's memory: what exact pages may take, so that there is room for rounded ones behind them
APART = 64  # steps before a change is taken back
WEIGHT = 0.3  # of a new measurement beside those before
FADING = 0.1  # of the way to what is measured now: so much is forgotten of a way that does not run
UNDECIDED = "auto: chooses at the next question"
EIGHT_BIT, OVER_LINK = " with 8-bit pages", " from RAM"

Merged = Callable[[str, Params], ModeParameters]
"""A mode's parameters: what a person asked for, and over it changes."""


@dataclass(frozen=True)
class Machine:
    """Rates ``read`` and ``link`` in bytes/s, the last 0 where there is none; ``weights``: bytes that a token reads.

    ``device_free`` and ``host_free`` are the bytes that K/V may take, with those that they take now. ``new``, by mode,
    is the share of what it chooses that comes over the link at a step. The CPU attends to exact K/V in RAM at the rate
    ``cpu`` while the link is busy; 0 where it does not.
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
    """``tokens`` at the end of the answer; by now so many are stored in ``exact`` and in ``rounded`` pages.

    A person who ``quantizes`` asked for 8-bit pages. The first ``system_tokens`` are the system prompt, ``pins`` the
    positions of pinned messages' tokens.
    """

    tokens: int
    exact: int = 0
    rounded: int = 0
    quantizes: bool = False
    system_tokens: int = 0
    pins: tuple[int, ...] = ()


@dataclass(frozen=True)
class Way:
    """A mode with parameters, what pages are kept in that get full, and whether a part is read ``over_link``.

    Two ways are equal where these are. ``seconds`` is a token's time before any correction, less ``saved_seconds`` that
    the CPU saves of it in full mode; ``link_seconds`` is what the link would add without it, beyond what is staged
    meanwhile. ``lacks`` says what does not fit, if so.
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
        """What a correction is known for: the same with 8-bit pages, which are not chosen for their speed on a CPU."""
        return f"{self.parameters.name}{OVER_LINK * self.over_link}"

    @property
    def place(self) -> str:
        """Where and how the K/V are read, in words: `` from RAM with 8-bit pages``."""
        return f"{OVER_LINK * self.over_link}{EIGHT_BIT * self.quantizes}"

    @property
    def name(self) -> str:
        """``speculative 2048``"""
        budget = getattr(self.parameters, "budget", None)
        return f"{self.parameters.name} {budget}" if budget else self.parameters.name

    @property
    def label(self) -> str:
        """``full from RAM``"""
        return f"{self.name}{self.place}"


@dataclass(frozen=True)
class Choice:
    """A way, the ``seconds`` that a token is to take in it, and a ``line`` that says what was chosen and why."""

    way: Way
    seconds: float
    line: str


# ---- what a token costs ----------------------------------------------------------------------------
def ways(
    machine: Machine, geometry: Geometry, traits: ModelTraits, conversation: Conversation, merged: Merged
) -> list[Way]:
    """All ways to decode at the end of a conversation, the most faithful first."""
    costs = _Costs(machine, geometry, traits, conversation)
    found = list(_reading_everything(costs, merged(REFERENCE, {})))
    for name, changes in _choosing(costs, merged(COMPARED, {})):
        try:
            found += [costs.way(merged(name, changes), quantizes) for quantizes in costs.pages]
        except KvchatError:  # a window that was given leaves a small budget no room, or a model has one layer
            continue
    return found


def way_of(
    parameters: ModeParameters,
    machine: Machine,
    geometry: Geometry,
    traits: ModelTraits,
    conversation: Conversation,
) -> Way:
    """A mode with exactly these parameters at the end of a conversation; what it spills is not counted.

    Raises:
        KvchatError: it cannot run with them.
    """
    return _Costs(machine, geometry, traits, conversation).way(parameters, conversation.quantizes)


def _reading_everything(costs: _Costs, parameters: ModeParameters) -> Iterator[Way]:
    mode, is_given = costs.mode(parameters, costs.apart), getattr(parameters, "resident", None) is not None
    if costs.geometry.unified or not is_given:
        yield from (costs.way(parameters, quantizes) for quantizes in costs.pages)
    if not costs.geometry.unified:
        mode.limit(costs.capacity, costs.machine.device_free)
        resident = min(getattr(mode, "resident", None) or costs.capacity, costs.capacity)
        if is_given or resident < costs.capacity:
            staged = mode.plan(costs.capacity).layouts[0].staged * costs.geometry.page
            yield from (costs.spilling(parameters, quantizes, resident, staged) for quantizes in costs.pages)


def _choosing(costs: _Costs, asked: ModeParameters) -> Iterator[tuple[str, Params]]:
    """Modes that choose what a token reads; a budget that a person gave is the largest.

    They are the same however long the conversation is: the one in force is always among them.
    """
    half, given = costs.traits.context // 2, getattr(asked, "budget", None)
    budgets = [2**power for power in range(half.bit_length() - 1, LEAST_BUDGET.bit_length() - 2, -1)]
    if given is not None:
        budgets = [given, *(budget for budget in budgets if budget < given)]
    yield from ((COMPARED, {"budget": budget}) for budget in budgets)
    if costs.traits.calibration is not None:
        yield SyncParameters.name, {}


@dataclass(frozen=True)
class _Costs:
    machine: Machine
    geometry: Geometry
    traits: ModelTraits
    conversation: Conversation

    @property
    def apart(self) -> Geometry:
        """With a device of its own: what a mode keeps there is what a token reads."""
        return replace(self.geometry, unified=False)

    @property
    def capacity(self) -> int:
        return self.geometry.grown(self.conversation.tokens + 1)

    @property
    def pages(self) -> tuple[bool, ...]:
        """What pages may be kept in: 8 bits alone where a person asked for them."""
        return (True,) if self.conversation.quantizes else (False, True)

    def mode(self, parameters: ModeParameters, geometry: Geometry) -> Mode:
        """A mode with what is pinned in the conversation."""
        mode = build(parameters, geometry, self.traits, self.conversation.system_tokens)
        mode.pin(self.conversation.pins)
        return mode

    def way(self, parameters: ModeParameters, quantizes: bool) -> Way:
        """A mode whose slots are what a token reads.

        Raises:
            KvchatError: the mode cannot run with these parameters.
        """
        m = self.machine
        plan = self.mode(parameters, self.apart).plan(self.conversation.tokens)
        read = plan.device_bytes(self.apart)
        seconds = (m.weights + read) / m.read
        if m.link and (new := m.new.get(parameters.name)):
            seconds += (
                new * plan.chosen_bytes(self.geometry) * self._share(quantizes) / m.link
            )  # an H200 hid a part of it, not all
        held = self.mode(parameters, self.geometry).plan(self.capacity).device_bytes(self.geometry)
        return Way(parameters, quantizes, seconds, lacks=self._lacks(parameters.name, held, quantizes))

    def spilling(self, parameters: ModeParameters, quantizes: bool, resident: int, staged: int) -> Way:
        """Full mode that reads all but the last ``resident`` tokens over the link.

        In each layer the first ``staged`` of exact ones come while what is on the device is read.
        """
        m, token = self.machine, self.geometry.token_bytes
        over = max(0, self.conversation.tokens - resident)
        seconds = (m.weights + (self.conversation.tokens - over) * token) / m.read
        link = over * token * self._share(quantizes) / (m.link or m.read)
        saved = 0.0
        if not (quantizes or self.conversation.rounded):
            link -= min(seconds, min(over, staged) * token / (m.link or m.read))
            saved = self._saved_on_cpu(getattr(parameters, "cpu", None), over * token, link)
        lacks = self._lacks(parameters.name, 0, quantizes)
        return Way(parameters, quantizes, seconds + link - saved, True, lacks, link, saved)

    def _saved_on_cpu(self, given: float | None, nbytes: float, link_s: float) -> float:
        """Seconds that the CPU saves of ``link_s``, by rates or with the share ``given`` of the ``nbytes`` in RAM."""
        m, layers = self.machine, self.geometry.layers
        if not (m.cpu and m.link):
            return 0.0
        exposed = link_s * m.link
        on_cpu = exposed * rates.share_on_cpu(exposed, m.link, m.cpu, layers) if given is None else given * nbytes
        if not on_cpu:
            return 0.0
        return link_s - max(max(0.0, exposed - on_cpu) / m.link, on_cpu / m.cpu) - rates.TURN_S * layers

    def _share(self, quantizes: bool) -> float:
        """Bytes of the host pool's K/V for each that they have exactly."""
        g, c = self.geometry, self.conversation
        rounded = (c.tokens - c.exact if quantizes else c.rounded) / max(c.tokens, 1)
        return 1 - rounded * (1 - eight_bit_pages.share(g))

    def _on_host(self, quantizes: bool) -> int:
        g, c = self.geometry, self.conversation
        rounded = max(0, c.tokens - c.exact) if quantizes else c.rounded
        return g.layers * layer_bytes(g, g.grown(c.tokens - rounded), g.round_up(rounded))

    def _lacks(self, name: str, held: int, quantizes: bool) -> str:
        m, on_host = self.machine, self._on_host(quantizes)
        if self.geometry.unified:
            on_host += held
        else:
            needed = held + staging_bytes(self.geometry, self.capacity, CHUNKS[0]) + PREFILL_WORKSPACE
            if held and needed > m.device_free:
                return f"{name} takes {size(needed)} on the device, {size(m.device_free)} are free"
        if on_host > m.host_free * (1 if quantizes else EARLY):
            return f"the K/V take {size(on_host)} of {size(m.host_free)} of RAM"
        return ""


# ---- the choice ------------------------------------------------------------------------------------
def choose(
    possible: Sequence[Way],
    target: float,
    ratios: Mapping[str, float] | None = None,
    current: Way | None = None,
    below: int = 0,
) -> Choice:
    """The first way that fits and takes at most ``target`` seconds a token, or hardly more than the quickest does.

    Args:
        possible: the most faithful first, at least one.
        target: seconds.
        ratios: by kind, what was measured over what was predicted.
        current: the way in use: a more faithful one that is slower has to be taken easily.
        below: ways before this place are not taken.
    """
    ratios = ratios or {}
    mean = fmean(ratios.values()) if ratios else 1.0
    timed = [way.seconds * ratios.get(way.kind, mean) for way in possible]
    here = (current is not None and place(possible, current)) or 0
    allowed = range(below, len(possible))
    fitting = [at for at in allowed if not possible[at].lacks] or [*allowed]
    quickest = min(fitting, key=timed.__getitem__)
    limit = max(target, NEARLY * timed[quickest])
    easily = [EASILY if at < here and timed[at] > timed[here] else 1 for at in range(len(possible))]
    at = next((at for at in fitting if timed[at] <= limit * easily[at]), quickest)
    return Choice(possible[at], timed[at], _line(possible, timed, at, target, bool(ratios)))


def place(possible: Sequence[Way], way: Way) -> int | None:
    """Where a way stands among those that are possible; None where it is none of them."""
    return possible.index(way) if way in possible else None


def _line(possible: Sequence[Way], timed: Sequence[float], at: int, target: float, is_measured: bool) -> str:
    way, before = possible[at], possible[:at]
    taken = f"{'' if is_measured else 'at least '}{_ms(timed[at])} a token"  # by its bytes alone
    if timed[at] > target:
        is_met = any(one <= target for one, other in zip(timed, possible, strict=True) if not other.lacks)
        why = "modes that read less are hardly faster" if is_met else f"nothing that fits is as fast as {_ms(target)}"
        return f"auto: {way.label}, {taken}: {why}"
    if not before:
        return f"auto: {way.label}, {taken}"
    slow = next((one for one in range(at) if not before[one].lacks), None)
    if slow is None:
        return f"auto: {way.label}, because {before[0].lacks}"
    return f"auto: {way.label}, because {before[slow].name} would take {_ms(timed[slow])} a token{before[slow].place}"


def _ms(seconds: float) -> str:
    return figure(1000 * seconds, "ms", 0 if seconds >= 0.01 else 1)


class Auto:
    """Chooses anew between two answers, and within one where memory or time force it.

    ``ratios`` are what was measured over what was predicted, by the kind of way. ``refused`` are ways that could not be
    entered for this answer. ``quantizes`` says that a person asked for 8-bit pages.
    """

    def __init__(self, quantizes: bool = False) -> None:
        self.parameters = AutoParameters()
        self.is_on = False
        self.quantizes = quantizes
        self.choice: Choice | None = None
        self.ratios: dict[str, float] = {}
        self.refused: list[Way] = []
        self._changed_at = -APART

    @property
    def line(self) -> str:
        """What is chosen now and why; "" where a person chose."""
        return (self.choice.line if self.choice else UNDECIDED) if self.is_on else ""

    def begin(self, parameters: AutoParameters) -> None:
        """Choose from now on; what is in force counts for nothing."""
        self.parameters, self.is_on, self.choice, self._changed_at = parameters, True, None, -APART

    def between(self, possible: Sequence[Way], steps: int) -> Choice | None:
        """What the next answer is to be decoded in, after ``steps`` in all; None where that is in force."""
        current = self.choice.way if self.choice else None
        found, here = choose(possible, self._target, self.ratios, current), self._here(possible)
        if found.way == current:
            self.choice = found  # with its present time
            return None
        goes_back = here is not None and possible.index(found.way) < here
        return None if goes_back and steps - self._changed_at < APART else found

    def is_slow(self, measured: float) -> bool:
        """A token that takes so many seconds changes the way in an answer."""
        return measured > FORCED * self._target

    def within(self, possible: Sequence[Way], steps: int, measured: float) -> Choice | None:
        """What to go on with where a token takes ``measured`` seconds; None for what is in force."""
        here = self._here(possible)
        if here is None or here + 1 == len(possible):
            return None
        lacks = possible[here].lacks
        if not (lacks or (self.is_slow(measured) and steps - self._changed_at >= APART)):
            return None
        found = choose(possible, self._target, self.ratios, below=here + 1)
        helps = not found.way.lacks if lacks else found.seconds <= WORTH * measured
        return found if helps else None

    def note(self, possible: Sequence[Way], measured: float) -> None:
        """A token took ``measured`` seconds in the way in force; what is known of others fades a little."""
        if (here := self._here(possible)) is not None:
            way = possible[here]
            seen, before = measured / way.seconds, self.ratios.get(way.kind)
            self.ratios[way.kind] = seen if before is None else before + WEIGHT * (seen - before)
            for other in self.ratios.keys() - {way.kind}:
                self.ratios[other] += FADING * (self.ratios[way.kind] - self.ratios[other])

    def entered(self, choice: Choice, steps: int) -> None:
        self.choice, self._changed_at = choice, steps

    def _here(self, possible: Sequence[Way]) -> int | None:
        return place(possible, self.choice.way) if self.choice else None

    @property
    def _target(self) -> float:
        return 1 / self.parameters.tokens_per_s
