"""A KV mode of another package. Only parameters are here: kvchat imports them whenever it starts."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from kvchat.config.modes import ModeParameters


class RecencyParameters(ModeParameters):
    name: ClassVar[str] = "recency"
    title: ClassVar[str] = "sinks and the most recent tokens, nothing else"
    implementation: ClassVar[str] = "kvchat_recency.mode:Recency"

    keep: int = Field(256, ge=1)
    """most recent tokens, always attended"""
    sink: int = Field(4, ge=0)
    """first tokens, always attended"""
