"""Detects that generation goes wrong by entropy signals, and escalates recovery by the SR, WR, FR, RR ladder.

Paper: ASR-KF-EGR, section 3.6, which names the four levels and leaves triggers to future work. Pure numbers: the
caller measures every token and carries out what ``Ladder`` answers.

Decisions:
    * A signal is compared with the 64 tokens before it, from the 32nd token on. Falling log-probability is measured
      in deviations of single tokens, not of 8-token means: the more patient reading of "3 sigma".
    * Deviations count as at least ``MIN_DEVIATION``: in a text that was certain all along one surprise is no alarm.
    * Between 32 and 64 tokens after an action the same level is tried again; after that the ladder starts over.
    * Levels that a mode has no use for are left out. A rewalk that may not be repeated yet becomes the level before.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvchat.kv.modes.recovery_levels import LEVELS, Level

REWALK = 16  # tokens that RR withdraws

BASELINE, WARM_UP = 64, 32
SIGMAS = 3.0
MIN_DEVIATION = 0.5
MIN_ENTROPY = 1.0  # nat
SPIKES, SPIKE_SPAN = 2, 4
LOG_PROB_SPAN = 8
NGRAM, REPEATS = 12, 3

COOL_DOWN, ESCALATE, CALM_TOKENS = 16, 32, 64
REWALK_EVERY = 128


class Trigger(NamedTuple):
    """The signal that triggered recovery: ``entropy`` (z), ``log-prob`` (z) or ``repetition`` (times)."""

    signal: str
    value: float


@dataclass
class Signals:
    """Measurements at each token of one answer."""

    entropies: list[float] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    _spikes: list[bool] = field(default_factory=list)
    _grams: dict[tuple[int, ...], int] = field(default_factory=dict)

    def add(self, token: int, entropy: float, log_prob: float) -> Trigger | None:
        """A token was drawn from a distribution of ``entropy`` nats, in which its logarithmic probability was this."""
        z = _deviations(entropy, self.entropies)
        self._spikes.append(z > SIGMAS and entropy > MIN_ENTROPY)
        self.entropies.append(entropy)
        self.log_probs.append(log_prob)
        self.tokens.append(token)
        times = self._count_gram()
        fall = self._fall()
        if self._spikes[-1] and sum(self._spikes[-SPIKE_SPAN:]) >= SPIKES:
            return Trigger("entropy", z)
        if fall > SIGMAS:
            return Trigger("log-prob", -fall)
        return Trigger("repetition", times) if times >= REPEATS else None

    def withdraw(self, tokens: int) -> None:
        """Forget the last tokens."""
        for end in range(len(self.tokens), len(self.tokens) - tokens, -1):
            if end >= NGRAM:
                self._grams[tuple(self.tokens[end - NGRAM : end])] -= 1
        kept = len(self.tokens) - tokens
        for series in (self.entropies, self.log_probs, self.tokens, self._spikes):
            del series[kept:]

    def _fall(self) -> float:
        """By how many deviations the last 8 tokens' mean log-probability lies under that of the tokens before."""
        last = self.log_probs[-LOG_PROB_SPAN:]
        return -_deviations(math.fsum(last) / len(last), self.log_probs[:-LOG_PROB_SPAN])

    def _count_gram(self) -> int:
        if len(self.tokens) < NGRAM:
            return 0
        gram = tuple(self.tokens[-NGRAM:])
        self._grams[gram] = self._grams.get(gram, 0) + 1
        return self._grams[gram]


class Ladder:
    """Chooses one of ``levels`` at each trigger; counts the tokens drawn, withdrawn ones included."""

    def __init__(self, levels: Sequence[Level] = LEVELS) -> None:
        self.levels = tuple(levels)
        self.drawn = 0
        self._acted = -CALM_TOKENS - 1
        self._rewalked = -REWALK_EVERY
        self._rung = 0
        self._last = ""

    @property
    def level(self) -> str:
        """The level of the last action, empty when all is calm."""
        return self._last if self.drawn - self._acted <= CALM_TOKENS else ""

    def token(self, triggered: bool) -> Level | None:
        """A token was drawn; the action to take now."""
        self.drawn += 1
        since = self.drawn - self._acted
        if not triggered or not self.levels or since <= COOL_DOWN:
            return None
        if since > CALM_TOKENS:
            self._rung = 0
        elif since <= ESCALATE:
            self._rung = min(self._rung + 1, len(self.levels) - 1)
        return self._act()

    def _act(self) -> Level | None:
        level = self.levels[self._rung]
        if level == "RR" and self.drawn - self._rewalked < REWALK_EVERY:
            if self._rung == 0:
                return None
            level = self.levels[self._rung - 1]
        if level == "RR":
            self._rewalked = self.drawn
        self._acted, self._last = self.drawn, level
        return level


def _deviations(value: float, series: Sequence[float]) -> float:
    """Number of standard deviations of ``value`` above the last 64 of ``series``; 0 before there are 32."""
    if len(series) < WARM_UP:
        return 0.0
    base = series[-BASELINE:]
    mean = math.fsum(base) / len(base)
    variance = math.fsum((x - mean) ** 2 for x in base) / len(base)
    return (value - mean) / max(math.sqrt(variance), MIN_DEVIATION)
