"""The engine process, ``python -m kvchat.engine``: reads commands from stdin and writes events to stdout.

A reader thread takes commands from stdin. The main thread does all the work, so that only one thread uses the session,
except for ``cancel``. Commands that arrive during an answer are executed between two tokens. The process ends with its
parent where the system supports that, and at the latest ``Server.grace_s`` after its stdin closes. torch is imported
when the first model is loaded.
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any, BinaryIO

from kvchat import files, libraries
from kvchat.errors import ContextFullError, EngineError, KvchatError, ModelError
from kvchat.paths import is_server
from kvchat.process import claim_stdio, spin_briefly, use_physical_cores
from kvchat.protocol import figures, messages, wire
from kvchat.protocol.messages import (
    Chat,
    Command,
    Compare,
    Event,
    Failed,
    Forget,
    HideNeedle,
    InAnswer,
    Load,
    Loading,
    Peek,
    Plan,
    Rebuild,
    Resume,
    Stop,
    Switch,
    Text,
    Watch,
)

if TYPE_CHECKING:
    from kvchat.engine.session import Session
    from kvchat.remote.session import RemoteSession

SNAPSHOT_S = 1 / 10
DETAILS_S = 1 / 2
IDLE_SNAPSHOT_S = 1.0  # after the last command; repeated only while readings of a GPU or server change by themselves
GRACE_S, IDLE_GRACE_S = 2.0, 0.5  # with a session, which still writes K/V to disk; without one
STOP_AGAIN_S = 0.05  # retry after this if an import is running, which must not be interrupted
STOP_SIGNAL = signal.SIGUSR1  # sent to this process itself: the main thread may be deep in a library
Progress = Callable[[str], None]
TEXT_S = 1 / 30
STOPPABLE = Load | Chat | Rebuild | Compare
AWAITED = STOPPABLE | HideNeedle | messages.Tokenize  # the application waits until these end
IMPORTER = "<frozen importlib._bootstrap>"


class LoadStopped(BaseException):
    """A load is abandoned. Not an ``Exception``, so that no library treats it as a failure of its own."""


class Server:
    """Executes commands for one session at a time, which ``loader`` opens.

    ``interrupt`` makes the main thread call ``check_stopped`` soon, whatever it is doing.
    """

    def __init__(
        self,
        events: BinaryIO,
        loader: Loader,
        clock: Callable[[], float] = time.monotonic,
        interrupt: Callable[[], None] = lambda: None,
    ) -> None:
        self._inbox = Inbox()
        self._outbox = Outbox(events, clock)
        self._loader = loader
        self._clock = clock
        self._interrupt = interrupt
        self._session: Session | RemoteSession | None = None
        self._in_use: Load | None = None
        self._loading = self._stop_due = False
        self._answering = False
        self._failures: list[Failed] = []
        self._snapshot_at = self._details_at = float("-inf")
        self._watches_details = False
        self._changes_alone = False
        self._at_rest = False

    @property
    def grace_s(self) -> float:
        """Seconds that shutting down may take after the last command."""
        return GRACE_S if self._in_use else IDLE_GRACE_S

    # ---- reader thread

    def read(self, commands: BinaryIO) -> None:
        """Read commands until the stream ends or violates the protocol; both end the server.

        An unreadable command is answered with ``Failed`` when its turn comes.
        """
        try:
            while (body := wire.read(commands)) is not None:
                command = _command(body)
                self._inbox.put(command)
                if isinstance(command, Stop):
                    self._cancel()  # now, because a prefill has no tokens to wait between
        except (ValueError, OSError, MemoryError) as error:
            sys.stderr.write(f"kvchat: {error or 'no memory for a command'}\n")
        self._inbox.close()
        self._cancel()

    def _cancel(self) -> None:
        session = self._session  # the main thread may replace it at any time
        if session and self._answering:
            session.cancel()
        elif self._loading:
            self._stop_due = True
            self._interrupt()

    # ---- main thread

    def run(self) -> None:
        try:
            while not self._inbox.closed:
                if command := self._inbox.get(None if self._at_rest else IDLE_SNAPSHOT_S):
                    self._do(command)
                    self._at_rest = False
                elif not self._inbox.closed:
                    self._snapshot_aside()
                    self._at_rest = not self._changes_alone
        except BrokenPipeError:
            pass  # the application is gone
        finally:
            self._close_session()

    def _do(self, command: Command | Refused) -> None:
        with self._failures_reported(aside=not isinstance(command, AWAITED | Refused)):
            match command:
                case Load():
                    self._load(command)
                case Chat() as chat:
                    self._work(lambda session: self._answer(session, chat))
                case messages.Tokenize(turns, args):
                    self._outbox.send(messages.Tokenized(tuple(self._loaded().tokenize(turns, args))))
                case Resume(conversation, turns):
                    self._work(lambda session: session.resume(conversation, turns))
                case Forget(conversation):
                    if self._session:
                        self._session.forget(conversation)
                case Rebuild():
                    self._work(lambda session: session.rebuild())
                case Compare(turns, variants, sampling):
                    self._work(lambda session: session.compare(turns, variants, sampling))
                case HideNeedle(tokens, seed):
                    self._outbox.send(self._loaded().hide_needle(tokens, seed))
                case Switch():
                    self._switch(command)
                case messages.KeepPages(host_dtype):
                    self._outbox.send(messages.Noted(self._loaded().keep_pages(host_dtype)))
                    self._snapshot()
                case messages.SetTemplateArgs(args):
                    self._outbox.send(messages.Noted(self._loaded().set_template_args(args)))
                case Plan():
                    self._plan(command)
                case Peek(start, end):
                    self._outbox.send(messages.Peeked(start, end, self._loaded().text(start, end)))
                case Watch(details):
                    self._watches_details = details
                    self._snapshot()
                case Stop():
                    pass  # the answer it was meant for is over
                case Refused(reason):
                    raise EngineError("The engine cannot read a command.", reason, "Install kvchat again.")

    def _load(self, command: Load) -> None:
        """Load another model; unload the old one first only if both do not fit, and load it again after a failure."""
        # The first load takes seconds before the loader can report anything.
        needs_torch = self._session is None and not is_server(command.model)
        self._outbox.send(Loading("starting PyTorch" if needs_torch else f"loading {command.model}"))
        with self._failures_reported():
            self._replace_session(command)
        if self._session is None and (in_use := self._in_use):
            self._in_use = None
            self._outbox.send(Loading(f"loading {in_use.model} again"))
            self._session, self._in_use = self._loader.open_session(in_use, lambda stage: None), in_use
        if self._session:
            self._outbox.send(self._session.info)
            self._snapshot_aside()

    def _replace_session(self, command: Load) -> None:
        try:
            self._loading = True
            self._stop_due = self._inbox.stops()
            self.check_stopped()  # a Stop that came earlier has interrupted nothing
            if self._session and not self._loader.fits_beside(command, self._progress):
                self._progress(f"unloading {self._session.info.model}: both do not fit")
                self._close_session()
            opened = self._loader.open_session(command, self._progress)
            self._loading = False
        except LoadStopped:
            raise EngineError(f"Loading {command.model} was stopped.", hint="/model loads one.") from None
        finally:
            self._loading = False
        self._close_session()
        self._session, self._in_use = opened, command

    def _close_session(self) -> None:
        session, self._session = self._session, None
        if session:
            session.close()

    def _progress(self, stage: str) -> None:
        self.check_stopped()
        self._outbox.send(Loading(stage))

    def check_stopped(self) -> None:
        """Abandon a load that was stopped; called on the main thread."""
        if self._loading and self._stop_due:
            raise LoadStopped

    def _plan(self, command: Plan) -> None:
        """Send a model's memory plan or the refusal; not as ``Failed``, which would end an answer in progress."""
        try:
            in_use = self._session.snapshot() if self._session else None
            planned = figures.Planned(command.load.model, self._loader.plan(command, in_use, lambda stage: None))
        except Exception as error:  # noqa: BLE001  # a model's files can cause any error
            planned = figures.Planned(command.load.model, None, str(_explained(error)))
        self._outbox.send(planned)

    def _work(self, begin: Callable[[Any], Iterator[Event]]) -> None:
        """Send the events of an answer, comparison or rebuild; ``Stop`` can end it once it is requested."""
        session = self._loaded()
        self._answering = True
        try:
            events = begin(session)
            if self._inbox.stops():
                session.cancel()
            for event in events:
                self._outbox.send(event)
                with suppress(KvchatError):  # must not end the answer; the snapshot after the answer reports it
                    self._snapshot(at_most_every=SNAPSHOT_S)
        finally:
            self._answering = False
            self._outbox.flush()
            while self._failures:
                self._outbox.send(self._failures.pop(0))
        self._snapshot_aside()

    def _answer(self, session: Session | RemoteSession, chat: Chat) -> Iterator[Event]:
        own = (chat.variant, chat.template_args, chat.json_schema, chat.top_logprobs, chat.must_call)
        events = session.answer(chat.turns, chat.sampling, self._between, chat.conversation, *own)
        if not chat.is_final:
            return events
        from kvchat.engine.detokenizer import hold_back  # imports tokenizers, which a session has imported already

        return hold_back(events, lambda: session.withdrawable)

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
        except Exception as error:  # noqa: BLE001  # the answer in progress continues in the old mode
            answer = messages.SwitchRefused(session.info.mode, str(_explained(error)))
        self._outbox.send(answer)
        self._snapshot()

    def _loaded(self) -> Any:
        if self._session is None:
            raise EngineError("No model is loaded.", hint="Load one first.")
        return self._session

    def _snapshot(self, at_most_every: float = 0.0) -> None:
        if self._session and self._clock() - self._snapshot_at >= at_most_every:
            # Set first, so that a snapshot that fails is not retried at each token.
            self._snapshot_at, self._changes_alone = self._clock(), False
            is_due = self._snapshot_at - self._details_at >= (DETAILS_S if at_most_every else 0.0)
            details = self._session.details() if self._watches_details and is_due else None
            snapshot = self._session.snapshot()
            self._changes_alone = bool(snapshot.gpu or (snapshot.server and self._watches_details))
            self._outbox.send(snapshot)
            if details:
                self._outbox.send(details)
                self._details_at = self._clock()

    def _snapshot_aside(self) -> None:
        with self._failures_reported(aside=True):
            self._snapshot()

    @contextmanager
    def _failures_reported(self, aside: bool = False) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            raise
        except Exception as error:  # noqa: BLE001  # the conversation is worth more than this command
            self._fail(_explained(error), aside)

    def _fail(self, error: KvchatError, aside: bool) -> None:
        """Send ``Failed``; during an answer only after it ends, because the failure is not the answer's."""
        kind, fatal = type(error).__name__, self._session is None and self._in_use is None
        tokens = error.tokens if isinstance(error, ContextFullError) else 0
        failed = Failed(error.title, error.detail, error.hint, kind, fatal, tokens, aside)
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
    """Return a ``KvchatError`` unchanged; log any other error and wrap it in an ``EngineError``."""
    if isinstance(error, KvchatError):
        return error
    with suppress(OSError):  # the disk may be full
        traceback.print_exception(error)
    return EngineError("The engine failed.", f"{type(error).__name__}: {error}", "/restart starts a fresh one.")


def main() -> None:
    """Serve the parent process on this process's stdin and stdout."""
    files.name_temporary_folder()
    spin_briefly()
    use_physical_cores()
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    commands, events = claim_stdio()
    server = Server(events, Loader(), interrupt=_interrupt)
    later = partial(threading.Timer, STOP_AGAIN_S, _interrupt)
    signal.signal(STOP_SIGNAL, lambda _, frame: later().start() if is_importing(frame) else server.check_stopped())
    finished = threading.Event()

    def read() -> None:
        server.read(commands)
        if not finished.wait(server.grace_s):
            os._exit(1)  # the application is gone, and the main thread is deep in a load or a kernel

    threading.Thread(target=read, daemon=True).start()
    server.run()
    finished.set()
    with suppress(BrokenPipeError):
        events.close()


def _interrupt() -> None:
    signal.pthread_kill(threading.main_thread().ident or 0, STOP_SIGNAL)


class Loader:
    """Opens sessions and makes plans for the worker, importing torch for them; each method may raise KvchatError."""

    def open_session(self, load: Load, progress: Progress) -> Session | RemoteSession:
        """Call ``kvchat.engine.session.open_session``, or the remote one for a server, which needs no torch."""
        if is_server(load.model):
            libraries.require("remote", f"Talking to {load.model}")
            from kvchat.remote import session

            return session.open_session(load, progress)
        libraries.check(load.quantize, load.device)
        from kvchat.engine.session import open_session

        return open_session(load, progress)

    def fits_beside(self, load: Load, progress: Progress) -> bool:
        """Call ``kvchat.engine.plan.fits_beside``; a model on a server takes no memory here."""
        if is_server(load.model):
            return True
        from kvchat.engine.plan import fits_beside

        return fits_beside(load, progress)

    def plan(self, asked: Plan, in_use: figures.Snapshot | None, progress: Progress) -> figures.MemoryPlan:
        """Call ``kvchat.engine.plan.memory_plan``.

        Raises:
            ModelError: the model is on a server; KvchatError: the same as ``memory_plan``.
        """
        if is_server(asked.load.model):
            raise ModelError("The model runs on a server, in the server's memory.", hint="See its log.")
        from kvchat.engine.plan import memory_plan

        return memory_plan(asked.load, asked.context, progress, in_use)


@dataclass(frozen=True)
class Refused:
    """Replaces a command that cannot be read."""

    reason: str


class Inbox:
    """Queues commands in order; the reader thread fills it."""

    def __init__(self) -> None:
        self._commands: deque[Command | Refused] = deque()
        self._changed = threading.Condition()
        self.closed = False

    def put(self, command: Command | Refused) -> None:
        with self._changed:
            self._commands.append(command)
            self._changed.notify()

    def close(self) -> None:  # waiting commands are dropped too: nobody reads their events
        with self._changed:
            self.closed = True
            self._changed.notify()

    def get(self, timeout: float | None) -> Command | Refused | None:
        """Return the next command; None when closed, or after ``timeout`` seconds (None: no limit)."""
        with self._changed:
            self._changed.wait_for(lambda: self._commands or self.closed, timeout)
            return self._commands.popleft() if self._commands and not self.closed else None

    def get_in_answer(self) -> InAnswer | None:
        """Return the next command that can be executed between two tokens; it passes others, except stoppable work."""
        with self._changed:
            found = next((command for command in self._before_next_work() if isinstance(command, InAnswer)), None)
            if found is not None:
                self._commands.remove(found)
            return found

    def stops(self) -> bool:
        """True if a queued ``Stop`` is meant for the work just started: no other stoppable work precedes it."""
        with self._changed:
            return any(isinstance(command, Stop) for command in self._before_next_work())

    def _before_next_work(self) -> Iterator[Command | Refused]:
        return itertools.takewhile(lambda command: not isinstance(command, STOPPABLE), self._commands)


class Outbox:
    """Sends events to the application; batches text and flushes it before any other event."""

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
            scores = tuple(score for piece in self._pieces for score in piece.scores)
            self._write(Text("".join(p.text for p in self._pieces), sum(p.tokens for p in self._pieces), scores))
            self._pieces.clear()
            self._flushed = self._clock()

    def _write(self, event: Event) -> None:
        self._stream.write(wire.encode(event))
        self._stream.flush()


def is_importing(frame: FrameType | None) -> bool:
    """True if ``frame`` runs inside an import, which cannot be repeated in this process if it is interrupted.

    Submodules of torch that were already imported stay, but do not become attributes of the package imported next.
    """
    while frame is not None and frame.f_code.co_filename != IMPORTER:
        frame = frame.f_back
    return frame is not None
