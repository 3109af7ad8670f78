"""``python -m kvchat`` and the ``kvchat`` command."""

from __future__ import annotations

from kvchat.cli.main import main

if __name__ == "__main__":
    main()
