"""Park the K/V of other conversations in RAM and save them on disk.

Opening another conversation parks the current one. A conversation that is reopened, or starts like a stored one, reuses
the longest parked or saved prefix: the mode fills its slots from it, and only the rest is prefilled. After an answer a
thread writes the new pages, one at a time. Anything that changes the stored K/V interrupts the thread and saves again
afterwards; a single step only pauses it, and its token is written with the next save. Each conversation has its own
file, which names the model that computed its K/V. Beyond a size limit the least recently used files are deleted.
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
LAST_WRITES_S = 1.0  # the longest that closing a session waits for pages to be written
LOOKED_AT = 64  # files of other conversations whose beginning is compared
States = Mapping[int, Callable[[], Snapshot | None]]  # by the number of tokens read; None if the state is damaged
REDUCED, CONTROL = 1, 2  # flags
DISK_SHARE = 2  # saved K/V take at most 1 / DISK_SHARE of the free disk space


@dataclass
class Parked:
    """A conversation parked in RAM.

    ``control`` are the positions of the chat's control tokens, ``query`` is the last token's query. ``snapshots`` are
    the recurrent states of a hybrid model, and ``worth_saving`` those of them that are written to disk.
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
    """Parks and saves the conversations of one model, as ``keeping`` asks; ``loop.stored`` belongs to ``current``."""

    _held = ("_runner", "_kv", "_writer")

    def __init__(self, runner: ModelRunner, loop: AnswerLoop, keeping: Keeping) -> None:
        self._runner = runner
        self._kv = runner.kv
        self._loop = loop
        self._keeping = keeping
        self._identity = identity(runner.model)
        self.current = ""
        self._parked: dict[str, Parked] = {}  # least recently used first
        self._folder = SavedFolder(Path(keeping.folder), keeping.saved_bytes)
        self._writer = WriteBehind(self._folder, self._kv.state.geometry.page)
        self._has_noted_problem = self._has_noted_room = False

    @property
    def parked_bytes(self) -> int:
        return sum(kept.nbytes for kept in self._parked.values())

    def interrupt(self) -> None:
        """Stop writing, because the stored K/V are about to change."""
        self._writer.interrupt()

    def close(self, seconds: float = LAST_WRITES_S) -> None:
        """Write for at most ``seconds``, then free everything, even if an answer was left unfinished."""
        if not (self._is_closed or self._loop.lock.is_forked):
            self.save()
            self._writer.finish(seconds)
        self._parked.clear()
        self._release()

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Stop writing while the block changes the stored K/V, and save them afterwards."""
        self.interrupt()
        try:
            yield
        finally:
            self.save()

    @contextmanager
    def adding(self) -> Iterator[None]:
        """Pause writing while the block stores a token."""
        with self._writer.copying:
            yield
            if self._writer.is_writing:
                self._kv.state.host.synchronize()  # the GPU may still be copying a page that the token completed

    # ---- opening a conversation

    def resume(self, conversation: str | None, turns: Sequence[Turn]) -> Iterator[Event]:
        """Make ``conversation`` the current one; yield ``Noted``*, and ``Resumed`` if some of its K/V were restored.

        None means the stored conversation that ``turns`` continue, or a new one. Without ``turns`` it is empty.

        Raises:
            UsageError: the same as ``PromptEncoder.encode``.
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
        self._parked.pop(conversation, None)  # makes room to park the current one
        yield from self._park()
        self.current, self._loop.stored.saved = "", 0  # no conversation's until the prefix is adopted
        self._loop.metrics.leave()
        if conversation:
            try:
                sources += self._saved_sources(conversation, text)
            except OtherModelError:
                pass  # the user chose another model, so this is no surprise
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
        """Resume the conversation for an answer to ``turns``; yield ``Noted`` once when saving starts to fail."""
        if turns:  # without turns the answer is refused, and nothing changes
            yield from self.resume(conversation, turns)
        problem = self._writer.problem
        if problem and not self._has_noted_problem:
            yield Noted(f"K/V cannot be saved: {problem}. The chat continues; it will be re-processed after a restart.")
        self._has_noted_problem = bool(problem)

    def forget(self, conversation: str) -> None:
        """Delete all K/V of a deleted conversation, including any written since its file was moved away."""
        self._writer.finish(0)
        self._parked.pop(conversation, None)
        if conversation == self.current:
            self.current = ""
            self._loop.stored.saved = 0
        if self._keeping.folder:
            with suppress(OSError):  # a file that cannot be deleted stays
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
            with torch.inference_mode(), explained(self._kv, "resuming the conversation"):
                adopted = self._kv.adopt(source.prefix)
        except (DoesNotFitError, OSError) as error:
            yield Noted(f"This conversation is processed again: {error}")
            return
        if adopted < tokens:
            yield Noted("A page of the saved K/V is damaged; everything after it is processed again.")
        stored.truncate(adopted)
        self._loop.stored.replace_with(stored)
        if recurrent.exists:
            recurrent.adopt(stored.ids, [state for state in states if state and state.tokens <= adopted])
            if recurrent.position < tokens == adopted:
                yield Noted("A saved recurrent state is damaged; everything after the previous one is processed again.")
            self._truncate(adopted := recurrent.position)
        if adopted:
            yield Resumed(conversation, adopted, time.perf_counter() - began, source.where)

    # ---- choosing the stored conversation

    def _continued(self, text: str, is_plain: bool) -> str:
        """Return the stored conversation that ``text`` continues furthest, or a new name.

        A conversation that would lose tokens is left alone; a new one then starts with their common prefix. Two losses
        are allowed: anything after the conversation's last question, because a template may drop an answer's thought,
        and the end of a plain text, because an editor changes it with every key.
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
        """Yield the saved conversations that are not ``known`` and begin like ``text``, with their names."""
        for path in self._beginning_alike(text) if self._saves else ():
            if path.stem not in known:
                with suppress(DamagedFileError, OSError):
                    yield path.stem, stored_of(self._file(path).rows(), text)

    # ---- sources of a prefix

    def _parked_sources(self, conversation: str, text: str) -> Iterator[Source]:
        for name, kept in self._parked.items():
            states = {one.tokens: partial(itself, one) for one in kept.snapshots}
            full_precision = full_precision_pages(kept.pages) * self._kv.state.geometry.page
            read = partial(unparked, kept.pages)
            prefix = CachedPrefix(len(kept.stored.ids), read, full_precision, kept.control, kept.query)
            # Another conversation's file has none of these tokens yet.
            own = name == conversation
            stored = kept.stored if own else replace(kept.stored, saved=0)
            yield self._usable(Source(stored, "memory", prefix, states), text, own)

    def _saved_sources(self, conversation: str, text: str) -> Iterator[Source]:
        """Yield the conversation's own file and those of other conversations with the same beginning.

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
                os.utime(own)  # marks it as recently used
            yield source

    def _beginning_alike(self, text: str) -> Iterator[Path]:
        """Yield those of the most recently used files whose first page matches that of ``text``."""
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
        """Return ``source`` cut to the prefix that it shares with ``text`` and from which the model can continue.

        Quantized tokens can be used by their ``own`` conversation, and by others only while pages are quantized.
        """
        tokens = self._common(source.stored, text)
        if not (own or self._kv.state.quantizes):
            tokens = min(tokens, source.prefix.full_precision)
        if self._runner.recurrent.exists:
            tokens = max((at for at in source.states if at <= tokens), default=0)
        return replace(source, prefix=source.prefix.beginning(tokens))

    def _common(self, stored: Stored, text: str) -> int:
        return common_prefix(stored.ids, self._loop.encoder.ids_of(text, stored)) if stored.ids else 0

    # ---- parking and saving

    def _park(self) -> Iterator[Noted]:
        """Park a copy of the current conversation, evicting the least recently used; ``Noted`` if it does not fit."""
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
        """Say once that a conversation will be prefilled again, unless it is saved or parking is turned off."""
        if self._keeping.parked_bytes and not (self._saves or self._has_noted_room):
            self._has_noted_room = True
            yield Noted(f"The previous conversation will be processed again: its K/V take {size(needed)}, {room}.")

    def save(self) -> None:
        """Start writing the new K/V of the current and the parked conversations, unless the device fails now."""
        if self._saves:
            self.interrupt()
            with suppress(RuntimeError, MemoryError):  # after a GPU error or out of memory, the next save retries
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
        # The generator of an unfinished answer may be closed in any of these states.
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
        """Return the job that writes what is not on disk yet of a parked or the current conversation."""
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
    """Parked or saved K/V (``where``: "memory" or "disk") that begin like the conversation to open.

    ``stored`` describes all of them, ``prefix`` the part that can be used. A hybrid model can continue only from one of
    ``states``.
    """

    stored: Stored
    where: str
    prefix: CachedPrefix
    states: States


def itself(kept: T) -> T:
    """Return a parked state or parked pages, which need no reading."""
    return kept


def read_state(file: PageFile, saved: SavedState) -> Snapshot | None:
    """Read a recurrent state from a file; None if it is damaged."""
    data = file.state(saved)
    return Snapshot.decoded(saved.tokens, data) if data else None


def identity(model: LoadedModel) -> dict[str, Any]:
    """Return everything that K/V depend on; each key completes the sentence "The file is of another ..."."""
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
        **({"version of transformers": transformers.__version__} if recurrent else {}),  # its cache holds the state
    }


def rows_of(stored: Stored, control: list[int], start: int) -> Rows:
    """Return the rows of the ids from ``start`` on; ``control`` are the positions of control tokens."""
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
    """Return the ids of the rows, with the marks up to which ``text`` matches the saved text."""
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
    """The folder of K/V files, which need not exist; ``limit`` is in bytes."""

    def __init__(self, folder: Path, limit: int) -> None:
        self._folder = folder
        self._limit = limit

    def path(self, conversation: str) -> Path:
        """Return the path of a conversation's K/V file; it need not exist."""
        return paths.saved_kv(self._folder, conversation)

    def latest_first(self) -> list[Path]:
        found = []
        for path in self._folder.glob(f"*{paths.SAVED_KV}*"):
            with suppress(OSError):
                found.append((path.stat().st_mtime, path))
        return [path for _, path in sorted(found, reverse=True)]

    def make_room(self, path: Path, size: int) -> int:
        """Delete old files until ``path`` may grow to ``size`` bytes; return how many bytes it may take.

        For a file that would not fit even alone nothing is deleted: it gets the space that is left.
        """
        others = [other for other in self.latest_first() if other != path]
        existing = next((place for place in (self._folder, *self._folder.parents) if place.exists()), self._folder)
        free = shutil.disk_usage(existing).free
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
        first: the first page to write; ``rows`` begin with its tokens.
        pages: returns the pages' holder; called for each page, because a running conversation may replace its pool.
        saved: tokens of ``stored`` that are already on disk.
        query: the last token's query.
        snapshots: recurrent states to save.
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
    """Writes jobs on its own thread until interrupted; an interrupt waits at most for the copy of one page.

    ``problem`` says why the last conversation could not be written completely, or is empty. A thread that holds
    ``copying`` may add tokens to the jobs' pages, because no page is copied meanwhile.
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
        """Write ``jobs``; call ``interrupt`` first."""
        before, self._jobs = self._thread, jobs
        self._interrupted = threading.Event()
        # Not a daemon: torch aborts a process that exits while a thread copies.
        self._thread = threading.Thread(target=self._work, args=(jobs, self._interrupted, before), daemon=False)
        self._thread.start()

    def interrupt(self) -> None:
        """Stop copying the jobs' pages, and note how much of each conversation was saved."""
        with self.copying:
            self._interrupted.set()
        for job in self._jobs:
            job.stored.saved, job.stored.links = job.saved, job.file.links.copy()
        self._jobs = ()

    @property
    def is_writing(self) -> bool:
        """True until every job is written or abandoned."""
        return self._thread is not None and self._thread.is_alive()

    def finish(self, seconds: float) -> None:
        """Let it write for at most ``seconds``, then end it."""
        thread = self._thread
        if thread is not None:
            thread.join(seconds)
            self.interrupt()
            thread.join()

    def _work(self, jobs: Sequence[Job], interrupted: threading.Event, before: threading.Thread | None) -> None:
        if before is not None:
            before.join()  # it may still be writing its last page to the same file
        for job in jobs:
            try:
                self._write(job, interrupted)
            except DamagedFileError:
                job.saved = 0  # the file was deleted or changed: the next save rewrites all of it
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
