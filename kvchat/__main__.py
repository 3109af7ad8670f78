"""``python -m kvchat`` and the ``kvchat`` command."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line; Ctrl+C while it is still being imported ends it in silence, as it does later."""
    try:
        from kvchat.cli.main import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
