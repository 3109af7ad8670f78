"""kvchat: chat with local models whose KV manager switches live.

The Python API is ``kvchat.load``; torch and transformers are imported when it is first used. Unless torch is already
imported, its threads then wait as in the application (``process.spin_briefly``).
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvchat.engine.session import Session, load, open_session

__version__ = "0.1.0"
__all__ = ["Session", "__version__", "load", "open_session"]


def __getattr__(name: str) -> Any:
    if name in ("Session", "load", "open_session"):
        if "torch" not in sys.modules:  # torch reads the environment once
            from kvchat.paths import name_home
            from kvchat.process import spin_briefly

            spin_briefly()
            name_home()
        from kvchat.engine import session

        return getattr(session, name)
    raise AttributeError(f"module 'kvchat' has no attribute {name!r}")
