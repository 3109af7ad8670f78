"""The peak of this process's memory on the host while something runs."""

from __future__ import annotations

from pathlib import Path

OWN = Path("/proc/self")
FORGET_PEAK = "5"


def forget(process: Path = OWN) -> bool:
    """Let the peak begin with what is taken now; False where the system does not allow it."""
    try:
        (process / "clear_refs").write_text(FORGET_PEAK)
    except OSError:
        return False
    return True


def read(process: Path = OWN) -> int | None:
    """Bytes in RAM at the peak; None where the system does not tell."""
    try:
        lines = (process / "status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    except (OSError, ValueError, IndexError, StopIteration):
        return None
