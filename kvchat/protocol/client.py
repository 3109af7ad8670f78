"""The client of the engine process, for the application and the server: sends commands, merges events.

It uses asyncio's subprocesses because multiprocessing crashes inside Textual, which redirects the standard streams. The
child's stderr goes to a log file so that no C library writes over the screen. The child ends when its stdin closes, so
it cannot outlive the application.
"""

from __future__ import annotations

import asyncio
import errno
import os
import re
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from kvchat import files, process
from kvchat.errors import EngineError
from kvchat.foreign_text import visible_fields
from kvchat.protocol import figures, messages, wire
from kvchat.protocol.recording import Recorder

ENGINE = process.python("-m", "kvchat.engine", str(os.getpid()))
GRACE_S = 3.0
TAIL_LINES = 6
KILLED = 9
DUMP = "Fatal Python error"  # written by Python's fault handler: the reason is above it, stacks and modules are below
NO_MEMORY = re.compile(r"memory allocation of \d+ bytes failed|bad_alloc|[Cc]annot allocate memory|MemoryError")
LATEST = (figures.Snapshot, messages.Details, messages.Prefilled)  # only the latest of each is kept


@dataclass(frozen=True)
class Crashed:
    """The child ended by itself; ``code`` is negative for a signal, ``log`` has the last lines of its stderr."""

    code: int
    log: tuple[str, ...]

    @property
    def how(self) -> str:
        """The exit code in words: ``exit code 3``, ``killed by SIGKILL``."""
        return f"exit code {self.code}" if self.code >= 0 else f"killed by {signal.Signals(-self.code).name}"

    @property
    def lacked_memory(self) -> bool:
        """True if the process may have run out of memory: then the system kills it, or a library aborts it."""
        return self.code == -KILLED or any(map(NO_MEMORY.search, self.log))


Report = messages.Event | Crashed


class EngineClient:
    """Runs one child process at a time; ``recorder`` records its events.

    ``log_problem`` says why its stderr is not logged, or is "". ``forgotten`` counts calls of ``forget``.
    """

    def __init__(self, command: Sequence[str] | None, log_file: Path, recorder: Recorder | None = None) -> None:
        self.command = tuple(command or ENGINE)
        self.log_file = log_file
        self.recorder = recorder
        self.log_problem = ""
        self.forgotten = 0
        self._is_forgotten = False
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._changing = asyncio.Lock()
        self._inbox: list[Report] = []
        self._arrived = asyncio.Event()
        self._log_start = 0

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.returncode is None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process and self.alive else None

    async def start(self) -> None:
        """Start the child.

        Raises:
            EngineError: it cannot be started.
        """
        log = self._open_log()
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log or subprocess.DEVNULL,
                start_new_session=True,  # so that Ctrl+C in the terminal reaches only the application
            )
        except OSError as error:
            few = error.errno in (errno.EMFILE, errno.ENFILE)
            cure = "Raise the limit of open files (ulimit -n)." if few else "Install kvchat again."
            raise EngineError(
                "The engine cannot start.",
                f"{self.command[0]}: {error.strerror}.",
                f"{cure} /restart tries again.",
            ) from None
        finally:
            if log:
                log.close()
        self._is_forgotten = False
        self._reader = asyncio.create_task(self._read(self._process))

    def send(self, command: messages.Command) -> None:
        """Send a command to the child; it is dropped if the child has ended, which ``Crashed`` reports."""
        if self._process and self._process.stdin and self.alive:
            if self.recorder:
                self.recorder.note_command(command)
            self._process.stdin.write(wire.encode(command))

    async def receive(self) -> list[Report]:
        """Wait for events and return all since the last call, merged."""
        await self._arrived.wait()
        self._arrived.clear()
        reports, self._inbox = self._inbox, []
        return coalesce(reports)

    def forget(self) -> None:
        """Drop the current child's events, except those already received, because it is about to be ended."""
        self._is_forgotten = True
        self.forgotten += 1
        self._inbox.clear()

    async def close(self) -> None:
        """End the child: close its stdin, wait ``GRACE_S``, then kill it."""
        async with self._changing:
            await self._end()

    async def _end(self) -> None:
        process, reader = self._process, self._reader
        self._process = self._reader = None
        if process is None or process.stdin is None:
            return
        process.stdin.close()
        try:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(process.wait(), GRACE_S)
        finally:  # also if this task is cancelled
            if process.returncode is None:
                process.kill()
        await process.wait()
        if reader:
            await asyncio.wait([reader], timeout=GRACE_S)  # an unread pipe would outlive the event loop
            reader.cancel()

    async def restart(self) -> None:
        """Replace the child; events of the old one are dropped.

        Raises:
            EngineError: it cannot be started.
        """
        async with self._changing:
            await self._end()
            self._inbox.clear()
            await self.start()

    def kill(self) -> None:
        """End the child at once, without an event loop: the last resort when the application itself fails."""
        if self._process and self.alive:
            with suppress(ProcessLookupError):
                self._process.kill()

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        problem = ""
        try:
            while True:
                header = await process.stdout.readexactly(4)
                body = await process.stdout.readexactly(wire.parse_length(header))
                event = wire.decode_event(body)
                if self._is_current(process):
                    if self.recorder:
                        self.recorder.note(event)
                    self._put(event)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        except ValueError as error:
            problem = str(error)
            process.kill()
            while await process.stdout.read(2**16):
                pass  # asyncio notices the end of a process only when its pipes are empty
        code = await process.wait()
        if self._is_current(process):
            self._put(Crashed(code, (*self._log_tail(), problem) if problem else self._log_tail()))

    def _is_current(self, process: asyncio.subprocess.Process) -> bool:
        return process is self._process and not self._is_forgotten

    def _put(self, report: Report) -> None:
        # An answer's text returns to the engine with the next question, so it is made visible only when it is shown.
        is_answer = isinstance(report, messages.Text | messages.Finished)
        self._inbox.append(report if is_answer else visible_fields(report))
        self._arrived.set()

    def _open_log(self) -> FileIO | None:
        """Open the log and write to it, because only writing reveals a full disk; None if it fails."""
        try:
            files.append(self.log_file, time.strftime("--- engine started %Y-%m-%d %H:%M:%S\n").encode())
            log = files.open_log(self.log_file)
            self._log_start = log.seek(0, 2)
            self.log_problem = ""
            return log
        except OSError as error:
            self.log_problem = f"The engine's log {self.log_file} cannot be written: {error.strerror}."
            return None

    def _log_tail(self) -> tuple[str, ...]:
        if self.log_problem:
            return ()
        try:
            with self.log_file.open("rb") as log:
                log.seek(max(self._log_start, log.seek(0, 2) - 32768))
                lines = log.read().decode("utf-8", "replace").splitlines()
        except OSError:
            return ()
        said = [line for line in lines if line.strip()]
        end = next((index + 1 for index, line in enumerate(said) if line.startswith(DUMP)), len(said))
        return tuple(said[:end][-TAIL_LINES:])


def coalesce(reports: Sequence[Report]) -> list[Report]:
    """Merge neighboring pieces of text; keep only the latest figures and progress, in order."""
    kept: list[Report] = []  # the latest first
    for report in reversed(reports):
        if isinstance(report, messages.Text) and kept and isinstance(kept[-1], messages.Text):
            kept[-1] = report + kept[-1]
        elif type(report) not in LATEST or not any(isinstance(later, type(report)) for later in kept):
            kept.append(report)
    return kept[::-1]
