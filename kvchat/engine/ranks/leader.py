"""The leading rank: the engine's own process, which samples, decides and answers, and lets the others follow.

What it does to the stored tokens the others do too, in the same order: each forward, truncation and switch is an order
to them (``LeadingRunner``, ``LeadingKV``). Nothing else is agreed on: text, sampling, stops, measured times, auto's
choices and drafts are known to the leader alone; what is measured of the model is measured on its heads.

Where one rank refuses a change or its memory runs out, none has made it: a forward is undone by all, as is the entry of
a mode. The death of a rank ends the leader, as an interrupted order does; the others end when their stdin closes. The
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

NOTICED_S = 0.5  # in which the end of a process is noticed
GRACE_S = 1.0  # that followers have to end once their stdin is closed
F = TypeVar("F")


class Followers:
    """The other ranks' processes of a model that is ``asked`` for; they are started when its load ``meet``s them."""

    def __init__(self, asked: Load) -> None:
        self._asked = asked
        self._processes: list[subprocess.Popen[bytes]] = []
        self._folder = ""
        self._is_closing = self._is_inside = False

    def meet(self, described: ModelDescription) -> Rank:
        """Start the others, on a GPU each, and wait for them; the leader's rank.

        Raises:
            UsageError: there are fewer GPUs, or this process leads others already.
        """
        first, count = described.device, self._asked.gpus
        on_cpu = first.type == "cpu" and self._asked.device == "cpu"  # asked for: to try it without GPUs
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
        # In a session of its own: the terminal's Ctrl+C is not for it.
        started = subprocess.Popen(command, stdin=pipe, stdout=pipe, start_new_session=True)
        self._processes.append(started)
        threading.Thread(target=self._watch, args=(started, begin.rank.number), daemon=True).start()
        _write(started, begin)

    def _watch(self, started: subprocess.Popen[bytes], number: int) -> None:
        code = started.wait()
        if not self._is_closing:  # the main thread may wait for it for ever, deep in a library
            self._end(f"rank {number} of {self._asked.gpus} ended ({code})")

    def _end(self, why: str) -> NoReturn:
        shutil.rmtree(self._folder, ignore_errors=True)
        sys.stderr.write(f"kvchat: {why}; the engine cannot go on without it\n")
        sys.stderr.flush()
        os._exit(1)

    @contextmanager
    def following(self, name: str, *given: object, **named: object) -> Iterator[None]:
        """Let the others do what the block does; blocks inside it are a part of that.

        Raises:
            Exception: what the block raises, or what another rank was refused.
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
        except BaseException as interrupted:  # noqa: BLE001  # the ranks are not alike any more
            time.sleep(NOTICED_S)  # if the end of a rank is the reason, its thread tells it
            self._end(f"{name} was interrupted: {interrupted}")
        finally:
            self._is_inside = False
        if name not in FORWARDS and (refusals := self._refusals()):
            raise refusals[0]

    def check_switch(self, mode: Mode) -> None:
        """Ask the others whether they can enter a mode.

        Raises:
            DoesNotFitError: one of them cannot.
        """
        self._send(Order.of("check_switch", mode))
        if refusals := self._refusals():
            raise refusals[0]

    def _send(self, order: Order) -> None:
        for each in self._processes:
            with suppress(BrokenPipeError):  # its end is being noticed
                _write(each, order)

    def _answers(self) -> list[Exception | None]:
        return [pickle.load(cast("BinaryIO", each.stdout)) for each in self._processes]

    def _refusals(self) -> list[Exception]:
        return [each for each in self._answers() if each and not isinstance(each, OtherRankFailedError)]

    def close(self) -> None:
        """End them; may be called again."""
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
    """A method that the other ranks execute too, on their own heads."""
    own = cast("Any", method)

    @wraps(own)
    def all_do(self: Any, *given: Any, **named: Any) -> Any:
        with self.followers.following(own.__name__, *given, **named):
            return own(self, *given, **named)

    return cast("F", all_do)


class LeadingRunner(ModelRunner):
    """A runner whose forwards all ranks run."""

    def __init__(self, followers: Followers, model: LoadedModel, mode: Mode, kv: KVManager) -> None:
        self.followers = followers
        super().__init__(model, mode, kv=kv)

    def _step(self, token: int | Tensor, control: bool = False) -> Tensor:
        token = int(token)  # a guess is the device's
        with self.followers.following("step", token):
            return super()._step(token, control)

    forward_chunk = _followed(ModelRunner.forward_chunk)
    planned_chunk = _followed(ModelRunner.planned_chunk)


class LeadingKV(KVManager):
    """A KV manager whose changes all ranks make to their own heads' K/V."""

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
        with self.followers.following("restore"):  # each its own
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
        """Let all ranks ``change`` what they keep, or ``undo`` it where one of them was refused."""
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
