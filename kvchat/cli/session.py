"""The session of a command without a screen: opened with its progress on stderr, ended by Ctrl+C."""

from __future__ import annotations

import os
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import kvchat
from kvchat.cli.output import progress
from kvchat.kv.memory.available import check_address_space
from kvchat.models import checkpoint
from kvchat.protocol.messages import Load

if TYPE_CHECKING:
    from kvchat import Session

INTERRUPTED = 130


def opened(load: Load) -> Session:
    """Load a model and open a session with it.

    Raises:
        KvchatError: the model cannot be loaded.
    """
    _quiet()
    check_address_space()
    try:
        checkpoint.locate(load.model, progress)  # refuses a wrong name before torch is imported, which takes seconds
        progress("Starting torch")
        return kvchat.open_session(load, progress)
    finally:
        progress("")


@contextmanager
def interrupt_cancels(session: Session) -> Iterator[list[int]]:
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
