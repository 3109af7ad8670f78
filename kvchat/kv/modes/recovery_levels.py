"""The four levels of entropy-guided recovery (ASR-KF-EGR, section 3.6), as modes and the answer loop call them."""

from __future__ import annotations

from typing import Literal

Level = Literal["SR", "WR", "FR", "RR"]
LEVELS: tuple[Level, ...] = ("SR", "WR", "FR", "RR")

WIDER: dict[Level, int] = {"WR": 2, "FR": 4}  # factor on the budget for RECENT tokens, in modes with a budget
RECENT = 64  # WR restores tokens frozen in the last 64 steps; FR freezes nothing for 64 steps
