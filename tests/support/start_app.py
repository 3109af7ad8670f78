"""The application with a fake engine, as a program: ``start_app.py FOLDER ENGINE``, its files in FOLDER.

A third argument ``resume`` reopens the latest conversation.
"""

from __future__ import annotations

import fcntl
import sys
import termios
from contextlib import suppress
from pathlib import Path

from kvchat.tui.app import run
from kvchat.tui.state import AppConfig

FAKE_ENGINE = Path(__file__).with_name("fake_engine.py")
READY = " ready "  # on the terminal once the engine is


def command(folder: Path, engine: Path = FAKE_ENGINE) -> list[str]:
    """The command line that starts it."""
    return [sys.executable, __file__, str(folder), str(engine)]


if __name__ == "__main__":
    with suppress(OSError):  # a controlling terminal, as users have; tmux has set one already
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    folder = Path(sys.argv[1])
    sys.exit(
        run(
            AppConfig(
                log_file=folder / "log",
                history_file=folder / "history",
                database=folder / "chats.db",
                engine_command=(sys.executable, sys.argv[2]),
                resume="resume" in sys.argv[3:],
            )
        )
    )
