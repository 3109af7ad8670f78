"""The mode's parameters, without torch: kvchat imports them whenever it starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field

from kvchat.config.modes import BudgetParameters


class StridedParameters(BudgetParameters):
    name: ClassVar[str] = "strided"
    title: ClassVar[str] = "a window, and before it one page of every few"
    implementation: ClassVar[str] = "kvchat_strided.mode:Strided"
    figures: ClassVar[Mapping[str, str]] = {"pages": "that a token reads in each KV head, beside sinks and window"}

    window: int = Field(128, ge=32)
    """most recent tokens, always attended"""
    stride: int = Field(2, ge=1)
    """of so many pages one is read; as many of the newest as the budget holds"""
