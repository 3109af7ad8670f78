"""The leader: the engine process, which samples, decides and answers, and lets the other ranks follow.

Followers do everything that the leader does to the stored tokens, in the same order: each forward pass, truncation and
switch is an order to them (``LeadingRunner``, ``LeadingKV``). They share nothing else: only the leader knows text,
sampling, stops, measured times, auto's choices and drafts. The model's attention is measured on the leader's heads.

If one rank refuses a change or runs out of memory, all of them undo it, be it a forward pass or entering a mode. The
death of a rank ends the leader, and so does an interrupted order; the others end when their stdin closes. The
application then shows that the engine ended, and keeps the conversation.
"""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, TypeVar, cast

import torch
from torch import Tensor

from kvchat import process
from kvchat.engine.ranks.follower import FORWARDS, Begin, Order
from kvchat.engine.runner import ModelRunner
from kvchat.errors import UsageError
from kvchat.kv.geometry import Geometry
from kvchat.kv.manager import Checkpoint, KVManager
from kvchat.kv.modes.base import Mode
from kvchat.models.description import ModelDescription, resolve_others
from kvchat.models.load import LoadedModel
from kvchat.models.ranks.group import OtherRankFailedError, Rank, join, leave
from kvchat.protocol.messages import Load

NOTICED_S = 0.5  # time within which the end of a process is noticed
GRACE_S = 1.0  # time for followers to end after their stdin is closed
F = TypeVar("F")


class Followers:
    """The processes of the other ranks for the model ``asked`` for; ``meet`` starts them while it is loaded."""

    def __init__(self, asked: Load) -> None:
        self._asked = asked
        self._processes: list[subprocess.Popen[bytes]] = []
        self._folder = ""
        self._is_closing = self._is_inside = False

    def meet(self, described: ModelDescription) -> Rank:
        """Start the other ranks, each on its own GPU, and wait for them; return the leader's rank.

        Raises:
            UsageError: there are too few GPUs, or this process already leads others.
        """
        first, count = described.device, self._asked.gpus
        on_cpu = first.type == "cpu" and self._asked.device == "cpu"  # requested explicitly, to try it without GPUs
        others = (first,) * (count - 1) if on_cpu else resolve_others(first, count)
        if torch.distributed.is_initialized():
            raise UsageError("This process has a model whose heads are split.", hint="Close that session first.")
        self._folder = tempfile.mkdtemp(prefix="kvchat-ranks-")
        meeting = str(Path(self._folder) / "meeting")
        for number, device in enumerate(others, 1):
            theirs = replace(self._asked, device=str(device), dtype=described.dtype_name)
            self._start(Begin(theirs, Rank(number, count), meeting))
        return join(meeting, Rank(0, count), first)

    def _start(self, begin: Begin) -> None:
        command, pipe = process.python("-m", "kvchat.engine.ranks"), subprocess.PIPE
        # In its own session, so that Ctrl+C in the terminal does not reach it.
        started = subprocess.Popen(command, stdin=pipe, stdout=pipe, start_new_session=True)
        self._processes.append(started)
        threading.Thread(target=self._watch, args=(started, begin.rank.number), daemon=True).start()
        _write(started, begin)

    def _watch(self, started: subprocess.Popen[bytes], number: int) -> None:
        code = started.wait()
        if not self._is_closing:  # exit here: the main thread may wait for it forever, deep in a library
            self._end(f"rank {number} of {self._asked.gpus} ended ({code})")

    def _end(self, why: str) -> NoReturn:
        shutil.rmtree(self._folder, ignore_errors=True)
        sys.stderr.write(f"kvchat: {why}; the engine cannot go on without it\n")
        sys.stderr.flush()
        os._exit(1)

    @contextmanager
    def following(self, name: str, *given: object, **named: object) -> Iterator[None]:
        """Let the other ranks do what the block does; nested blocks are part of the outer order.

        Raises:
            Exception: what the block raises, or what another rank answered.
        """
        if self._is_inside:
            yield
            return
        self._is_inside = True
        self._send(Order.of(name, *given, **named))
        try:
            yield
        except OtherRankFailedError:
            raise self._refusals()[0] from None
        except Exception:
            self._answers()
            raise
        except BaseException as interrupted:  # noqa: BLE001  # the ranks' states now differ
            time.sleep(NOTICED_S)  # if a rank's end is the cause, its thread reports it meanwhile
            self._end(f"{name} was interrupted: {interrupted}")
        finally:
            self._is_inside = False
        if name not in FORWARDS and (refusals := self._refusals()):
            raise refusals[0]

    def check_switch(self, mode: Mode) -> None:
        """Ask the other ranks whether they can enter a mode.

        Raises:
            DoesNotFitError: one of them cannot.
        """
        self._send(Order.of("check_switch", mode))
        if refusals := self._refusals():
            raise refusals[0]

    def _send(self, order: Order) -> None:
        for each in self._processes:
            with suppress(BrokenPipeError):  # its thread notices that it ended
                _write(each, order)

    def _answers(self) -> list[Exception | None]:
        return [pickle.load(cast("BinaryIO", each.stdout)) for each in self._processes]

    def _refusals(self) -> list[Exception]:
        return [each for each in self._answers() if each and not isinstance(each, OtherRankFailedError)]

    def close(self) -> None:
        """End the other ranks; may be called again."""
        self._is_closing = True
        for each in self._processes:
            with suppress(BrokenPipeError):
                cast("BinaryIO", each.stdin).close()
        for each in self._processes:
            try:
                each.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                each.kill()
                each.wait()
            cast("BinaryIO", each.stdout).close()
        if self._folder:
            leave()
            shutil.rmtree(self._folder, ignore_errors=True)
        self._processes, self._folder = [], ""


def _write(follower: subprocess.Popen[bytes], value: object) -> None:
    stream = cast("BinaryIO", follower.stdin)
    pickle.dump(value, stream)
    stream.flush()


def _followed(method: F) -> F:
    """Make the other ranks execute ``method`` too, on their own heads."""
    own = cast("Any", method)

    @wraps(own)
    def all_do(self: Any, *given: Any, **named: Any) -> Any:
        with self.followers.following(own.__name__, *given, **named):
            return own(self, *given, **named)

    return cast("F", all_do)


class LeadingRunner(ModelRunner):
    """A runner whose forward passes run on all ranks."""

    def __init__(self, followers: Followers, model: LoadedModel, mode: Mode, kv: KVManager) -> None:
        self.followers = followers
        super().__init__(model, mode, kv=kv)

    def _step(self, token: int | Tensor, control: bool = False) -> Tensor:
        token = int(token)  # a guessed token is a tensor on the device
        with self.followers.following("step", token):
            return super()._step(token, control)

    forward_chunk = _followed(ModelRunner.forward_chunk)
    planned_chunk = _followed(ModelRunner.planned_chunk)


class LeadingKV(KVManager):
    """A KV manager whose changes all ranks make to the K/V of their own heads."""

    def __init__(self, followers: Followers, geometry: Geometry, device: torch.device, mode: Mode) -> None:
        self.followers = followers
        with torch.inference_mode(), followers.following("begin", mode):
            super().__init__(geometry, device, mode)

    refill = _followed(KVManager.refill)
    recover = _followed(KVManager.recover)
    truncate = _followed(KVManager.truncate)
    end_at = _followed(KVManager.end_at)
    checkpoint = _followed(KVManager.checkpoint)

    def restore(self, checkpoint: Checkpoint) -> None:
        with self.followers.following("restore"):  # each rank restores its own checkpoint
            super().restore(checkpoint)

    def switch(self, mode: Mode) -> int:
        self.check_switch(mode)
        self.followers.check_switch(mode)
        params = self.effective_params
        try:
            return int(self._all_or_none("switch", mode, "go_back", self.mode))
        except Exception:
            self.effective_params = params
            raise

    def pin(self, positions: Sequence[int]) -> None:
        self._all_or_none("pin", positions, "_set_pins", self.state.pins)

    def quantize_pages(self, quantizes: bool) -> None:
        self._all_or_none("quantize_pages", quantizes, "quantize_pages", self.state.quantizes)

    def _all_or_none(self, change: str, given: object, undo: str, before: object) -> Any:
        """Let all ranks make a ``change``, or ``undo`` it if one of them refuses."""
        try:
            with self.followers.following(change, given):
                return getattr(KVManager, change)(self, given)
        except Exception:
            with self.followers.following(undo, before):
                getattr(KVManager, undo)(self, before)
            raise

    @contextmanager
    def guessing(self) -> Iterator[None]:
        guessing = super().guessing()
        try:
            with self.followers.following("guess", True):
                guessing.__enter__()
            yield
        finally:
            with self.followers.following("guess", False):
                guessing.__exit__(None, None, None)
