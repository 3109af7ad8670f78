"""The four levels of entropy-guided recovery (ASR-KF-EGR, section 3.6), as a mode and the token loop name them."""

from __future__ import annotations

from typing import Literal

Level = Literal["SR", "WR", "FR", "RR"]
LEVELS: tuple[Level, ...] = ("SR", "WR", "FR", "RR")

WIDER: dict[Level, int] = {"WR": 2, "FR": 4}  # times the budget, for RECENT tokens, in modes that have one
RECENT = 64  # WR restores what was frozen in the last so many steps; FR freezes nothing for as many
