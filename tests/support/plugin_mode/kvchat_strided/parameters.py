"""The mode's parameters, without torch: kvchat imports them whenever it starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field

from kvchat.config.modes import BudgetParameters


class StridedParameters(BudgetParameters):
    name: ClassVar[str] = "strided"
    title: ClassVar[str] = "a recent window, and one of every few pages before it"
    implementation: ClassVar[str] = "kvchat_strided.mode:Strided"
    figures: ClassVar[Mapping[str, str]] = {"pages": "that a token reads in each KV head, beyond sinks and window"}

    window: int = Field(128, ge=32)
    """most recent tokens, always read"""
    stride: int = Field(2, ge=1)
    """read one page of every N, the newest first, as many as the budget allows"""
