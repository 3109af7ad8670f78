"""The KV modes' names and parameters: a leaf without torch, read by the command line, the application and the modes.

One class a mode; a field's docstring is its description everywhere (``kvchat modes``, the palette, errors).
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvchat.errors import UsageError, did_you_mean
from kvchat.protocol.messages import ModeInfo, ParamInfo, Params

MIN_BUDGET = 64


class ModeParameters(BaseModel):
    """Base of all: frozen, unknown names refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False, use_attribute_docstrings=True)

    name: ClassVar[str]
    title: ClassVar[str]
    available: ClassVar[bool] = True

    recovery: bool = False
    """watch the entropy of what is generated; restore tokens, at last withdraw some, when it goes wrong"""


class FullParameters(ModeParameters):
    name: ClassVar[str] = "full"
    title: ClassVar[str] = "everything resident, everything attended"


class BudgetParameters(ModeParameters):
    """Modes that attend to a fixed number of tokens."""

    budget: int | None = Field(None, ge=MIN_BUDGET)
    """tokens per KV head a decoded token may attend to, sinks and window included (auto: context/32, 256 to 2048)"""
    sink: int | None = Field(None, ge=0)
    """first tokens, always attended (auto: by the mode)"""
    window: int | None = Field(None, ge=1)
    """most recent tokens, always attended (auto: by the mode)"""


class StreamingParameters(BudgetParameters):
    name: ClassVar[str] = "streaming"
    title: ClassVar[str] = "sinks and a recent window (StreamingLLM with Lazy Pruning, Slack, Max_Drop)"

    R: int = Field(64, ge=0)
    """Lazy Pruning: prune only when R tokens are over the budget, which are read until then; 0 never prunes"""
    sigma: int = Field(64, ge=0)
    """Slack: tokens that may stay over the budget after a prune"""
    delta: int = Field(16, ge=0)
    """Max_Drop: tokens dropped by one prune at most, as far as sigma allows; 0 drops all of the overflow"""


class SpeculativeParameters(BudgetParameters):
    name: ClassVar[str] = "speculative"
    title: ClassVar[str] = "pages retrieved one step ahead, corrected per head (FreeKV)"

    tau: float = Field(0.8, allow_inf_nan=False)
    """correct a head when its query's cosine to the last one is below tau; > 1 always (synchronous), < -1 never"""
    first_full: bool = True
    """the first layer keeps and attends to everything"""


class FreezeParameters(ModeParameters):
    name: ClassVar[str] = "freeze"
    title: ClassVar[str] = "irrelevant tokens leave for growing times and return (ASR-KF-EGR)"

    recovery: bool = True
    """watch the entropy of what is generated; restore tokens, at last withdraw some, when it goes wrong"""
    profile: Literal["default", "paper"] = "default"
    """paper: the published program; every token outside the window is flagged, nothing is protected or capped"""
    score: Literal["prob_max", "prob_rel", "raw", "scaled", "always"] = "prob_rel"
    """relevance: attention in shares of an equal one, of the keenest head or the mean; |q·k|, raw or scaled; or none"""
    smooth: float = Field(0.0, ge=0, lt=1)
    """share of a token's earlier score in its score"""
    tau: float = Field(0.5, allow_inf_nan=False)
    """a token that scores below tau is flagged as irrelevant; 0 flags none"""
    k: float = Field(2.0, gt=0)
    """softness: the c-th flag freezes a token for floor(sqrt(c) / k) steps"""
    window: int = Field(32, ge=1)
    """most recent tokens, never frozen"""
    sink: int = Field(4, ge=0)
    """first tokens, never frozen"""
    protect: bool = True
    """never freeze the chat's control tokens"""
    history: int = Field(256, ge=0)
    """flags of a token that count at most; 0 for all"""
    stagger: int = Field(64, ge=1)
    """spread the first freezes over so many steps"""
    same_step: bool = False
    """timers fall in the very step they are set in"""
    moves: int = Field(256, ge=1)
    """tokens that return in one step at most"""
    min_active: int = Field(320, ge=0)
    """freeze only while more tokens than this are active"""
    max_active: int | None = Field(None, ge=MIN_BUDGET)
    """freeze the least relevant while more tokens than this are active"""
    wake: bool = True
    """a new turn wakes all tokens; else those that its last token finds relevant"""
    per_layer: bool = False
    """each layer freezes tokens of its own, instead of all layers the same"""


class SyncParameters(ModeParameters):
    name: ClassVar[str] = "sync"
    title: ClassVar[str] = "representative heads see everything and choose for the others (SyncKV)"

    mem: float = Field(0.5, gt=0, le=1)
    """share of full's K/V on the device; says how much to keep where neither keep nor budget does"""
    budget: int | None = Field(None, ge=MIN_BUDGET)
    """tokens a following head may attend to, recent ones included; says how much to keep where keep does not"""
    keep: int | None = Field(None, ge=MIN_BUDGET)
    """k: static and dynamic tokens of a following head (auto: from budget or mem, at least 64)"""
    clusters: int | None = Field(None, ge=1)
    """representative heads a layer (auto: by the calibration)"""
    representatives: Literal["retrieval", "centroid"] = "retrieval"
    """who represents a cluster: its best retriever, or the head nearest to the centroid (the paper)"""
    rho: float = Field(0.5, ge=0, le=1)
    """share of k that is static: chosen at the end of the prompt, for the whole turn"""
    m: int = Field(5, ge=1)
    """every m-th step chooses anew"""
    window: int = Field(128, ge=1)
    """most recent tokens, always attended (less by itself where a budget is smaller than twice as much)"""
    staggered: bool = False
    """layers choose at different steps"""
    offload: bool = True
    """false keeps everything on the device and only masks it"""


PARAMETERS: dict[str, type[ModeParameters]] = {
    cls.name: cls
    for cls in (FullParameters, FreezeParameters, StreamingParameters, SyncParameters, SpeculativeParameters)
}


def available_modes() -> list[str]:
    """Names of the modes that can be entered, in the order F6 visits them."""
    return [name for name, cls in PARAMETERS.items() if cls.available]


def parse(mode: str, params: Params) -> ModeParameters:
    """The parameters of ``mode`` with the given values and defaults for the rest.

    Raises:
        UsageError: an unknown or not yet available mode, an unknown parameter or a value out of range.
    """
    if mode not in PARAMETERS:
        raise UsageError(f'There is no KV mode "{mode}".', did_you_mean(mode, PARAMETERS))
    cls = PARAMETERS[mode]
    if not cls.available:
        raise UsageError(f"The {mode} mode is not available yet.", f"Available: {', '.join(available_modes())}.")
    try:
        return cls.model_validate(params)
    except ValidationError as error:
        raise UsageError(*_explain(cls, error.errors()[0])) from None


def merge(kept: Params, mode: str, changes: Params) -> ModeParameters:
    """The parameters after a live switch: of the values ``kept`` those that the mode has, and ``changes`` over them.

    Raises:
        UsageError: as ``parse``; a kept value the mode does not have is no error.
    """
    known = PARAMETERS[mode].model_fields if mode in PARAMETERS else {}
    return parse(mode, {**{name: value for name, value in kept.items() if name in known}, **changes})


def mode_infos() -> tuple[ModeInfo, ...]:
    """All modes with their parameters, for lists and menus."""
    return tuple(
        ModeInfo(
            name,
            cls.title,
            cls.available,
            tuple(ParamInfo(key, f.default, f.description or "") for key, f in cls.model_fields.items()),
        )
        for name, cls in PARAMETERS.items()
    )


def _explain(cls: type[ModeParameters], first: Any) -> tuple[str, str]:
    key = ".".join(str(part) for part in first["loc"]) or "parameters"
    if first["type"] == "extra_forbidden":
        known = did_you_mean(key, cls.model_fields) if cls.model_fields else "It has no parameters."
        return f'The {cls.name} mode has no parameter "{key}".', known
    return f"{cls.name}: {key} = {first['input']!r} is refused.", f"{first['msg']}."
