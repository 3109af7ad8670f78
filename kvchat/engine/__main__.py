"""``python -m kvchat.engine PID``: the engine process, which ends with the process PID that started it.

That is arranged before the other imports, which take a second on a busy machine.
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
