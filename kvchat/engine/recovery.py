"""Recovery during an answer: signals detect that the text goes wrong, and the levels SR, WR, FR and RR correct it.

The signals use the model's own probabilities, before temperature and truncation; they are read back with the token.

Paper: ASR-KF-EGR, section 3.6, which names the four levels and leaves the triggers to future work. ``Ladder`` only
computes: the caller measures every token and carries out the level that it returns.

Decisions:
    * A signal is compared with the 64 tokens before it, from the 32nd token on. A fall of the log-probability is
      measured in deviations of single tokens, not of 8-token means: the more patient reading of "3 sigma".
    * A deviation counts as at least ``MIN_DEVIATION``, so that one surprise in a very certain text is no alarm.
    * Between 32 and 64 tokens after an action the same level is tried again; after that the ladder starts over.
    * Levels that a mode cannot use are left out. RR that may not be repeated yet is replaced by the level before. FR is
      not repeated while it holds: it does not help a model that repeats itself although it reads everything.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from kvchat.engine.sampler import Sampler, SamplerState, checked, read
from kvchat.kv.modes.base import LEVELS, RECENT, Level, Mode

REGENERATE_TOKENS = 16  # tokens that RR withdraws
BASELINE, WARM_UP = 64, 32
SIGMAS = 3.0
MIN_DEVIATION = 0.5
SPIKES, SPIKE_SPAN = 2, 4
LOG_PROB_SPAN = 8
NGRAM, REPEATS = 12, 3
COOL_DOWN, ESCALATE, CALM_TOKENS = 16, 32, 64
REGENERATE_EVERY = 128


class RecoveryMonitor:
    """Samples the tokens of one answer and watches them; ``due`` is the recovery to carry out before the next token.

    ``level`` is the level of the last action, "calm", or empty without recovery.
    """

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler
        self.signals = Signals()
        self.ladder = Ladder(())
        self.due: tuple[Level, Trigger] | None = None
        self.level = ""
        self._states: deque[SamplerState] = deque(maxlen=REGENERATE_TOKENS)

    def draw(self, logits: Tensor, mode: Mode) -> int:
        """Sample the next token; without recovery nothing is measured.

        Raises:
            EngineError: the logits are not finite.
        """
        if not mode.parameters.recovery:
            self._states.clear()
            self.level = ""
            return read(self.sampler(logits))
        self._states.append(self.sampler.state())
        value, entropy, log_prob = measure(logits, self.sampler(logits)).tolist()
        token = checked(int(value))
        self._watch(mode)
        trigger = self.signals.add(token, entropy, log_prob)
        level = self.ladder.token(trigger is not None)
        self.due = (level, trigger) if level and trigger else None
        self.level = self.ladder.level or "calm"
        return token

    def take(self) -> tuple[Level, Trigger] | None:
        """Return the recovery that is due, if any, and forget it."""
        due, self.due = self.due, None
        return due

    def rewind(self) -> int:
        """Forget up to ``REGENERATE_TOKENS`` tokens and use other random numbers; return how many were forgotten."""
        tokens = len(self._states)
        self.sampler.set_state(self._states[0])
        self.sampler.fork()
        self.signals.withdraw(tokens)
        self._states.clear()
        return tokens

    def _watch(self, mode: Mode) -> None:
        """Use the ladder of the mode's levels."""
        levels = mode.recovery_levels
        if self.sampler.greedy and levels == ("RR",):
            levels = ()  # greedy sampling would only repeat the withdrawn tokens
        if levels != self.ladder.levels:
            self.ladder = Ladder(levels)


def measure(logits: Tensor, token: Tensor) -> Tensor:
    """Return ``token`` (0-d), the entropy in nats of the distribution of ``logits [vocab]``, and its log-probability.

    All are in one float64 ``[3]``, so that they are read back at once.
    """
    log_probs = logits.log_softmax(0)
    log_prob = log_probs.index_select(0, token.clamp(min=0).view(1))
    entropy = torch.special.entr(log_probs.exp()).sum().view(1)
    return torch.cat((token.view(1).double(), entropy.double(), log_prob.double()))


class Trigger(NamedTuple):
    """The signal that triggered recovery: ``entropy`` (z), ``log-prob`` (z) or ``repetition`` (count)."""

    signal: str
    value: float


@dataclass
class Signals:
    """The measurements of each token of one answer."""

    entropies: list[float] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    _spikes: list[bool] = field(default_factory=list)
    _grams: dict[tuple[int, ...], int] = field(default_factory=dict)

    def add(self, token: int, entropy: float, log_prob: float) -> Trigger | None:
        """Add a token, sampled with log-probability ``log_prob`` from a distribution of ``entropy`` nats."""
        z = _deviations(entropy, self.entropies)
        self._spikes.append(z > SIGMAS)
        self.entropies.append(entropy)
        self.log_probs.append(log_prob)
        self.tokens.append(token)
        times = 0
        if len(self.tokens) >= NGRAM:
            gram = tuple(self.tokens[-NGRAM:])
            times = self._grams[gram] = self._grams.get(gram, 0) + 1
        # How many deviations the mean log-probability of the last 8 tokens is below that of the tokens before.
        last = self.log_probs[-LOG_PROB_SPAN:]
        fall = -_deviations(math.fsum(last) / len(last), self.log_probs[:-LOG_PROB_SPAN])
        if self._spikes[-1] and sum(self._spikes[-SPIKE_SPAN:]) >= SPIKES:
            return Trigger("entropy", z)
        if fall > SIGMAS:
            return Trigger("log-prob", -fall)
        return Trigger("repetition", times) if times >= REPEATS else None

    def withdraw(self, tokens: int) -> None:
        for end in range(len(self.tokens), len(self.tokens) - tokens, -1):
            if end >= NGRAM:
                self._grams[tuple(self.tokens[end - NGRAM : end])] -= 1
        kept = len(self.tokens) - tokens
        for series in (self.entropies, self.log_probs, self.tokens, self._spikes):
            del series[kept:]


class Ladder:
    """Chooses one of ``levels`` at each trigger; counts the sampled tokens, including withdrawn ones."""

    def __init__(self, levels: Sequence[Level] = LEVELS) -> None:
        self.levels = tuple(levels)
        self.drawn = 0
        self._acted = -CALM_TOKENS - 1
        self._regenerated = -REGENERATE_EVERY
        self._reset = -RECENT - 1  # when FR, or RR, which includes it, was last carried out
        self._level_index = 0
        self._last = ""

    @property
    def level(self) -> str:
        """The level of the last action, empty once the text is calm."""
        return self._last if self.drawn - self._acted <= CALM_TOKENS else ""

    def token(self, triggered: bool) -> Level | None:
        """Count a sampled token; return the level to carry out now, if any."""
        self.drawn += 1
        since = self.drawn - self._acted
        if not triggered or not self.levels or since <= COOL_DOWN:
            return None
        if since > CALM_TOKENS:
            self._level_index = 0
        elif since <= ESCALATE:
            self._level_index = min(self._level_index + 1, len(self.levels) - 1)
        return self._act()

    def _act(self) -> Level | None:
        level = self.levels[self._level_index]
        if level == "RR" and self.drawn - self._regenerated < REGENERATE_EVERY:
            if self._level_index == 0:
                return None
            level = self.levels[self._level_index - 1]
        if level == "FR" and self.drawn - self._reset <= RECENT:
            return None
        if level == "RR":
            self._regenerated = self.drawn
        if level in ("FR", "RR"):
            self._reset = self.drawn
        self._acted, self._last = self.drawn, level
        return level


def _deviations(value: float, series: Sequence[float]) -> float:
    """Return how many standard deviations ``value`` is above the last 64 of ``series``; 0 for fewer than 32."""
    if len(series) < WARM_UP:
        return 0.0
    base = series[-BASELINE:]
    mean = math.fsum(base) / len(base)
    variance = math.fsum((x - mean) ** 2 for x in base) / len(base)
    return (value - mean) / max(math.sqrt(variance), MIN_DEVIATION)
