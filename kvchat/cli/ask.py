"""``kvchat ask``: streams one answer to stdout and everything else to stderr.

Other commands without a screen also open their sessions here: progress goes to stderr, and Ctrl+C ends the answer.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import kvchat
from kvchat import libraries
from kvchat.cli.output import note, progress, report, write
from kvchat.config import modes
from kvchat.config.schema import Settings
from kvchat.errors import KvchatError, UsageError, resolve
from kvchat.models import checkpoint
from kvchat.paths import is_server
from kvchat.protocol.figures import Params, Stats
from kvchat.protocol.messages import Event, Finished, Load, Noted, Sampling, Switched, Text, Turn
from kvchat.units import count

if TYPE_CHECKING:
    from kvchat import Session
    from kvchat.remote.session import RemoteSession


INTERRUPTED = 130


@dataclass(frozen=True)
class SwitchAt:
    """Enter ``mode`` once ``after`` tokens are generated."""

    after: int
    mode: str
    params: Params

    @classmethod
    def read(cls, text: str, chosen: Settings) -> SwitchAt:
        """Parse ``N:MODE[,KEY=VALUE...]``; ``params`` omits the settings, which the engine gets with the model.

        Raises:
            UsageError: the text does not have this form, or the mode or a value is not valid.
        """
        match = re.fullmatch(r"(\d+):(\w+)((?:,\w+=[^,=]*)*)", text)
        if not match:
            raise UsageError(f'--switch-at "{text}" is not N:MODE.', hint="For example: 64:speculative,budget=512")
        after, given_mode, pairs = match.groups()
        mode = resolve(given_mode, modes.choosable(), "KV mode")
        given = dict(pair.split("=") for pair in pairs.split(",") if pair)
        checked = modes.parse(mode, {**chosen.kv.params(mode), **given})
        return cls(int(after), mode, {name: getattr(checked, name) for name in given})


def ask(
    load: Load,
    turns: Sequence[Turn],
    sampling: Sampling,
    switches: Sequence[SwitchAt],
    as_json: bool,
    show_stats: bool,
) -> int:
    """Load the model, answer and print; return the exit code.

    A refused switch is reported on stderr; the answer continues, and the exit code is that of the refusal.

    Raises:
        KvchatError: the model cannot be loaded or the answer cannot be given.
    """
    session = opened_at_server(load) if is_server(load.model) else opened(load)
    for text in session.info.notes:
        note(text)
    switcher = _Switcher(session, switches)
    with interrupt_cancels(session) as interrupted:

        def between(generated: int) -> None:
            if interrupted:
                session.cancel()  # Ctrl+C came while the prompt was being encoded, before the answer began
            switcher.between(generated)

        finished = _answer(session.answer(turns, sampling, between), session, is_shown=not as_json)
    if as_json:
        write(json.dumps(_result(session, load.mode, finished)) + "\n")
    elif not finished.text.endswith("\n"):
        write("\n")
    for switch in switcher.pending:
        note(f"the answer ended before the switch to {switch.mode} after {count(switch.after, 'token')}.")
    if show_stats:
        report(stats_table(finished.stats))
    session.close()
    if interrupted:
        return INTERRUPTED
    if not is_server(load.model):
        _finish_compiling()
    return switcher.exit_code


def _finish_compiling() -> None:
    """Wait until loops are compiled and weights are packed, because a process left behind would run unseen.

    Without the wait, this work would never finish for someone who uses only ``kvchat ask``. Ctrl+C ends the wait.
    """
    from kvchat.models import compile_ahead  # imports torch, which the session has imported already

    with suppress(KeyboardInterrupt):
        compile_ahead.finish(lambda stage: progress(f"{stage} · Ctrl+C postpones it to the next start"))
    progress("")


def stats_table(stats: Stats) -> str:
    """Return one aligned line per number, with a dash if it was not measured."""
    rows = {field.name: getattr(stats, field.name) for field in dataclasses.fields(stats)}
    rows["switches"] = len(stats.switches)
    rows |= rows.pop("extras")
    return "\n".join(f"{name:<22} {_cell(value):>14}" for name, value in rows.items())


class _Switcher:
    """Switches modes during an answer; ``pending`` are the switches still to come."""

    def __init__(self, session: Session | RemoteSession, switches: Sequence[SwitchAt]) -> None:
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


def _answer(events: Iterator[Event], session: Session | RemoteSession, is_shown: bool) -> Finished:
    if not session.info.server:
        from kvchat.engine.detokenizer import hold_back  # imports tokenizers, as the session does

        events = hold_back(events, lambda: session.withdrawable)
    text = "\n"
    try:
        for event in events:
            if isinstance(event, Text) and is_shown:
                write(text := event.text)
            elif isinstance(event, Switched | Noted):
                note(event.auto if isinstance(event, Switched) else event.text)
            elif isinstance(event, Finished):
                return event
    except KvchatError:
        if not text.endswith("\n"):
            write("\n")  # the error must not continue the text's last line
        raise
    raise AssertionError("an answer ends with Finished")


def _result(session: Session | RemoteSession, mode: str, finished: Finished) -> Params:
    return {
        "text": finished.text,
        "token_ids": list(session.token_ids),
        "model": session.info.model,
        "mode": mode if not session.info.server else session.info.mode,
        "finish_reason": finished.reason,
        "stats": dataclasses.asdict(finished.stats),
    }


def _cell(value: float | str | None) -> str:
    if value is None or isinstance(value, str):
        return value or "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.3f}"


def opened_at_server(load: Load) -> RemoteSession:
    """Open a session with the model of a server.

    Raises:
        KvchatError: no server answers, or a package is missing.
    """
    libraries.require("remote", f"Talking to {load.model}")
    from kvchat.remote.session import open_session

    try:
        return open_session(load, progress)
    finally:
        progress("")


def opened(load: Load) -> Session:
    """Load a model and open a session with it.

    Raises:
        KvchatError: the model cannot be loaded.
    """
    # transformers, imported later, would mix its progress bars and warnings into kvchat's lines on stderr.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
    try:
        checkpoint.locate(load.model, progress)  # refuses a wrong name before torch is imported, which takes seconds
        progress("Starting torch")
        return kvchat.open_session(load, progress)
    finally:
        progress("")


@contextmanager
def interrupt_cancels(session: Session | RemoteSession) -> Iterator[list[int]]:
    """Let Ctrl+C end the answer after the current token and fill the yielded list; a second Ctrl+C ends it at once."""
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
