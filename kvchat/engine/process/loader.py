"""The interfaces of a session and its loader, as the worker uses them; the real one imports torch at its first call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from kvchat import install
from kvchat.kv.memory.available import check_address_space
from kvchat.protocol import figures, messages
from kvchat.protocol.comparing import Variant
from kvchat.protocol.details import Details
from kvchat.protocol.messages import Event, Load, Plan

Progress = Callable[[str], None]


class Session(Protocol):
    """The part of ``kvchat.Session`` that the worker uses."""

    @property
    def info(self) -> messages.Loaded: ...
    def answer(
        self,
        turns: Sequence[messages.Turn],
        sampling: messages.Sampling,
        between: Callable[[int], None] | None = None,
        conversation: str = "",
    ) -> Iterator[Event]: ...
    def resume(self, conversation: str, turns: Sequence[messages.Turn]) -> Iterator[Event]: ...
    def forget(self, conversation: str) -> None: ...
    def rebuild(self) -> Iterator[Event]: ...
    def compare(
        self, turns: Sequence[messages.Turn], variants: Sequence[Variant], sampling: messages.Sampling
    ) -> Iterator[Event]: ...
    def hide_needle(self, tokens: int, seed: int) -> messages.NeedleHidden: ...
    def cancel(self) -> None: ...
    def switch(self, mode: str = "", /, **params: Any) -> messages.Switched: ...
    def set_template_args(self, args: Sequence[str]) -> str: ...
    def keep_pages(self, host_dtype: messages.HostDtype) -> str: ...
    def snapshot(self) -> figures.Snapshot: ...
    def details(self) -> Details: ...
    def text(self, start: int, end: int) -> str: ...
    def close(self) -> None: ...


class Loader(Protocol):
    """Makes sessions for the worker; each method may raise ``KvchatError``."""

    def open_session(self, load: Load, progress: Progress) -> Session: ...
    def fits_beside(self, load: Load, progress: Progress) -> bool: ...
    def plan(self, asked: Plan, in_use: figures.Snapshot | None, progress: Progress) -> figures.MemoryPlan: ...


class EngineLoader:
    """kvchat's own sessions and plans."""

    def open_session(self, load: Load, progress: Progress) -> Session:
        """As ``kvchat.engine.session.open_session``."""
        check_address_space()
        install.check(load.quantize, load.device)
        from kvchat.engine.session import open_session

        return open_session(load, progress)

    def fits_beside(self, load: Load, progress: Progress) -> bool:
        """As ``kvchat.engine.plan.fits_beside``."""
        from kvchat.engine.plan import fits_beside

        return fits_beside(load, progress)

    def plan(self, asked: Plan, in_use: figures.Snapshot | None, progress: Progress) -> figures.MemoryPlan:
        """As ``kvchat.engine.plan.memory_plan``."""
        from kvchat.engine.plan import memory_plan

        return memory_plan(asked.load, asked.context, progress, in_use)
