"""A follower, ``python -m kvchat.engine.ranks``: executes the leader's orders on its part of a model.

The leader starts it and writes pickles to its stdin: ``Begin``, then orders. The follower answers each with None, or
with the error if the order was refused or memory ran out. ``FORWARDS`` are answered only on errors, because the ranks
agree during a forward pass whether one of them failed. Any other error ends the process. It also ends when its stdin
closes, even inside a collective operation that the leader will never join.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import queue
import shutil
import signal
import sys
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch

from kvchat import files
from kvchat.config.modes import ModeParameters
from kvchat.engine.runner import ModelRunner, geometry_of, traits_of
from kvchat.errors import KvchatError
from kvchat.kv.manager import Checkpoint, is_out_of_memory
from kvchat.kv.modes import build
from kvchat.kv.modes.base import Mode
from kvchat.kv.modes.sync_heads import TokenChoice
from kvchat.models.load import LoadedModel, load_model
from kvchat.models.ranks.group import OtherRankFailedError, Rank, join
from kvchat.process import claim_stdio
from kvchat.protocol.messages import Load

FORWARDS = frozenset({"step", "forward_chunk"})
OF_RUNNER = FORWARDS | {"planned_chunk"}


class Begin(NamedTuple):
    """Load this rank's part of the model ``asked`` for; the ranks meet through the file ``meeting``."""

    asked: Load
    rank: Rank
    meeting: str


class Order(NamedTuple):
    """A method's ``name`` and its arguments; a mode is sent as a ``ModeOrder``."""

    name: str
    given: tuple[Any, ...]
    named: dict[str, Any]

    @classmethod
    def of(cls, name: str, *given: object, **named: object) -> Order:
        return cls(name, tuple(ModeOrder.of(one) if isinstance(one, Mode) else one for one in given), named)


class ModeOrder(NamedTuple):
    """Describes a mode, which each rank builds for its own heads."""

    parameters: ModeParameters
    choice: TokenChoice | None
    system_tokens: int

    @classmethod
    def of(cls, mode: Mode) -> ModeOrder:
        return cls(mode.parameters, mode.traits.choice, mode.system_tokens)


class Follower:
    """Executes orders on its part of ``model``: its own methods, and those of its runner and KV manager."""

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        self._guessing = ExitStack()
        self._kept: Checkpoint | None = None

    def do(self, order: Order) -> None:
        """Execute an order."""
        if order.name in OF_RUNNER:
            getattr(self._runner, order.name)(*order.given, **order.named)
            return
        with torch.inference_mode():
            given = [self._built(one) if isinstance(one, ModeOrder) else one for one in order.given]
            executes = self if hasattr(Follower, order.name) else self._runner.kv
            getattr(executes, order.name)(*given, **order.named)

    def begin(self, mode: Mode) -> None:
        """Start in this mode, with nothing stored."""
        self._runner = ModelRunner(self._model, mode)

    def guess(self, begins: bool) -> None:
        """Begin or end ``KVManager.guessing``."""
        if begins:
            self._guessing.enter_context(self._runner.kv.guessing())
        else:
            self._guessing.close()

    def checkpoint(self, start: int) -> None:
        """Call ``KVManager.checkpoint`` and keep the result for ``restore``."""
        self._kept = self._runner.kv.checkpoint(start)

    def restore(self) -> None:
        """Call ``KVManager.restore`` with the kept checkpoint."""
        assert self._kept is not None
        self._runner.kv.restore(self._kept)
        self._kept = None

    def _built(self, mode: ModeOrder) -> Mode:
        traits = traits_of(self._model, choice=mode.choice)
        return build(mode.parameters, geometry_of(self._model), traits, mode.system_tokens)


def main() -> None:
    files.name_temporary_folder()
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    stdin, stdout = claim_stdio()
    begin: Begin = pickle.load(stdin)
    orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
    meeting = Path(begin.meeting).parent
    threading.Thread(target=_receive, args=(stdin, orders, meeting), daemon=True).start()
    try:
        model = load_model(begin.asked, lambda _: None, lambda made: join(begin.meeting, begin.rank, made.device))
        follower = Follower(model)
        while True:
            _execute(follower, orders.get(), stdout)
    except KvchatError as error:
        sys.exit(f"kvchat: rank {begin.rank.number}: {error}")
    finally:
        shutil.rmtree(meeting, ignore_errors=True)  # a forward pass may fail before the leader's end is noticed


def _execute(follower: Follower, order: Order, stdout: BinaryIO) -> None:
    try:
        follower.do(order)
    except Exception as error:
        if not (isinstance(error, KvchatError | OtherRankFailedError) or is_out_of_memory(error)):
            raise
        pickle.dump(error, stdout)
    else:
        if order.name not in FORWARDS:
            pickle.dump(None, stdout)
    stdout.flush()


def _receive(stdin: BinaryIO, orders: queue.SimpleQueue[Order], meeting: Path) -> None:
    try:
        while True:
            orders.put(pickle.load(stdin))
    except EOFError:
        shutil.rmtree(meeting, ignore_errors=True)  # a killed leader leaves it behind
        os._exit(0)  # the leader ended or closed this rank
