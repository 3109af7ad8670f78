"""The engine behind the server, in its own process, and the queue of requests for it.

The application starts the same child process. If it crashes, the server reports that and starts another, which prefills
unsaved tokens again. If a client disconnects, its request leaves the queue, or its answer ends after the current token.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvchat import errors
from kvchat.protocol import messages
from kvchat.protocol.client import Crashed, EngineClient, Report
from kvchat.protocol.figures import Snapshot
from kvchat.serve.refusals import Refusal, invalid, unavailable
from kvchat.units import count, size

REQUEST_ERRORS = {
    error.__name__
    for error in (errors.UsageError, errors.TooMuchPinnedError, errors.DoesNotFitError, errors.ContextFullError)
}


@dataclass(frozen=True)
class Ended:
    """The last event of a job: a ``refusal``, or the engine's ``last`` event and the figures after it."""

    last: messages.Finished | messages.Tokenized | None = None
    snapshot: Snapshot | None = None
    refusal: Refusal | None = None


class Again:
    """The answer was interrupted and starts again: discard its events so far."""


@dataclass
class Job:
    """A command for the engine; ``events`` end with ``Ended``, and start again after ``Again``.

    A job that ``can_wait``, because its answer is not streamed, lets others go first and is interrupted for them once.
    """

    command: messages.Chat | messages.Tokenize
    can_wait: bool = False
    events: asyncio.Queue[messages.AnswerEvent | messages.Resumed | Again | Ended] = field(
        default_factory=asyncio.Queue
    )


@dataclass(eq=False)
class Engine:
    """Does one job at a time; at most ``limit`` wait.

    Attributes:
        show: called with each stage of loading, and with "" after the last.
        say: called with messages for the operator of the server.
        loaded: None until the model is ready.
        snapshot: the latest figures.
    """

    load: messages.Load
    log_file: Path
    limit: int
    show: Callable[[str], None]
    say: Callable[[str], None]
    command: Sequence[str]
    loaded: messages.Loaded | None = None
    snapshot: Snapshot | None = None
    restarts: int = 0

    def __post_init__(self) -> None:
        self._client = EngineClient(self.command, self.log_file)
        self._waiting: deque[Job] = deque()
        self._job: Job | None = None
        self._last: messages.Finished | messages.Failed | messages.Tokenized | None = None
        self._is_interrupted = False  # True if the job was stopped for one that cannot wait
        self._is_closing = False

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def working(self) -> int:
        return int(self._job is not None)

    async def run(self) -> None:
        """Load the model and do the submitted jobs, until ``close``.

        Raises:
            EngineError: the child cannot be started, ended while loading the model, or refused to load it.
        """
        await self._client.start()
        self._client.send(self.load)
        while True:
            for report in await self._client.receive():
                if isinstance(report, Crashed):
                    await self._restart(report)
                else:
                    self._take(report)

    def submit(self, command: messages.Chat | messages.Tokenize, can_wait: bool = False) -> Job:
        """Queue ``command`` behind the jobs that cannot wait or, if it can wait, behind all.

        Front ends request a title before the answer that the user waits for, and suggestions after it.

        Raises:
            Refusal: the model is not ready, the queue is full, or the server is shutting down.
        """
        if self._is_closing:
            raise unavailable("The server is shutting down.")
        if self.loaded is None:
            raise unavailable("The model is being loaded.")
        if self._job is not None and len(self._waiting) >= self.limit:
            raise unavailable(f"{count(self.limit, 'request')} already waiting.")
        self._queue(job := Job(command, can_wait))
        if self._job and self._job.can_wait and self._last is None and not can_wait:
            self._is_interrupted, self._job.can_wait = True, False
            self._client.send(messages.Stop())
        self._begin()
        return job

    def abandon(self, job: Job) -> None:
        """Remove a waiting job or stop the current one; a job that has ended is unaffected."""
        if job in self._waiting:
            self._waiting.remove(job)
            job.events.put_nowait(Ended(refusal=unavailable("The client disconnected.")))
        elif job is self._job:
            self._is_interrupted = job.can_wait = False
            if self._last is None:
                self._client.send(messages.Stop())

    def begin_shutdown(self) -> None:
        """Refuse waiting and new jobs, and stop the current one."""
        self._is_closing = True
        while self._waiting:
            self._waiting.popleft().events.put_nowait(Ended(refusal=unavailable("The server is shutting down.")))
        if self._job:
            self.abandon(self._job)

    async def close(self) -> None:
        await self._client.close()

    def _queue(self, job: Job) -> None:
        ahead = len(self._waiting) if job.can_wait else sum(not each.can_wait for each in self._waiting)
        self._waiting.insert(ahead, job)

    def _begin(self) -> None:
        if self._job is None and self._waiting:
            self._job, self._last = self._waiting.popleft(), None
            self._is_interrupted = False
            self._client.send(self._job.command)

    def _take(self, report: Report) -> None:
        match report:
            case Snapshot():
                self.snapshot = report
            case messages.Loading(stage):
                self.show(stage)
            case messages.Loaded():
                self.show("")
                self.loaded = report
                self.say(ready(report))
                for note in (*report.notes, *parked(report, self.load)):
                    self.say(note)
            case messages.Noted(text):
                self.say(text)
            case messages.Peeked():  # the answer to ``Peek``: all reports of the last command have arrived
                self._end(self._ended())
            case messages.Failed() if self.loaded is None:
                self.show("")
                raise _error(report)
            case messages.Failed() if report.aside or self._job is None or self._last:
                self.say(str(_error(report)))  # work after an answer failed, such as saving it, not the answer
            case messages.Finished() | messages.Failed() | messages.Tokenized():
                self._last = report
                self._client.send(messages.Peek(0, 0))
            case _ if self._job and isinstance(report, messages.AnswerEvent | messages.Resumed):
                self._job.events.put_nowait(report)

    def _end(self, ended: Ended) -> None:
        job, self._job = self._job, None
        if (
            job
            and self._is_interrupted
            and isinstance(ended.last, messages.Finished)
            and ended.last.reason == "stopped"
        ):
            job.events.put_nowait(Again())
            self._queue(job)
        elif job:
            job.events.put_nowait(ended)
        self._begin()

    def _ended(self) -> Ended:
        last, context = self._last, self.loaded.context if self.loaded else 0
        if not isinstance(last, messages.Failed):
            if isinstance(last, messages.Finished) and last.reason == "stopped" and self._is_closing:
                return Ended(refusal=unavailable("The server is shutting down."))
            return Ended(last, self.snapshot)
        message = str(_error(last))
        if last.tokens:
            kind, code = "exceed_context_size_error", "context_length_exceeded"
            message = f"{last.title} {last.detail}"  # without the hint, which names commands of the chat
            return Ended(refusal=Refusal(400, message, kind, None, code, n_prompt_tokens=last.tokens, n_ctx=context))
        if last.kind in REQUEST_ERRORS:
            return Ended(refusal=invalid(message))
        if last.kind == errors.OutOfMemoryError.__name__:
            return Ended(refusal=unavailable(message))
        return Ended(refusal=Refusal(500, message, "server_error"))

    async def _restart(self, crashed: Crashed) -> None:
        """Start another child process.

        Raises:
            EngineError: the last one ended while loading the model, and so would the next one.
        """
        why = "Memory may have run out." if crashed.lacked_memory else ""
        log = f"Its last lines: {' '.join(crashed.log)}" if crashed.log else ""
        error = errors.EngineError(f"The engine stopped: {crashed.how}.", why, log)
        if self.loaded is None:
            raise error
        is_whole = self._last is not None and not self._is_interrupted  # only the figures are missing
        ended = self._ended() if is_whole else Ended(refusal=unavailable(f"{error.title} It is restarting."))
        self.loaded = self.snapshot = None
        self.restarts += 1
        self.say(f"{error} It is restarting.")
        while self._waiting:
            self._waiting.popleft().events.put_nowait(Ended(refusal=unavailable("The engine is restarting.")))
        self._end(ended)
        await self._client.restart()
        self._client.send(self.load)


def ready(loaded: messages.Loaded) -> str:
    model = f"{loaded.model} ({loaded.weights or loaded.dtype}) on {loaded.device}, {loaded.mode} mode"
    return f"Ready: {model}, {loaded.context:,} tokens of context."


def parked(loaded: messages.Loaded, load: messages.Load) -> Iterator[str]:
    """Yield a message about how many tokens of other conversations fit in RAM, if parking is on."""
    room = load.keeping.parked_bytes if load.gpus == 1 or load.split == "layers" else 0
    if room and loaded.kv_bytes_per_token:
        tokens = room // loaded.kv_bytes_per_token
        yield f"About {tokens:,} tokens of other conversations stay in RAM ({size(room)})."


def _error(failed: messages.Failed) -> errors.KvchatError:
    return errors.EngineError(failed.title, failed.detail, failed.hint)
