"""The fake engine as a fork of this process: one that starts a Python of its own takes a fifth of a second more."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import traceback
import warnings
from asyncio.subprocess import Process
from typing import Any

from support.fake_engine import FakeEngine
from support.start_app import FAKE_ENGINE

from kvchat.config import modes  # noqa: F401  # it imports nothing more after the fork

COMMAND = (sys.executable, str(FAKE_ENGINE))
start = asyncio.create_subprocess_exec


async def start_forked(*command: str, **streams: Any) -> Process:
    """As ``asyncio.create_subprocess_exec``; the command of the fake engine is not executed but called."""
    if command != COMMAND:
        return await start(*command, **streams)
    warnings.filterwarnings("ignore", "This process.*is multi-threaded", DeprecationWarning)
    return await start(*command, preexec_fn=_be_the_engine, **streams)


def _be_the_engine() -> None:
    """In the child, where stdin, stdout and stderr are the engine's already; it does not return."""
    code: Any = 1
    try:
        os.closerange(3, min(os.sysconf("SC_OPEN_MAX"), 2**16))
        gc.disable()  # what is here is the parent's
        signal.set_wakeup_fd(-1)
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", buffering=1)  # noqa: SIM115
        FakeEngine().serve()
        code = 0
    except SystemExit as left:
        code = left.code or 0
    except BaseException:  # noqa: BLE001  # as Python does where nobody catches it
        traceback.print_exc()
    finally:
        os._exit(code)
