"""``python -m kvchat`` and the ``kvchat`` command."""

from __future__ import annotations

import os
import sys
import threading


def main() -> None:
    """Run the command line; Ctrl+C ends it silently, even while it is being imported."""
    _open_streams()
    if sys.platform == "win32":
        sys.exit("kvchat runs on Linux and macOS only; on Windows, run it in WSL2.")
    try:
        from kvchat.cli.main import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    try:
        run()
    except SystemExit as ended:
        if threading.active_count() == 1:  # no other thread is working
            from kvchat.process import end

            end(ended.code)
        raise


def _open_streams() -> None:
    """Open streams that are closed, as by ``2>&-``; else the next file opened gets the number and the output."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode, encoding="utf-8"))


if __name__ == "__main__":
    main()
