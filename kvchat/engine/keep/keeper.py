"""Keeper: the K/V of conversations other than the present one, parked in host memory or saved on disk.

Going to another conversation parks the present one; coming back, or beginning one that begins alike, takes the longest
prefix from what is parked or saved. It settles into the mode as after a switch, and only the rest is read. After an
answer what is new is written behind, a page at a time. What changes it interrupts that and saves afterwards; a single
step only pauses it, and its token is written with the next that is saved.
"""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from kvchat.engine.generate.answer import AnswerLoop
from kvchat.engine.generate.runner import ModelRunner
from kvchat.engine.generate.stored import Stored, common_prefix
from kvchat.engine.guards import Released
from kvchat.engine.keep import page_file_rows as row
from kvchat.engine.keep.saved_folder import SavedFolder
from kvchat.engine.keep.sources import Source, itself, of_another, read_state
from kvchat.engine.keep.write_behind import Job, WriteBehind
from kvchat.errors import DoesNotFitError
from kvchat.kv.memory import available
from kvchat.kv.memory.kept_tokens import KeptTokens
from kvchat.kv.memory.page_file import DamagedFileError, PageFile
from kvchat.kv.memory.pages import exact_pages
from kvchat.kv.memory.parked import ParkedPages, parked_bytes
from kvchat.kv.memory_errors import explained
from kvchat.models.recurrent import Snapshot
from kvchat.protocol.messages import Event, Keeping, Noted, Resumed, Turn

LAST_WRITES_S = 1.0  # what the end of a session may wait for pages to be written
LOOKED_AT = 64  # files of other conversations whose beginning is compared

T = TypeVar("T")


@dataclass
class Parked:
    """A conversation in host memory; ``control`` are the positions of the chat's control tokens.

    ``snapshots`` are those of the recurrent state of a hybrid model, ``worth_saving`` some of them.
    """

    stored: Stored
    control: list[int]
    pages: ParkedPages
    snapshots: list[Snapshot]
    worth_saving: list[Snapshot]

    @property
    def nbytes(self) -> int:
        """Bytes of host memory."""
        return self.pages.nbytes + sum(snapshot.nbytes for snapshot in self.snapshots)


class Keeper(Released):
    """Keeps conversations as ``keeping`` says, of the model of ``runner``; ``loop.stored`` is the present one's."""

    _held = ("_runner", "_kv", "_writer")

    def __init__(self, runner: ModelRunner, loop: AnswerLoop, keeping: Keeping) -> None:
        self._runner = runner
        self._kv = runner.kv
        self._loop = loop
        self._keeping = keeping
        self._identity = row.identity(runner.model)
        self._present = ""
        self._parked: dict[str, Parked] = {}  # the one used last comes last
        self._folder = SavedFolder(Path(keeping.folder), keeping.saved_bytes)
        self._writer = WriteBehind(self._folder, self._kv.state.geometry.page)
        self._is_problem_told = False

    @property
    def parked_bytes(self) -> int:
        """Bytes of host memory that parked conversations take."""
        return sum(parked.nbytes for parked in self._parked.values())

    def interrupt(self) -> None:
        """Stop writing: what is stored is about to change."""
        self._writer.interrupt()

    def close(self, seconds: float = LAST_WRITES_S) -> None:
        """Write what is left, for so long at most, and free the rest, also under an answer that was left open."""
        if not (self._is_closed or self._loop.lock.is_forked):
            with suppress(RuntimeError):  # a GPU that failed: nothing can be copied from it
                self.save()
            self._writer.finish(seconds)
        self._parked.clear()
        self._release()

    def kept(self, conversation: str, turns: Sequence[Turn], answer: Iterator[Event]) -> Generator[Event, None, None]:
        """The events of an answer in ``conversation``, which is opened before and saved afterwards."""
        with self.changing():
            if turns:  # without any the answer is refused, and nothing was changed
                yield from self.resume(conversation, turns)
            yield from self._problem()
            yield from answer

    def saving(self, work: Iterator[T]) -> Generator[T, None, None]:
        """The events of ``work``, which changes what is stored; that is saved afterwards."""
        with self.changing():
            yield from work

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Stop writing for the block, in which what is stored changes; that is saved afterwards."""
        self.interrupt()
        try:
            yield
        finally:
            self.save()

    @contextmanager
    def adding(self) -> Iterator[None]:
        """Pause writing for the block, which stores a token; on a GPU a page that it filled may still be arriving."""
        with self._writer.paused():
            yield
            if self._writer.is_writing:
                self._kv.state.host.synchronize()

    # ---- going to a conversation

    def resume(self, conversation: str, turns: Sequence[Turn]) -> Iterator[Event]:
        """Make ``conversation`` the present one; ``Noted``*, and ``Resumed`` where some of it came back.

        Without ``turns`` it is empty.

        Raises:
            UsageError: as ``PromptEncoder.encode``.
        """
        if conversation == self._present:
            return
        self.interrupt()
        text, began = self._loop.encoder.render(turns) if turns else "", time.perf_counter()
        present = min(self._common(self._loop.stored, text), self._kv.state.first_rounded)
        sources = list(self._parked_sources(conversation, text)) if conversation else []
        self._parked.pop(conversation, None)  # its room is that of the one which goes
        self._park()
        self._present, self._loop.stored.saved = conversation, 0
        if conversation:
            try:
                sources += self._saved_sources(conversation, text)
            except (DamagedFileError, OSError) as error:
                reason = error.strerror if isinstance(error, OSError) else str(error)
                yield Noted(f"This conversation is read again; its saved K/V cannot be used: {reason}.")
        best = max(sources, key=lambda source: source.kept.tokens, default=None)
        if best and best.kept.tokens >= present + self._kv.state.geometry.page:
            yield from self._adopt(best, began)
        else:  # what was said in the conversation before this one is not to be saved as this one's
            self._truncate(present)

    def forget(self, conversation: str) -> None:
        """Keep nothing of a deleted conversation, whose file was set aside; nor what was written since."""
        self._writer.finish(0)
        self._parked.pop(conversation, None)
        if conversation == self._present:
            self._present = ""
            self._loop.stored.saved = 0
        if self._keeping.folder:
            self._folder.delete(conversation)
        self.save()

    def _truncate(self, tokens: int) -> None:
        if tokens < self._kv.total:
            self._loop.stored.truncate(tokens)
            self._runner.truncate(tokens)

    def _adopt(self, source: Source, began: float) -> Iterator[Event]:
        stored, recurrent, tokens = copy.deepcopy(source.stored), self._runner.recurrent, source.kept.tokens
        stored.truncate(tokens)
        self._loop.stored.truncate(0)
        recurrent.truncate(0)
        try:
            states = [source.states[at]() for at in sorted(source.states) if at <= tokens]
            with torch.inference_mode(), explained(self._kv, "taking up the conversation again"):
                there = self._kv.adopt(source.kept)
        except (DoesNotFitError, OSError) as error:
            yield Noted(f"This conversation is read again: {error}")
            return
        if there < tokens:
            yield Noted("A page of the saved K/V is damaged; what follows it is read again.")
        stored.truncate(there)
        self._loop.stored.become(stored)
        if recurrent.exists:
            recurrent.adopt(stored.ids, [state for state in states if state and state.tokens <= there])
            if recurrent.position < tokens == there:
                yield Noted("A saved recurrent state is damaged; what follows the one before it is read again.")
            self._truncate(there := recurrent.position)
        if there:
            yield Resumed(self._present, there, time.perf_counter() - began, source.where)

    # ---- where it can be taken from

    def _parked_sources(self, conversation: str, text: str) -> Iterator[Source]:
        for name, parked in self._parked.items():
            pages, states = parked.pages, {one.tokens: partial(itself, one) for one in parked.snapshots}
            exact = exact_pages(pages) * self._kv.state.geometry.page
            kept = KeptTokens(len(parked.stored.ids), pages.read, exact, parked.control, pages.query)
            source, own = Source(parked.stored, "memory", kept, states), name == conversation
            yield self._usable(source if own else of_another(source), text, own)

    def _saved_sources(self, conversation: str, text: str) -> Iterator[Source]:
        """The conversation's own file, and those of others that begin alike.

        Raises:
            DamagedFileError, OSError: its own file cannot be used.
        """
        if not self._saves:
            return
        own = self._folder.path(conversation)
        beginning = self._loop.encoder.ids_of(text, Stored())[: self._kv.state.geometry.page]
        for path in self._folder.latest_first()[:LOOKED_AT]:
            if path != own and path.suffix == own.suffix and self._begins(path, beginning):
                yield self._saved_source(path, text, own=False)
        if own.exists():
            source = self._saved_source(own, text, own=True)
            source.stored.saved = len(source.stored.ids)
            self._folder.touch(own)
            yield source

    def _begins(self, path: Path, ids: list[int]) -> bool:
        """True if the file of another conversation can be used and begins with ``ids``, a page of them."""
        try:
            return bool(self._file(path).rows(pages=1)["id"].tolist() == ids)
        except (DamagedFileError, OSError):
            return False

    def _saved_source(self, path: Path, text: str, own: bool) -> Source:
        file = self._file(path)
        rows, end = file.rows(), file.end()
        stored = row.stored_of(rows, text)
        stored.links = file.links
        exact = file.exact_pages * self._kv.state.geometry.page
        kept = KeptTokens(len(stored.ids), file.read, exact, row.control_positions(rows), end.query)
        states = {one.tokens: partial(read_state, file, one) for one in end.states}
        return self._usable(Source(stored, "disk", kept, states), text, own)

    def _usable(self, source: Source, text: str, own: bool) -> Source:
        """``source`` with as many tokens as ``text`` begins with and the model can go on from.

        Rounded ones are of use to their ``own`` conversation, and to others while pages are to be rounded.
        """
        tokens = self._common(source.stored, text)
        if not (own or self._kv.state.rounds):
            tokens = min(tokens, source.kept.exact)
        if self._runner.recurrent.exists:
            tokens = max((at for at in source.states if at <= tokens), default=0)
        return replace(source, kept=source.kept.beginning(tokens))

    def _common(self, stored: Stored, text: str) -> int:
        """Number of the stored tokens that ``text`` begins with."""
        return common_prefix(stored.ids, self._loop.encoder.ids_of(text, stored)) if stored.ids else 0

    # ---- keeping

    def _park(self) -> None:
        """Copy the present conversation, if there is room; those used least recently give way."""
        stored, pool, recurrent = self._loop.stored, self._kv.state.host, self._runner.recurrent
        if not (self._present and stored.ids):
            return
        recurrent.keep()
        needed = parked_bytes(pool) + recurrent.snapshot_bytes
        if needed > self._keeping.parked_bytes:
            return
        while self._parked and self.parked_bytes + needed > self._keeping.parked_bytes:
            del self._parked[next(iter(self._parked))]
        if needed <= available.usable(available.host_free()):
            pages = ParkedPages(pool, self._kv.state.query_bytes)
            self._parked[self._present] = Parked(
                copy.deepcopy(stored), self._control(), pages, recurrent.snapshots, recurrent.worth_saving
            )

    def save(self) -> None:
        """Begin to write what is new, of the present conversation and of parked ones."""
        if not self._saves:
            return
        self.interrupt()
        self._kv.state.host.synchronize()
        jobs = [
            self._job(name, one.stored, one.control, one.worth_saving, one.pages) for name, one in self._parked.items()
        ]
        if self._present:
            recurrent = self._runner.recurrent
            recurrent.keep()
            jobs.insert(0, self._job(self._present, self._loop.stored, self._control(), recurrent.worth_saving, None))
        self._writer.begin([job for job in jobs if job.saved < len(job.stored.ids)])

    def _problem(self) -> Iterator[Event]:
        """``Noted`` where saving failed since it worked last."""
        problem = self._writer.problem
        if problem and not self._is_problem_told:
            yield Noted(f"K/V cannot be saved: {problem}. The conversation goes on; after a restart it is read again.")
        self._is_problem_told = bool(problem)

    @property
    def _is_closed(self) -> bool:
        return "_writer" not in vars(self)

    @property
    def _saves(self) -> bool:
        # An answer that was left open ends there.
        if self._is_closed or self._loop.lock.is_forked or sys.is_finalizing():
            return False
        return bool(self._keeping.folder and self._keeping.saved_bytes and self._runner.model.revision)

    def _job(
        self,
        conversation: str,
        stored: Stored,
        control: list[int],
        snapshots: list[Snapshot],
        pages: ParkedPages | None,
    ) -> Job:
        """The part of a conversation, parked or present, that is not on disk yet."""
        page = self._kv.state.geometry.page
        first = stored.saved // page
        file = self._file(self._folder.path(conversation))
        file.links = stored.links[:first]
        state = self._kv.state
        query = pages.query if pages else state.query_bytes
        return Job(
            file,
            stored,
            first,
            row.rows_of(stored, control, first * page),
            lambda: pages or state.host,
            stored.saved,
            query,
            snapshots,
        )

    def _control(self) -> list[int]:
        found: list[int] = self._kv.state.control[: self._kv.total].nonzero().flatten().tolist()
        return found

    def _file(self, path: Path) -> PageFile:
        return PageFile(path, self._kv.state.geometry, self._identity)
