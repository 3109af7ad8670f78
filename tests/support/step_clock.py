"""A clock that advances only by what each step of a session reads."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Self

import pytest

from kvchat.engine import metrics
from kvchat.engine.session import Session
from kvchat.kv.inspect import read_tokens
from kvchat.kv.ops import cpu_ops


@dataclass(kw_only=True)
class StepClock:
    """The time that steps take, in seconds, and each of them in ``steps``; a subclass defines it."""

    session: Session
    now: float = 0.0
    steps: list[float] = field(default_factory=list)

    def seconds(self, read: float, moved: int) -> float:
        """Seconds of a step that attended to ``read`` bytes of K/V, of which ``moved`` were copied to the device."""
        raise NotImplementedError

    def install(self, monkeypatch: pytest.MonkeyPatch) -> Self:
        """Let the session's metrics read this clock."""
        runner, state = self.session._runner, self.session._kv.state
        step, token_bytes = runner.step, state.geometry.token_bytes

        def timed(token: int) -> Any:
            before, moved = read_tokens(state), state.transfer.totals.moved_bytes
            logits = step(token)
            read = (read_tokens(state) - before) * token_bytes
            taken = self.seconds(read, state.transfer.totals.moved_bytes - moved)
            self.steps.append(taken)
            self.now += taken
            return logits

        monkeypatch.setattr(runner, "step", timed)
        clock = SimpleNamespace(perf_counter=lambda: self.now, monotonic=time.monotonic)
        monkeypatch.setattr(metrics, "time", clock)
        monkeypatch.setattr(cpu_ops, "awaited", {})  # loops still being compiled in the background
        return self
