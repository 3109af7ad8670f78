"""Recovery while an answer is generated: every token is measured, and the ladder says when to act.

What is measured are the model's own probabilities, before temperature and cuts; they are read back with the token.
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from kvchat.engine.generate.recovery_signals import REWALK, Ladder, Signals, Trigger
from kvchat.engine.generate.sampler import Sampler, SamplerState, checked, read
from kvchat.kv.modes.base import Mode
from kvchat.kv.modes.recovery_levels import Level


class RecoveryMonitor:
    """Draws the tokens of one answer and watches them. ``due`` is what is to be done before the next one.

    ``level`` is that of the last action, calm, or empty without recovery.
    """

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler
        self.signals = Signals()
        self.ladder = Ladder(())
        self.due: tuple[Level, Trigger] | None = None
        self.level = ""
        self._states: deque[SamplerState] = deque(maxlen=REWALK)

    def draw(self, logits: Tensor, mode: Mode) -> int:
        """The next token; without recovery nothing is measured.

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
        """Return the recovery that is due and forget it; None if none is."""
        due, self.due = self.due, None
        return due

    def rewind(self) -> int:
        """Forget the last tokens, at most ``REWALK``, and go on with other random numbers; how many they are."""
        tokens = len(self._states)
        self.sampler.set_state(self._states[0])
        self.sampler.fork()
        self.signals.withdraw(tokens)
        self._states.clear()
        return tokens

    def _watch(self, mode: Mode) -> None:
        """A mode has a ladder of its own levels."""
        levels = mode.recovery_levels
        if self.sampler.greedy and levels == ("RR",):
            levels = ()  # nothing would come out otherwise
        if levels != self.ladder.levels:
            self.ladder = Ladder(levels)


def measure(logits: Tensor, token: Tensor) -> Tensor:
    """``token`` (0-d), the entropy in nats of the distribution ``logits [vocab]`` stand for, and its log-probability.

    float64 ``[3]``, so that one read-back gets all.
    """
    log_probs = logits.log_softmax(0)
    log_prob = log_probs.index_select(0, token.clamp(min=0).view(1))
    entropy = torch.special.entr(log_probs.exp()).sum().view(1)
    return torch.cat((token.view(1).double(), entropy.double(), log_prob.double()))
