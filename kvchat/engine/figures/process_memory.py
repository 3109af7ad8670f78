"""The memory of this process."""

from __future__ import annotations

import os
from pathlib import Path


def resident_bytes() -> int | None:
    """Bytes in RAM; None where the system does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None
