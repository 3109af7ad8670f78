"""A session without a model that answers given pieces, one per token, with the interface of ``kvchat.Session``.

And a loader of such sessions, with the interface of ``kvchat.engine.worker.Loader``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kvchat.config import modes
from kvchat.errors import KvchatError
from kvchat.protocol.figures import MemoryPlan, Run, Snapshot, Stats
from kvchat.protocol.messages import (
    Compared,
    Comparing,
    Details,
    Event,
    Finished,
    HostDtype,
    Load,
    Loaded,
    NeedleHidden,
    Plan,
    Prefilled,
    Rebuilt,
    Resumed,
    Sampling,
    Started,
    Switched,
    Text,
    Turn,
    Variant,
)

PIECES = ("The", " quick", " brown", " fox", " jumps")


class FakeSession:
    """``on_token(session, n)`` runs before piece n; a switch raises ``failure``, piece 2 raises ``error``."""

    def __init__(
        self,
        pieces: Sequence[str] = PIECES,
        on_token: Callable[[FakeSession, int], None] = lambda session, n: None,
        failure: KvchatError | None = None,
        error: BaseException | None = None,
    ) -> None:
        self.pieces, self.on_token, self.failure, self.error = pieces, on_token, failure, error
        self.mode = "full"
        self.params: dict[str, Any] = {}
        self.resumed: list[tuple[str, tuple[Turn, ...]]] = []
        self.token_ids: list[int] = []
        self.asked: list[tuple[tuple[Turn, ...], Sampling]] = []
        self.switches: list[dict[str, Any]] = []
        self.canceled = threading.Event()
        self.closed = False
        self.loaded: Load | None = None
        self.withdrawable = 0
        self.notes: tuple[str, ...] = ()
        self.extras = {"heads corrected": "20%"}

    def open(self, load: Load, progress: Callable[[str], None] = lambda stage: None) -> FakeSession:
        """Replace ``kvchat.open_session``."""
        progress("reading the weights")
        self.loaded, self.mode = load, load.mode
        return self

    @property
    def info(self) -> Loaded:
        return Loaded("fake", "Fake", 1, "cpu", "float32", 4096, 2, 2, 32, 64, self.mode, self.params, self.notes)

    def resume(self, conversation: str, turns: Sequence[Turn]) -> Iterator[Event]:
        self.resumed.append((conversation, tuple(turns)))
        yield Resumed(conversation, 7, 0.5, "disk")

    def forget(self, conversation: str) -> None:
        self.resumed = [one for one in self.resumed if one[0] != conversation]

    def answer(
        self,
        turns: Sequence[Turn],
        sampling: Sampling,
        between: Callable[[int], None] | None = None,
        conversation: str | None = "",
        variant: Variant | None = None,
        template_args: Sequence[str] | None = None,
        json_schema: str = "",
        top_logprobs: int | None = None,
        must_call: Sequence[str] = (),
    ) -> Iterator[Event]:
        self.canceled.clear()
        self.asked.append((tuple(turns), sampling))
        self.token_ids, self.switches = [], []
        return self._answer(between)

    def _answer(self, between: Callable[[int], None] | None) -> Iterator[Event]:
        yield Started(7, 0)
        yield Prefilled(7, 7)
        for n, piece in enumerate(self.pieces):
            if between:
                between(n)
            self.on_token(self, n)
            if self.error and n == 2:
                raise self.error
            if self.canceled.is_set():
                break
            self.token_ids.append(100 + n)
            yield Text(piece, 1)
        stats = Stats(
            prompt_tokens=7, generated_tokens=len(self.token_ids), switches=tuple(self.switches), extras=self.extras
        )
        text = "".join(self.pieces[: len(self.token_ids)])
        yield Finished("stopped" if self.canceled.is_set() else "eos", text, stats)

    def rebuild(self) -> Iterator[Event]:
        yield Prefilled(5, 5)
        yield Rebuilt(5, 0.1)

    def compare(self, turns: Sequence[Turn], variants: Sequence[Variant], sampling: Sampling) -> Iterator[Event]:
        for index, _ in enumerate(variants):
            yield Comparing(index, self.pieces[0], 1)
        yield Compared(tuple(Run(variant.mode, variant.params, tuple(self.pieces)) for variant in variants), 7)

    def hide_needle(self, tokens: int, seed: int) -> NeedleHidden:
        return NeedleHidden((Turn("user", f"What was said in {tokens} tokens?"),), str(seed), 24)

    def cancel(self) -> None:
        self.canceled.set()

    def switch(self, mode: str = "", /, **params: Any) -> Switched:
        if self.failure:
            raise self.failure
        before, self.mode = self.mode, mode or self.mode
        self.params = modes.parse(self.mode, params).model_dump(exclude_unset=True)
        self.switches.append({"after": len(self.token_ids), "mode": self.mode})
        return Switched(before, self.mode, self.params, 7, 0, 0.0)

    def set_template_args(self, args: Sequence[str]) -> str:
        return f"variables {', '.join(args)}"

    def keep_pages(self, host_dtype: HostDtype) -> str:
        self.host_dtype = host_dtype
        return f"Pages are kept in {host_dtype} from now on."

    def snapshot(self) -> Snapshot:
        return Snapshot(self.mode, self.params, 7.0, 7, 4096, 64, 64)

    def details(self) -> Details:
        return Details(7, ((7, 7),), ((0, 0),))

    def text(self, start: int, end: int) -> str:
        return f"[{start}:{end}]"

    def close(self) -> None:
        self.closed = True


class FakeLoader:
    """Opens ``sessions`` one after the other, the last one repeatedly; an exception among them is raised.

    ``while_loading(progress)`` runs before; ``fits_beside`` returns ``has_room``; ``plan`` gives ``planned`` and
    records its ``in_use``.
    """

    def __init__(
        self,
        *sessions: FakeSession | BaseException,
        while_loading: Callable[[Callable[[str], None]], None] = lambda progress: None,
        has_room: bool = True,
        planned: MemoryPlan | KvchatError | None = None,
    ) -> None:
        self.sessions = list(sessions)
        self.while_loading, self.has_room, self.planned = while_loading, has_room, planned
        self.in_use: list[Snapshot | None] = []

    def open_session(self, load: Load, progress: Callable[[str], None]) -> FakeSession:
        session = self.sessions.pop(0) if len(self.sessions) > 1 else self.sessions[0]
        self.while_loading(progress)
        if isinstance(session, BaseException):
            raise session
        return session.open(load, progress)

    def fits_beside(self, load: Load, progress: Callable[[str], None]) -> bool:
        return self.has_room

    def plan(self, asked: Plan, in_use: Snapshot | None, progress: Callable[[str], None]) -> MemoryPlan:
        self.in_use.append(in_use)
        if isinstance(self.planned, KvchatError):
            raise self.planned
        assert self.planned is not None
        return self.planned
