"""``kvchat ask``: one answer without a screen. Its text goes to stdout as it comes, everything else to stderr."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import kvchat
from kvchat.cli.output import note, progress, write
from kvchat.conversations import attachments
from kvchat.engine.generate.hold_back import hold_back
from kvchat.engine.model import checkpoint
from kvchat.errors import KvchatError, UsageError
from kvchat.protocol.figures import Params, Stats
from kvchat.protocol.messages import Finished, Load, Sampling, Text, Turn

if TYPE_CHECKING:
    from kvchat import Session

INTERRUPTED = 130


@dataclass(frozen=True)
class SwitchAt:
    """Enter ``mode`` once ``after`` tokens are generated."""

    after: int
    mode: str
    params: Params


@dataclass(frozen=True)
class Question:
    """What to ask whom, and how to tell."""

    load: Load
    turns: tuple[Turn, ...]
    sampling: Sampling
    switches: tuple[SwitchAt, ...] = ()
    as_json: bool = False
    show_stats: bool = False


def compose(prompt: str | None, files: Sequence[Path], piped: bytes) -> str:
    """The user's turn: the files with their names, the prompt, and what was piped in.

    Raises:
        UsageError: nothing is left, a file cannot be read, or something is not UTF-8.
    """
    parts = [attachments.fenced(str(path), _text(_read(path), str(path))) for path in files]
    # the shell hands on bytes that are not UTF-8 as lone surrogates
    parts += [_text((prompt or "").encode("utf-8", "surrogateescape"), "the prompt"), _text(piped, "stdin")]
    text = "\n\n".join(part.rstrip("\n") for part in parts if part.strip())
    if not text:
        raise UsageError("The prompt is empty.", hint="Write it after `kvchat ask` or pipe it in.")
    return text


def ask(question: Question) -> int:
    """Load, answer, print; the exit code.

    A switch that is refused is said on stderr; the answer goes on, and the exit code is the refusal's.

    Raises:
        KvchatError: the model cannot be loaded or the answer cannot be given.
    """
    _quiet()
    session = _open(question.load)
    for text in session.info.notes:
        note(text)
    switcher = _Switcher(session, question.switches)
    with _interrupt_cancels(session) as interrupted:

        def between(generated: int) -> None:
            if interrupted:
                session.cancel()  # it came while the prompt was being encoded, before the answer began
            switcher.between(generated)

        finished = _answer(session, question, between)
    if question.as_json:
        write(json.dumps(_result(session, question.load.mode, finished)) + "\n")
    elif not finished.text.endswith("\n"):
        write("\n")
    for switch in switcher.pending:
        note(f"the answer ended before the switch to {switch.mode} after {switch.after} tokens.")
    if question.show_stats:
        sys.stderr.write(stats_table(finished.stats))
    session.close()
    return INTERRUPTED if interrupted else switcher.exit_code


def _open(load: Load) -> Session:
    try:
        checkpoint.locate(load.model, progress)  # refuses a wrong name before torch is imported, which takes seconds
        progress("Starting torch")
        return kvchat.open_session(load, progress)
    finally:
        progress("")


def stats_table(stats: Stats) -> str:
    """One aligned line for each number; a dash where there was nothing to measure."""
    rows = {field.name: getattr(stats, field.name) for field in dataclasses.fields(stats)}
    rows["switches"] = len(stats.switches)
    rows |= rows.pop("extras")
    return "".join(f"{name:<22} {_cell(value):>14}\n" for name, value in rows.items())


class _Switcher:
    """Does the switches that are due; ``pending`` are still to come."""

    def __init__(self, session: Session, switches: Sequence[SwitchAt]) -> None:
        self.pending = sorted(switches, key=lambda switch: switch.after)
        self.exit_code = 0
        self._session = session

    def between(self, generated: int) -> None:
        while self.pending and self.pending[0].after <= generated:
            switch = self.pending.pop(0)
            try:
                self._session.switch(switch.mode, **switch.params)
            except KvchatError as error:
                note(str(error))
                self.exit_code = error.exit_code


def _answer(session: Session, question: Question, between: Callable[[int], None]) -> Finished:
    events = session.answer(question.turns, question.sampling, between)
    for event in hold_back(events, lambda: session.withdrawable):
        if isinstance(event, Text) and not question.as_json:
            write(event.text)
        elif isinstance(event, Finished):
            return event
    raise AssertionError("an answer ends with Finished")


def _result(session: Session, mode: str, finished: Finished) -> Params:
    return {
        "text": finished.text,
        "token_ids": list(session.token_ids),
        "model": session.info.model,
        "mode": mode,
        "finish_reason": finished.reason,
        "stats": dataclasses.asdict(finished.stats),
    }


def _cell(value: float | str | None) -> str:
    if value is None or isinstance(value, str):
        return value or "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.3f}"


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"The file {path} cannot be read: {error.strerror}.") from None


def _text(raw: bytes, name: str) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise UsageError(
            f"Byte {error.start} of {name} is not UTF-8.", f"It is 0x{raw[error.start]:02x}.", "Convert it to UTF-8."
        ) from None


@contextmanager
def _interrupt_cancels(session: Session) -> Iterator[list[int]]:
    """Ctrl-C ends the answer after the token in hand, a second one at once; the list tells whether it came."""
    interrupted: list[int] = []

    def cancel(number: int, _frame: object) -> None:
        interrupted.append(number)
        session.cancel()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = signal.signal(signal.SIGINT, cancel)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)


def _quiet() -> None:
    """Before transformers is imported: its progress bars and warnings would mix with stderr's few lines."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
