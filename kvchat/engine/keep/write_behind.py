"""Pages written to disk while the engine has no command to do."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from kvchat.engine.checked_thread import CheckedThread
from kvchat.engine.generate.stored import Stored
from kvchat.engine.keep.saved_folder import SavedFolder
from kvchat.kv.memory.page_file import HEADER_BYTES, DamagedFileError, PageFile, Rows, blocks_of
from kvchat.kv.memory.pages import StoredPages
from kvchat.models.recurrent import Snapshot
from kvchat.units import size


@dataclass
class Job:
    """``pages`` from page ``first`` on are to be written to ``file``; ``rows`` are their tokens'.

    ``pages`` is called for each: while a conversation goes on another pool may come to hold them.

    ``query`` is the last token's, ``snapshots`` are those of a recurrent state that are to be saved.

    ``saved`` counts the tokens of ``stored`` that are on disk, as far as the job has come.
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

    ``problem`` says why a conversation could not be written to its end, empty where the last one could.
    """

    def __init__(self, folder: SavedFolder, page: int) -> None:
        self.problem = ""
        self._folder = folder
        self._page = page
        self._copying = threading.Lock()
        self._interrupted = threading.Event()
        self._thread: CheckedThread | None = None
        self._jobs: Sequence[Job] = ()

    def begin(self, jobs: Sequence[Job]) -> None:
        """Write these, after ``interrupt``."""
        before, self._jobs = self._thread, jobs
        self._interrupted = threading.Event()
        try:
            self._thread = CheckedThread(partial(self._work, jobs, self._interrupted, before))
        except MemoryError:
            self.problem = "there is no memory to write them with"

    def interrupt(self) -> None:
        """Take nothing more from the jobs' pages from now on, and note what was saved of them."""
        with self._copying:
            self._interrupted.set()
        for job in self._jobs:
            job.stored.saved, job.stored.links = job.saved, job.file.links.copy()
        self._jobs = ()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Take nothing from the jobs' pages during the block, which may only add tokens to them."""
        with self._copying:
            yield

    @property
    def is_writing(self) -> bool:
        """True until all jobs are written or given up."""
        return self._thread is not None and not self._thread.is_over

    def finish(self, seconds: float) -> None:
        """Let it write for so long at most, then end."""
        thread = self._thread
        if thread is not None:
            thread.join(seconds)
            self.interrupt()
            thread.join()

    def _work(self, jobs: Sequence[Job], interrupted: threading.Event, before: CheckedThread | None) -> None:
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
        end += sum(job.file.record_bytes(kind) for kind in job.pages().kinds[pages])
        end += sum(snapshot.nbytes for snapshot in job.snapshots)
        allowed = self._folder.make_room(job.file.path, end)
        if allowed < end:
            room = f"kv.saved_gib and the disk have room for {size(allowed)}"
            self.problem = f"those of this conversation take {size(end)}, {room}"
        for start in range(0, len(job.rows), self._page):
            page = job.first + start // self._page
            with self._copying:
                if interrupted.is_set():
                    return
                holder = job.pages()
                before += job.file.record_bytes(holder.kinds[page])
                if before > allowed:
                    return
                blocks, cut_off = blocks_of(holder.stored(page)), page in holder.cut_off
            rows = job.rows[start : start + self._page]
            is_last = start + self._page >= len(job.rows)
            query = job.query if is_last else b""
            states = [(one.tokens, one.encoded()) for one in job.snapshots] if is_last and allowed >= end else []
            job.file.write(page, rows, blocks, cut_off, query, states)
            job.saved = page * self._page + len(rows)
            if allowed >= end:
                self.problem = ""
