"""The engine's process: ``python -m kvchat.engine.worker``, commands on stdin, events on stdout.

A reader thread takes commands from stdin; the main thread does all the work, so the session is touched by one thread
only, except for ``cancel``. What arrives during an answer is done between two tokens. The process ends with its parent
where the system can do that, and when its stdin closes, at the latest ``GRACE_S`` after it.
"""

from __future__ import annotations

import faulthandler
import itertools
import os
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, BinaryIO, Protocol

from kvchat.engine.parent import end_with_parent
from kvchat.errors import EngineError, KvchatError
from kvchat.protocol import figures, messages, wire
from kvchat.protocol.messages import Chat, Command, Event, Failed, Load, Loading, Peek, Rebuild, Stop, Switch, Text
from kvchat.threads import wait_without_spinning

TEXT_S = 1 / 30
SNAPSHOT_S = 1 / 10
IDLE_SNAPSHOT_S = 1.0
GRACE_S = 2.0
MAX_WAITING_BYTES = 2 * wire.MAX_MESSAGE_BYTES
COMMAND_BYTES = 2**10  # what a command takes beside its text
IN_ANSWER = Stop | Switch | Peek
Progress = Callable[[str], None]


class Session(Protocol):
    """What the server needs of ``kvchat.Session``."""

    @property
    def info(self) -> messages.Loaded: ...
    def answer(
        self, turns: Sequence[messages.Turn], sampling: messages.Sampling, between: Callable[[int], None] | None = None
    ) -> Iterator[Event]: ...
    def rebuild(self) -> Iterator[Event]: ...
    def cancel(self) -> None: ...
    def switch(self, mode: str = "", /, **params: Any) -> messages.Switched: ...
    def snapshot(self) -> figures.Snapshot: ...
    def text(self, start: int, end: int) -> str: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class Refused:
    """In place of a command that cannot be read."""

    reason: str


class Inbox:
    """Commands in order, filled by the reader thread."""

    def __init__(self) -> None:
        self._commands: deque[tuple[Command | Refused, int]] = deque()
        self._waiting_bytes = 0
        self._changed = threading.Condition()
        self.closed = False

    def put(self, command: Command | Refused, nbytes: int) -> None:
        """Append a command that was ``nbytes`` long.

        Raises:
            ValueError: more wait than memory should be spent on.
        """
        with self._changed:
            self._waiting_bytes += nbytes + COMMAND_BYTES
            if self._waiting_bytes > MAX_WAITING_BYTES:
                raise ValueError(f"{len(self._commands):,} commands wait to be done; no more are taken")
            self._commands.append((command, nbytes))
            self._changed.notify()

    def close(self) -> None:  # also waiting ones have no reader for their events
        with self._changed:
            self.closed = True
            self._changed.notify()

    def get(self, timeout: float) -> Command | Refused | None:
        """The next command; None after ``timeout`` seconds or when closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._commands or self.closed, timeout)
            return self._pop() if self._commands and not self.closed else None

    def get_in_answer(self) -> Command | Refused | None:
        """The next command if it can be done between two tokens; a Load or Chat keeps its place and all behind it."""
        with self._changed:
            return self._pop() if self._commands and isinstance(self._commands[0][0], IN_ANSWER) else None

    def stops(self) -> bool:
        """Whether a waiting ``Stop`` is meant for what has just begun: nothing else that it could stop is before it."""
        with self._changed:
            commands = (command for command, _ in self._commands)
            ahead = itertools.takewhile(lambda command: not isinstance(command, Load | Chat | Rebuild), commands)
            return any(isinstance(command, Stop) for command in ahead)

    def _pop(self) -> Command | Refused:
        command, nbytes = self._commands.popleft()
        self._waiting_bytes -= nbytes + COMMAND_BYTES
        return command


class Outbox:
    """Events to the application, text in batches; always flushed before any other event."""

    def __init__(self, stream: BinaryIO, clock: Callable[[], float]) -> None:
        self._stream = stream
        self._clock = clock
        self._pieces: list[Text] = []
        self._flushed = float("-inf")

    def send(self, event: Event) -> None:
        if isinstance(event, Text):
            self._pieces.append(event)
            if self._clock() - self._flushed >= TEXT_S:
                self.flush()
        else:
            self.flush()
            self._write(event)

    def flush(self) -> None:
        if self._pieces:
            self._write(Text("".join(p.text for p in self._pieces), sum(p.tokens for p in self._pieces)))
            self._pieces.clear()
            self._flushed = self._clock()

    def _write(self, event: Event) -> None:
        self._stream.write(wire.encode(event))
        self._stream.flush()


class Server:
    """Executes commands against one session at a time. ``open_session`` makes it and may raise ``KvchatError``."""

    def __init__(
        self,
        events: BinaryIO,
        open_session: Callable[[Load, Progress], Session],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._inbox = Inbox()
        self._outbox = Outbox(events, clock)
        self._open_session = open_session
        self._clock = clock
        self._session: Session | None = None
        self._answering = False
        self._failures: list[Failed] = []
        self._snapshot_at = float("-inf")

    # ---- reader thread

    def read(self, commands: BinaryIO) -> None:
        """Take commands until the stream ends, stops speaking the protocol or sends too many; each ends the server.

        A command that cannot be read is answered by ``Failed`` when its turn comes.
        """
        try:
            while (body := wire.read(commands)) is not None:
                command = _command(body)
                self._inbox.put(command, len(body))
                if isinstance(command, Stop):
                    self._cancel()  # at once: during prefill there are no two tokens to wait between
        except (ValueError, OSError, MemoryError) as error:
            sys.stderr.write(f"kvchat: {error or 'no memory for a command'}\n")
        self._inbox.close()
        self._cancel()

    def _cancel(self) -> None:
        session = self._session  # the main thread may replace it meanwhile
        if session and self._answering:
            session.cancel()

    # ---- main thread

    def run(self) -> None:
        """Work until the commands end."""
        try:
            while not self._inbox.closed:
                if command := self._inbox.get(IDLE_SNAPSHOT_S):
                    self._do(command)
                elif not self._inbox.closed:
                    with self._failures_reported():
                        self._snapshot()
        except BrokenPipeError:
            pass  # the application is gone
        finally:
            if self._session:
                self._session.close()

    def _do(self, command: Command | Refused) -> None:
        with self._failures_reported():
            match command:
                case Load():
                    self._load(command)
                case Chat(turns, sampling):
                    self._work(lambda session: session.answer(turns, sampling, self._between))
                case Rebuild():
                    self._work(lambda session: session.rebuild())
                case Switch():
                    self._switch(command)
                case Peek():
                    self._outbox.send(
                        messages.Peeked(command.start, command.end, self._loaded().text(command.start, command.end))
                    )
                case Stop():
                    pass  # the answer it was meant for is over
                case Refused(reason):
                    raise EngineError("The engine got a command that it cannot read.", reason)

    def _load(self, command: Load) -> None:
        if self._session:
            self._session.close()
            self._session = None
        self._outbox.send(Loading("importing torch"))  # 4 seconds before the loader can say anything
        self._session = self._open_session(command, lambda stage: self._outbox.send(Loading(stage)))
        self._outbox.send(self._session.info)
        self._snapshot()

    def _work(self, begin: Callable[[Session], Iterator[Event]]) -> None:
        """Send what comes of something long, which ``Stop`` can end from the moment it was asked for."""
        session = self._loaded()
        self._answering = True
        try:
            events = begin(session)
            if self._inbox.stops():
                session.cancel()
            for event in events:
                self._outbox.send(event)
                self._snapshot(at_most_every=SNAPSHOT_S)
        finally:
            self._answering = False
            self._outbox.flush()
            failures, self._failures = self._failures, []
            for failure in failures:
                self._outbox.send(failure)
        self._snapshot()

    def _between(self, _generated: int) -> None:
        if self._inbox.closed:
            self._loaded().cancel()
        while command := self._inbox.get_in_answer():
            if isinstance(command, Stop):
                self._loaded().cancel()
            else:
                self._do(command)

    def _switch(self, command: Switch) -> None:
        session = self._loaded()
        answer: Event
        try:
            answer = session.switch(command.mode, **command.params)
        except Exception as error:  # noqa: BLE001  # the answer in progress goes on in the old mode
            answer = messages.SwitchRefused(session.info.mode, str(_explained(error)))
        self._outbox.send(answer)
        self._snapshot()

    def _loaded(self) -> Session:
        if self._session is None:
            raise EngineError("No model is loaded.")
        return self._session

    def _snapshot(self, at_most_every: float = 0.0) -> None:
        if self._session and self._clock() - self._snapshot_at >= at_most_every:
            self._outbox.send(self._session.snapshot())
            self._snapshot_at = self._clock()

    @contextmanager
    def _failures_reported(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            raise
        except Exception as error:  # noqa: BLE001  # the conversation is worth more than this command
            self._fail(_explained(error))

    def _fail(self, error: KvchatError) -> None:
        """Report a failure; that of a command done between two tokens after the answer, which it is not about."""
        kind, fatal = type(error).__name__, self._session is None
        failed = Failed(error.title, error.detail, error.hint, kind, fatal)
        if self._answering:
            self._failures.append(failed)
        else:
            self._outbox.send(failed)


def _command(body: bytes) -> Command | Refused:
    try:
        return wire.decode_command(body)
    except ValueError as error:
        return Refused(str(error))


def _explained(error: Exception) -> KvchatError:
    """The error if it is for people, else one in its place; what it was goes to the log."""
    if isinstance(error, KvchatError):
        return error
    traceback.print_exception(error)
    return EngineError("The engine failed.", f"{type(error).__name__}: {error}")


def main() -> None:
    """Serve the parent process on this process's stdin and stdout."""
    end_with_parent()
    wait_without_spinning()
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to end
    commands, events = _take_streams()
    server = Server(events, _open_session)
    finished = threading.Event()

    def read() -> None:
        server.read(commands)
        if not finished.wait(GRACE_S):
            os._exit(1)  # deep in a load or a kernel, and the application is gone

    threading.Thread(target=read, daemon=True).start()
    server.run()
    finished.set()
    with suppress(BrokenPipeError):
        events.close()


def _open_session(load: Load, progress: Progress) -> Session:
    from kvchat.engine.session import open_session  # torch: seconds, after the first event

    return open_session(load, progress)


def _take_streams() -> tuple[BinaryIO, BinaryIO]:
    """Stdin and stdout for the protocol alone: what a library prints goes to stderr, what it asks for is empty."""
    commands, events = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    return commands, events


if __name__ == "__main__":
    main()
