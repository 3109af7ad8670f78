"""``python -m kvchat`` and the ``kvchat`` command."""

from __future__ import annotations

import os
import sys
import threading


def main() -> None:
    """Run the command line; Ctrl+C while it is still being imported ends it in silence, as it does later."""
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
        if threading.active_count() == 1:  # nobody is at work any more
            from kvchat.process import end

            end(ended.code)
        raise


def _open_streams() -> None:
    """Open what this was started without, as by ``2>&-``: else the next file gets its number, and what is printed."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode, encoding="utf-8"))


if __name__ == "__main__":
    main()
