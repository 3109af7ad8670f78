"""The K/V of conversations other than the current one, parked in RAM or saved on disk.

Opening another conversation parks the current one. Coming back to it, or beginning one with the same beginning, takes
the longest prefix that is parked or saved; the mode fills its slots from it and only the rest is prefilled. After an
answer a thread writes what is new, a page at a time. Whatever changes the stored K/V interrupts that and saves again
afterwards; a single step only pauses it, and its token is written with the next save. Each conversation has a file,
which names the model that computed its K/V; beyond a limit the least recently used files are deleted.
"""

from __future__ import annotations

import copy
import os
import secrets
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import transformers

from kvchat import paths
from kvchat.engine.answer import AnswerLoop, Released
from kvchat.engine.prompt import Stored, common_prefix, is_text
from kvchat.engine.runner import ModelRunner
from kvchat.errors import DoesNotFitError
from kvchat.kv.manager import explained
from kvchat.kv.memory import available
from kvchat.kv.memory.host_pool import CachedPrefix, parked, parked_bytes, unparked
from kvchat.kv.memory.page_file import (
    HEADER_BYTES,
    TOKEN,
    DamagedFileError,
    OtherModelError,
    PageFile,
    Rows,
    SavedState,
    blocks_of,
)
from kvchat.kv.memory.pages import Pages, StoredPages, full_precision_pages
from kvchat.models import load
from kvchat.models.load import LoadedModel
from kvchat.models.recurrent import Snapshot, is_recurrent
from kvchat.protocol.messages import Event, Keeping, Noted, Resumed, Turn
from kvchat.units import size

T = TypeVar("T")
LAST_WRITES_S = 1.0  # that closing a session may wait for pages to be written
LOOKED_AT = 64  # files of other conversations whose beginning is compared
States = Mapping[int, Callable[[], Snapshot | None]]  # by the tokens they have read; None where one is damaged
REDUCED, CONTROL = 1, 2  # flags
DISK_SHARE = 2  # at most one part in so many of the free disk space is taken


@dataclass
class Parked:
    """A conversation in host memory; ``control`` are the positions of the chat's control tokens.

    ``query`` is the last token's. ``snapshots`` are those of the recurrent state of a hybrid model, ``worth_saving``
    some of them.
    """

    stored: Stored
    control: list[int]
    pages: Pages
    query: bytes
    snapshots: list[Snapshot]
    worth_saving: list[Snapshot]

    @property
    def nbytes(self) -> int:
        return self.pages.nbytes + sum(snapshot.nbytes for snapshot in self.snapshots)


class PrefixCache(Released):
    """Keeps conversations as ``keeping`` says, of the model of ``runner``; ``loop.stored`` is that of ``current``."""

    _held = ("_runner", "_kv", "_writer")

    def __init__(self, runner: ModelRunner, loop: AnswerLoop, keeping: Keeping) -> None:
        self._runner = runner
        self._kv = runner.kv
        self._loop = loop
        self._keeping = keeping
        self._identity = identity(runner.model)
        self.current = ""
        self._parked: dict[str, Parked] = {}  # the last used one comes last
        self._folder = SavedFolder(Path(keeping.folder), keeping.saved_bytes)
        self._writer = WriteBehind(self._folder, self._kv.state.geometry.page)
        self._is_problem_told = self._is_room_told = False

    @property
    def parked_bytes(self) -> int:
        return sum(kept.nbytes for kept in self._parked.values())

    def interrupt(self) -> None:
        """Stop writing: what is stored is about to change."""
        self._writer.interrupt()

    def close(self, seconds: float = LAST_WRITES_S) -> None:
        """Write what is left, for so long at most, and free the rest, also under an answer that was left open."""
        if not (self._is_closed or self._loop.lock.is_forked):
            self.save()
            self._writer.finish(seconds)
        self._parked.clear()
        self._release()

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Stop writing during the block, which changes what is stored, and save it afterwards."""
        self.interrupt()
        try:
            yield
        finally:
            self.save()

    @contextmanager
    def adding(self) -> Iterator[None]:
        """Pause writing during the block, which stores a token."""
        with self._writer.copying:
            yield
            if self._writer.is_writing:
                self._kv.state.host.synchronize()  # a page that the token filled may still be on its way from a GPU

    # ---- going to a conversation

    def resume(self, conversation: str | None, turns: Sequence[Turn]) -> Iterator[Event]:
        """Make ``conversation`` the current one; ``Noted``*, and ``Resumed`` if some of its K/V came back.

        None is the stored one that ``turns`` continue, or else a new one. Without ``turns`` it is empty.

        Raises:
            UsageError: as ``PromptEncoder.encode``.
        """
        if conversation == self.current:
            return
        self.interrupt()
        text, began = self._loop.encoder.render(turns) if turns else "", time.perf_counter()
        if conversation is None:
            conversation = self._continued(text, is_text(turns))
            if conversation == self.current:
                self._truncate(self._common(self._loop.stored, text))  # first: the answer's mode may not hold the rest
                return
        common = min(self._common(self._loop.stored, text), self._kv.state.first_quantized)
        sources = list(self._parked_sources(conversation, text)) if conversation else []
        self._parked.pop(conversation, None)  # makes room for the one that is parked now
        yield from self._park()
        self.current, self._loop.stored.saved = "", 0  # no conversation's until it has its beginning
        self._loop.metrics.leave()
        if conversation:
            try:
                sources += self._saved_sources(conversation, text)
            except OtherModelError:
                pass  # the user chose another model and knows
            except (DamagedFileError, OSError) as error:
                reason = error.strerror if isinstance(error, OSError) else str(error)
                yield Noted(f"This conversation is processed again; its saved K/V cannot be used: {reason}.")
        best = max(sources, key=lambda source: source.prefix.tokens, default=None)
        if best and best.prefix.tokens >= common + self._kv.state.geometry.page:
            yield from self._adopt(best, conversation, began)
        else:
            self._truncate(common)
        self.current = conversation

    def open(self, conversation: str | None, turns: Sequence[Turn]) -> Iterator[Event]:
        """``resume`` for an answer to ``turns``; ``Noted`` where saving failed since it worked last."""
        if turns:  # without any the answer is refused, and nothing was changed
            yield from self.resume(conversation, turns)
        problem = self._writer.problem
        if problem and not self._is_problem_told:
            yield Noted(f"K/V cannot be saved: {problem}. The chat continues; it will be re-processed after a restart.")
        self._is_problem_told = bool(problem)

    def forget(self, conversation: str) -> None:
        """Keep nothing of a deleted conversation, whose file was moved away; nor what was written since."""
        self._writer.finish(0)
        self._parked.pop(conversation, None)
        if conversation == self.current:
            self.current = ""
            self._loop.stored.saved = 0
        if self._keeping.folder:
            with suppress(OSError):  # one that cannot be deleted stays
                self._folder.path(conversation).unlink()
        self.save()

    def _truncate(self, tokens: int) -> None:
        if tokens < self._kv.total:
            self._loop.stored.truncate(tokens)
            self._runner.truncate(tokens)

    def _adopt(self, source: Source, conversation: str, began: float) -> Iterator[Event]:
        stored, recurrent, tokens = copy.deepcopy(source.stored), self._runner.recurrent, source.prefix.tokens
        stored.truncate(tokens)
        self._loop.stored.truncate(0)
        recurrent.truncate(0)
        try:
            states = [source.states[at]() for at in sorted(source.states) if at <= tokens]
            with torch.inference_mode(), explained(self._kv, "taking up the conversation again"):
                there = self._kv.adopt(source.prefix)
        except (DoesNotFitError, OSError) as error:
            yield Noted(f"This conversation is processed again: {error}")
            return
        if there < tokens:
            yield Noted("A page of the saved K/V is damaged; everything after it is processed again.")
        stored.truncate(there)
        self._loop.stored.replace_with(stored)
        if recurrent.exists:
            recurrent.adopt(stored.ids, [state for state in states if state and state.tokens <= there])
            if recurrent.position < tokens == there:
                yield Noted("A saved recurrent state is damaged; what follows the one before it is processed again.")
            self._truncate(there := recurrent.position)
        if there:
            yield Resumed(conversation, there, time.perf_counter() - began, source.where)

    # ---- which one it is

    def _continued(self, text: str, is_plain: bool) -> str:
        """The stored conversation that ``text`` continues furthest; a new name if there is none.

        A conversation that would lose tokens is left alone, and a new one begins with what both have in common. Only
        what follows its last question may change, because a template may drop an answer's thought; and the end of a
        plain text, which in an editor changes with every key.
        """
        known = {self.current: self._loop.stored, **{name: kept.stored for name, kept in self._parked.items()}}
        best, name = (0, False), ""
        for conversation, stored in (*known.items(), *self._saved_beginnings(text, known)):
            common = self._common(stored, text)
            asked, chars = stored.marks[-2] if conversation in known and len(stored.marks) > 1 else (sys.maxsize, 0)
            lost = len(stored.ids) - common
            goes_on = lost == 0 or (asked <= common and chars < len(text)) or (is_plain and lost <= common)
            if conversation and common and (common, goes_on) > best:
                best, name = (common, goes_on), conversation
        return name if best[1] else secrets.token_hex(16)

    def _saved_beginnings(self, text: str, known: Mapping[str, Stored]) -> Iterator[tuple[str, Stored]]:
        """The conversations beside those ``known`` whose files begin as ``text``, by their names."""
        for path in self._beginning_alike(text) if self._saves else ():
            if path.stem not in known:
                with suppress(DamagedFileError, OSError):
                    yield path.stem, stored_of(self._file(path).rows(), text)

    # ---- where it can be taken from

    def _parked_sources(self, conversation: str, text: str) -> Iterator[Source]:
        for name, kept in self._parked.items():
            states = {one.tokens: partial(itself, one) for one in kept.snapshots}
            full_precision = full_precision_pages(kept.pages) * self._kv.state.geometry.page
            read = partial(unparked, kept.pages)
            prefix = CachedPrefix(len(kept.stored.ids), read, full_precision, kept.control, kept.query)
            # In the file of another conversation nothing of it is yet.
            own = name == conversation
            stored = kept.stored if own else replace(kept.stored, saved=0)
            yield self._usable(Source(stored, "memory", prefix, states), text, own)

    def _saved_sources(self, conversation: str, text: str) -> Iterator[Source]:
        """The conversation's own file, and those of others that begin alike.

        Raises:
            DamagedFileError, OSError: its own file cannot be used.
        """
        if not self._saves:
            return
        own = self._folder.path(conversation)
        for path in self._beginning_alike(text):
            if path != own:
                yield self._saved_source(path, text, own=False)
        if own.exists():
            source = self._saved_source(own, text, own=True)
            source.stored.saved = len(source.stored.ids)
            with suppress(OSError):
                os.utime(own)  # it is used
            yield source

    def _beginning_alike(self, text: str) -> Iterator[Path]:
        """Of the files used last, those of conversations whose first page is that of ``text``."""
        beginning = self._loop.encoder.ids_of(text, Stored())[: self._kv.state.geometry.page]
        for path in self._folder.latest_first()[:LOOKED_AT]:
            if path.suffix == paths.SAVED_KV:
                with suppress(DamagedFileError, OSError):
                    if self._file(path).rows(pages=1)["id"].tolist() == beginning:
                        yield path

    def _saved_source(self, path: Path, text: str, own: bool) -> Source:
        file = self._file(path)
        rows, end = file.rows(), file.end()
        stored = stored_of(rows, text)
        stored.links = file.links
        full_precision = file.full_precision_pages * self._kv.state.geometry.page
        control = np.flatnonzero(rows["flags"] & CONTROL).tolist()
        prefix = CachedPrefix(len(stored.ids), file.read, full_precision, control, end.query)
        states = {one.tokens: partial(read_state, file, one) for one in end.states}
        return self._usable(Source(stored, "disk", prefix, states), text, own)

    def _usable(self, source: Source, text: str, own: bool) -> Source:
        """``source`` with as many tokens as ``text`` begins with and the model can go on from.

        Quantized ones are of use to their ``own`` conversation, and to others while pages are to be quantized.
        """
        tokens = self._common(source.stored, text)
        if not (own or self._kv.state.quantizes):
            tokens = min(tokens, source.prefix.full_precision)
        if self._runner.recurrent.exists:
            tokens = max((at for at in source.states if at <= tokens), default=0)
        return replace(source, prefix=source.prefix.beginning(tokens))

    def _common(self, stored: Stored, text: str) -> int:
        return common_prefix(stored.ids, self._loop.encoder.ids_of(text, stored)) if stored.ids else 0

    # ---- keeping

    def _park(self) -> Iterator[Noted]:
        """Park a copy of the current conversation in place of the least recently used ones; ``Noted`` without room."""
        stored, pool, recurrent = self._loop.stored, self._kv.state.host, self._runner.recurrent
        if not (self.current and stored.ids):
            return
        recurrent.keep()
        needed, room = parked_bytes(pool) + recurrent.snapshot_bytes, self._keeping.parked_bytes
        if needed > room:
            yield from self._note_unparked(needed, f"kv.parked_gib has room for {size(room)}")
            return
        while self._parked and self.parked_bytes + needed > room:
            del self._parked[next(iter(self._parked))]
        free = available.usable(available.host_free())
        if needed > free:
            yield from self._note_unparked(needed, f"only {size(free)} of RAM is usable")
            return
        try:
            with explained(self._kv, "parking the conversation"):
                self._parked[self.current] = Parked(
                    copy.deepcopy(stored),
                    self._control(),
                    parked(pool),
                    self._kv.state.query_bytes,
                    recurrent.snapshots,
                    recurrent.worth_saving,
                )
        except DoesNotFitError:
            yield from self._note_unparked(needed, "memory ran out")

    def _note_unparked(self, needed: int, room: str) -> Iterator[Noted]:
        """Say once that a conversation will be processed again, unless a file has it or parking is turned off."""
        if self._keeping.parked_bytes and not (self._saves or self._is_room_told):
            self._is_room_told = True
            yield Noted(f"The previous conversation will be processed again: its K/V take {size(needed)}, {room}.")

    def save(self) -> None:
        """Begin to write what is new, of the current conversation and of parked ones, unless the device cannot now."""
        if self._saves:
            self.interrupt()
            with suppress(RuntimeError, MemoryError):  # a GPU that failed, or memory that ran out: the next time
                self._writer.begin(self._jobs())

    def _jobs(self) -> list[Job]:
        self._kv.state.host.synchronize()
        jobs = [
            self._job(name, kept.stored, kept.control, kept.worth_saving, kept.query, partial(itself, kept.pages))
            for name, kept in self._parked.items()
            if kept.stored.saved < len(kept.stored.ids)
        ]
        if self.current:
            recurrent, state, stored = self._runner.recurrent, self._kv.state, self._loop.stored
            recurrent.keep()
            if stored.saved < len(stored.ids):
                control, states = self._control(), recurrent.worth_saving
                job = self._job(self.current, stored, control, states, state.query_bytes, lambda: state.host)
                jobs.insert(0, job)
        return jobs

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
        query: bytes,
        pages: Callable[[], StoredPages],
    ) -> Job:
        """The part of a conversation, parked or current, that is not on disk yet."""
        page = self._kv.state.geometry.page
        first = stored.saved // page
        file = self._file(self._folder.path(conversation))
        file.links = stored.links[:first]
        rows = rows_of(stored, control, first * page)
        return Job(file, stored, first, rows, pages, stored.saved, query, snapshots)

    def _control(self) -> list[int]:
        found: list[int] = self._kv.state.control[: self._kv.total].nonzero().flatten().tolist()
        return found

    def _file(self, path: Path) -> PageFile:
        return PageFile(path, self._kv.state.geometry, self._identity)


@dataclass
class Source:
    """K/V that are parked or saved (``where``: memory or disk) and begin like the conversation to open.

    ``stored`` is all of it, ``prefix`` the part that can be used. A hybrid model can go on only from one of its
    ``states``.
    """

    stored: Stored
    where: str
    prefix: CachedPrefix
    states: States


def itself(kept: T) -> T:
    """A parked state, or parked pages, which need no reading."""
    return kept


def read_state(file: PageFile, saved: SavedState) -> Snapshot | None:
    """A recurrent state from a file; None where it is damaged."""
    data = file.state(saved)
    return Snapshot.decoded(saved.tokens, data) if data else None


def identity(model: LoadedModel) -> dict[str, Any]:
    """All that K/V depend on; a key completes the sentence "The file is of another ..."."""
    recurrent = is_recurrent(model.model.config)
    return {
        "model": model.name,
        "revision": model.revision,
        "configuration": _digest(model.model.config.to_json_string()),
        "number format": str(model.dtype).removeprefix("torch."),
        "quantization": model.weights,
        "training": model.fingerprint,
        "tokenizer": load.digest_of_tokenizer(model.tokenizer),
        "chat template": _digest(getattr(model.tokenizer, "chat_template", None) or ""),
        **({"version of transformers": transformers.__version__} if recurrent else {}),  # its cache has the state
    }


def rows_of(stored: Stored, control: list[int], start: int) -> Rows:
    """The rows of the ids from ``start`` on; ``control`` are the positions of control tokens."""
    rows = np.zeros(len(stored.ids) - start, TOKEN)
    rows["id"] = stored.ids[start:]
    rows["flags"] = REDUCED * np.array(stored.reduced[start:], np.uint8)
    rows["flags"][[at - start for at in control if at >= start]] |= CONTROL
    rows["chars"] = -1
    for ids, chars in stored.marks:
        if ids > start:
            rows[ids - 1 - start]["chars"] = chars
            rows[ids - 1 - start]["digest"] = np.void(load.digest_of_text(stored.text[:chars]))
    return rows


def stored_of(rows: Rows, text: str) -> Stored:
    """The ids of the rows, with the marks up to which ``text`` matches the saved one."""
    stored = Stored(rows["id"].tolist(), reduced=((rows["flags"] & REDUCED) > 0).tolist())
    for index in np.flatnonzero(rows["chars"] >= 0).tolist():
        chars = int(rows["chars"][index])
        if chars <= len(text) and rows["digest"][index].tobytes() == load.digest_of_text(text[:chars]):
            stored.marks.append((index + 1, chars))
    stored.text = text[: stored.marks[-1][1]] if stored.marks else ""
    return stored


def _digest(value: str | dict[str, str]) -> str:
    return load.digest_of_text(str(value)).hex()


class SavedFolder:
    """``folder`` need not exist; ``limit`` is in bytes."""

    def __init__(self, folder: Path, limit: int) -> None:
        self._folder = folder
        self._limit = limit

    def path(self, conversation: str) -> Path:
        """The path of a conversation's K/V file; it need not exist."""
        return paths.saved_kv(self._folder, conversation)

    def latest_first(self) -> list[Path]:
        found = []
        for path in self._folder.glob(f"*{paths.SAVED_KV}*"):
            with suppress(OSError):
                found.append((path.stat().st_mtime, path))
        return [path for _, path in sorted(found, reverse=True)]

    def make_room(self, path: Path, size: int) -> int:
        """Delete files until ``path`` may grow to ``size`` bytes; return to how many it may.

        Nothing is deleted for a file that would not fit even alone: it gets what the others leave.
        """
        others = [other for other in self.latest_first() if other != path]
        there = next((place for place in (self._folder, *self._folder.parents) if place.exists()), self._folder)
        free = shutil.disk_usage(there).free
        allowed = min(self._limit, sum(map(_size, self.latest_first())) + free // DISK_SHARE)
        taken = sum(map(_size, others))
        while others and taken + size > allowed >= size:
            oldest = others.pop()
            taken -= _size(oldest)
            with suppress(OSError):
                oldest.unlink()
        return max(0, min(size, allowed - taken))


def _size(path: Path) -> int:
    with suppress(OSError):
        return path.stat().st_size
    return 0


@dataclass
class Job:
    """Pages to write to ``file``.

    Attributes:
        first: the first page to write; ``rows`` are the tokens' from there on.
        pages: returns what holds the pages; called for each page, because a running conversation may change its pool.
        saved: tokens of ``stored`` that are on disk so far.
        query: the last token's.
        snapshots: those of a recurrent state to save.
    """

    file: PageFile
    stored: Stored
    first: int
    rows: Rows
    pages: Callable[[], StoredPages]
    saved: int = 0
    query: bytes = b""
    snapshots: Sequence[Snapshot] = ()


class WriteBehind:
    """Writes jobs on a thread of its own until it is interrupted, which waits for one page's copy at most.

    ``problem`` says why a conversation could not be written to its end, empty where the last one could. Who holds
    ``copying`` may add tokens to the jobs' pages, of which nothing is taken meanwhile.
    """

    def __init__(self, folder: SavedFolder, page: int) -> None:
        self.problem = ""
        self._folder = folder
        self._page = page
        self.copying = threading.Lock()
        self._interrupted = threading.Event()
        self._thread: threading.Thread | None = None
        self._jobs: Sequence[Job] = ()

    def begin(self, jobs: Sequence[Job]) -> None:
        """Write these, after ``interrupt``."""
        before, self._jobs = self._thread, jobs
        self._interrupted = threading.Event()
        # Not a daemon: torch aborts a process that exits while a thread copies.
        self._thread = threading.Thread(target=self._work, args=(jobs, self._interrupted, before), daemon=False)
        self._thread.start()

    def interrupt(self) -> None:
        """Take nothing more from the jobs' pages from now on, and note what was saved of them."""
        with self.copying:
            self._interrupted.set()
        for job in self._jobs:
            job.stored.saved, job.stored.links = job.saved, job.file.links.copy()
        self._jobs = ()

    @property
    def is_writing(self) -> bool:
        """True until all jobs are written or given up."""
        return self._thread is not None and self._thread.is_alive()

    def finish(self, seconds: float) -> None:
        """Let it write for so long at most, then end."""
        thread = self._thread
        if thread is not None:
            thread.join(seconds)
            self.interrupt()
            thread.join()

    def _work(self, jobs: Sequence[Job], interrupted: threading.Event, before: threading.Thread | None) -> None:
        if before is not None:
            before.join()  # it may be writing its last page, to the same file
        for job in jobs:
            try:
                self._write(job, interrupted)
            except DamagedFileError:
                job.saved = 0  # gone or changed meanwhile: all of it is written again next time
            except OSError as error:
                self.problem = error.strerror or str(error)

    def _write(self, job: Job, interrupted: threading.Event) -> None:
        end = before = job.file.links[-1].end if job.file.links else HEADER_BYTES
        pages = slice(job.first, job.first - (-len(job.rows) // self._page))
        end += sum(job.file.record_bytes(quantized) for quantized in job.pages().quantized[pages])
        end += sum(snapshot.nbytes for snapshot in job.snapshots)
        allowed = self._folder.make_room(job.file.path, end)
        if allowed < end:
            room = f"but kv.saved_gib and the disk have room for {size(allowed)}"
            self.problem = f"they take {size(end)}, {room}"
        for start in range(0, len(job.rows), self._page):
            page = job.first + start // self._page
            with self.copying:
                if interrupted.is_set():
                    return
                holder = job.pages()
                before += job.file.record_bytes(holder.quantized[page])
                if before > allowed:
                    return
                blocks, dequantized = blocks_of(holder.stored(page)), page in holder.dequantized
            rows = job.rows[start : start + self._page]
            is_last = start + self._page >= len(job.rows)
            query = job.query if is_last else b""
            states = [(one.tokens, one.encoded()) for one in job.snapshots] if is_last and allowed >= end else []
            job.file.write(page, rows, blocks, dequantized, query, states)
            job.saved = page * self._page + len(rows)
            if allowed >= end:
                self.problem = ""
