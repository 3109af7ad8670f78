"""``python -m kvchat.engine PID``: the engine's process, which ends with the process PID that starts it.

It is tied to that before anything else is imported, which takes a second where much else runs.
"""

from __future__ import annotations

import sys

from kvchat.process import die_with_parent, end, postpone_full_collections

if __name__ == "__main__":
    die_with_parent(*map(int, sys.argv[1:]))
    postpone_full_collections()
    from kvchat.engine.worker import main

    main()
    end()
