"""The registry of KV modes: names, parameters, implementations. Without torch.

One parameter class a mode; a field's docstring is its description everywhere (``kvchat modes``, the palette, errors).
Other packages add modes through the entry-point group ``kvchat.modes``: the entry point's value is a parameter class,
which has to import quickly; its ``implementation`` is imported when the mode is entered. A package whose mode cannot be
used is listed in ``problems()`` and changes nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from kvchat.config.validation_errors import validated
from kvchat.errors import TooMuchPinnedError, UsageError, check_known

Params = dict[str, Any]
MIN_BUDGET = 64
MAX_COUNT = 10**12  # of tokens or steps: more than any conversation has, and sums of several fit 64 bits
# These mean the same in every mode that does not list them in ``own``; tau, k, sink and window of different modes are
# unrelated.
SHARED = frozenset({"budget", "pin_system", "draft"})
GROUP = "kvchat.modes"
SHARE = 2  # at most one part in so many of the model's context may be pinned
PAGE_FIGURES = {
    "pages per head": "pages of 32 tokens that each KV head chooses, besides those it always reads",
    "candidate pages": "stored pages that it chooses from",
}
OBSERVED_FIGURES = {
    "observed": "last tokens of the prompt: their queries chose what is kept",
    "dropped": "prompt tokens not read until the next prompt, on average over the layers",
}


class ModeParameters(BaseModel):
    """Base of all: frozen, unknown names refused.

    - ``implementation``: ``package.module:Class`` of the mode itself.
    - ``figures``: the meaning of each figure that the mode reports, by its label; shown in help and panels.
    - ``tradeoff``: what is lost compared with full mode; shown where the mode is proposed.
    - ``for_comparison``: the mode is entered only by its name; F6 skips it and nothing proposes it.
    - ``own``: shared parameters that apply here only if set for this mode, and what each costs; said when one is set.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False, use_attribute_docstrings=True)

    name: ClassVar[str]
    title: ClassVar[str]
    implementation: ClassVar[str]
    figures: ClassVar[Mapping[str, str]] = {}
    tradeoff: ClassVar[str] = ""
    for_comparison: ClassVar[bool] = False
    own: ClassVar[Mapping[str, str]] = {}

    @property
    def implemented_by(self) -> str:
        """The implementation that these values select."""
        return self.implementation

    recovery: bool = False
    """if the text goes wrong (entropy), bring tokens back; as a last resort undo some words"""
    pin_system: bool = False
    """attend to the whole system prompt at every token, beyond the budget"""

    @field_validator("*", mode="before")
    @classmethod
    def _left_to_kvchat(cls, value: Any, info: ValidationInfo) -> Any:
        """Read the word ``auto`` as None for parameters that kvchat may choose."""
        is_optional = info.field_name is not None and cls.model_fields[info.field_name].default is None
        return None if is_optional and value == "auto" else value

    @field_validator("*")
    @classmethod
    def _can_be_counted(cls, value: Any) -> Any:
        if isinstance(value, int) and value > MAX_COUNT:
            raise ValueError(f"it must be at most {MAX_COUNT:,}")
        return value


class FullParameters(ModeParameters):
    name: ClassVar[str] = "full"
    title: ClassVar[str] = "reads everything"
    implementation: ClassVar[str] = "kvchat.kv.modes.full:Full"
    figures: ClassVar[Mapping[str, str]] = {
        "streamed from RAM": "tokens without a slot on the GPU, which it reads from RAM",
        "attended on the CPU": "tokens in RAM that the CPU attends to, in parallel with the GPU",
        "drafts accepted": "with draft: share of drafted tokens that the answer kept",
        "tokens a round": "with draft: tokens gained by one verification, its own included",
    }

    resident: int | None = Field(None, ge=MIN_BUDGET)
    """most recent tokens kept on a GPU; the rest is streamed from RAM (auto: all, or what fits; none on a CPU)"""
    cpu: float | None = Field(None, ge=0, le=1)
    """share of the tokens in RAM that the CPU attends to (auto: by measured speed; none of float16 and 8-bit pages)"""
    draft: Literal["off", "auto", "lookup", "window"] = "off"
    """guess several tokens and verify them at once: lookup finds repeated text, window drafts from recent tokens"""


class PaperParameters(ModeParameters):
    """Modes of a paper: ``profile="paper"`` makes the ``published`` values the defaults.

    ``unless`` maps a parameter to another that determines it: if that one is given, the published value is not used.
    """

    published: ClassVar[Mapping[str, Any]]
    unless: ClassVar[Mapping[str, str]] = {}

    profile: Literal["default", "paper"] = "default"
    """paper: use the values of the mode's paper by default"""

    @model_validator(mode="before")
    @classmethod
    def _as_published(cls, given: Any) -> Any:
        if not isinstance(given, dict) or given.get("profile") != "paper":
            return given
        chosen = {name for name, value in given.items() if value not in (None, "auto")}
        values = {name: value for name, value in cls.published.items() if cls.unless.get(name) not in chosen}
        return {**values, **given}


class BudgetParameters(ModeParameters):
    """Modes that attend to a fixed number of tokens."""

    budget: int | None = Field(None, ge=MIN_BUDGET)
    """tokens per KV head a decoded token may attend to, sinks and window included (auto: context/32, 256 to 2048)"""


class StreamingParameters(BudgetParameters, PaperParameters):
    name: ClassVar[str] = "streaming"
    title: ClassVar[str] = (
        "reads the first and the most recent tokens, forgets the middle (StreamingLLM with Lazy Pruning)"
    )
    implementation: ClassVar[str] = "kvchat.kv.modes.streaming:Streaming"
    published: ClassVar[Mapping[str, Any]] = {"budget": 2048, "sink": 4, "B": 0, "R": 32, "sigma": 16, "delta": 32}
    unless: ClassVar[Mapping[str, str]] = {"budget": "window"}
    figures: ClassVar[Mapping[str, str]] = {
        "cached": "tokens kept: the sinks, and whatever no prune has dropped yet",
        "dropped": "tokens between the sinks and those kept: not readable here, but stored for other modes",
    }
    tradeoff: ClassVar[str] = "everything between the first tokens and the window"

    budget: int | None = Field(None, ge=MIN_BUDGET)
    """C, sinks, window and B: a decoded token attends to C to C + R tokens (auto: context/32, 256 to 2048)"""
    sink: int | None = Field(None, ge=0)
    """S, first tokens, always attended (auto: the system prompt up to a quarter of the budget, at least 4)"""
    window: int | None = Field(None, ge=1)
    """W, most recent tokens that a prune keeps; sets the budget to sink + window + B (auto: from the budget)"""
    B: int = Field(0, ge=0)
    """non-core tokens: older recent ones, kept in addition to the window"""
    R: int = Field(64, ge=0)
    """Lazy Pruning: prune when the cache exceeds the budget by R tokens; 0 never prunes"""
    sigma: int = Field(64, ge=0)
    """Slack: tokens allowed over the budget after a prune"""
    delta: int = Field(16, ge=0)
    """Max_Drop: maximum tokens dropped by one prune, unless sigma requires more; 0 drops the whole overflow"""


class SpeculativeParameters(BudgetParameters, PaperParameters):
    name: ClassVar[str] = "speculative"
    title: ClassVar[str] = (
        "reads the tokens that matter, found by a two-bit copy of their keys; fetches them one layer ahead on a GPU"
    )
    implementation: ClassVar[str] = "kvchat.kv.modes.speculative:Speculative"
    published: ClassVar[Mapping[str, Any]] = {
        "budget": 2048,
        "tau": 0.9,
        "first_full": True,
        "index": "bounds",
        "unit": "page",
        "query": "last",
    }
    figures: ClassVar[Mapping[str, str]] = {
        "tokens per head": "tokens that each KV head chooses per token, besides sinks and window",
        "candidate tokens": "stored tokens that it chooses from",
        "index": "bytes of the low-bit keys on the device that tokens are chosen by",
        "measured on": "the text that the budget was measured on",
        "expected to cover": "share of full attention that the budget covered there",
        "pages per head": "with unit=page: pages of 32 tokens that each KV head chooses, besides sinks and window",
        "candidate pages": "with unit=page: stored pages that it chooses from",
        "heads corrected": "with unit=page: share of KV heads whose choice was replaced before attention, since the"
        " mode was entered",
        "mean C": "with unit=page: cosine between a head's query and its last one, on average since the mode was"
        " entered: 1 is no change; below tau the head is corrected",
    }
    tradeoff: ClassVar[str] = "reading everything for every token: speculative chooses what to read"

    budget: int | None = Field(None, ge=MIN_BUDGET)
    """tokens per KV head a token may read, sinks and window included (auto: measured, 256 to 2048; pages context/32)"""
    index: Literal["bounds", "blocks", "bits2", "bits4"] | None = None
    """choose by keys in 2 or 4 bits (auto: 2, or as calibrated), or pages by bounds of all keys or of 8 (FreeKV)"""
    unit: Literal["token", "page"] = "token"
    """choose single tokens, or pages of 32 (FreeKV)"""
    query: Literal["own", "ahead", "last"] | None = None
    """whose query chooses: the token's own, one estimated a layer ahead, the last token's (auto: ahead on a GPU)"""
    sink: int | None = Field(None, ge=0)
    """S, first tokens, always attended (auto: 4; profile=paper: a quarter of the budget)"""
    window: int | None = Field(None, ge=1)
    """W, most recent tokens, always attended (auto: 32 with query=own, else a quarter of the budget)"""
    tau: float | None = Field(None, allow_inf_nan=False)
    """with unit=page, query=last: correct a head if its query's cosine to its last is below tau (auto: 0.8)"""
    first_full: bool = True
    """keep and attend to all tokens in the first layer"""
    rest: Literal["mean", "none"] = "mean"
    """stand-in for unread tokens: their pages' mean values, weighted by the index, or none (unit=page: none)"""

    @model_validator(mode="before")
    @classmethod
    def _as_freekv(cls, given: Any) -> Any:
        """Let parameters that only FreeKV has select it: ``tau`` or an index of bounds."""
        if not isinstance(given, dict):
            return given
        asked = {name for name, value in given.items() if value not in (None, "auto")}
        if "tau" in asked and not asked & {"index", "unit", "query"}:
            return {**given, "index": "bounds", "unit": "page", "query": "last"}
        if given.get("index") in ("bounds", "blocks") and "unit" not in asked:
            return {**given, "unit": "page"}
        return given

    def of_pages(self, **changes: Any) -> SpeculativeParameters:
        """FreeKV's parameters with the same budget, sinks and window, and with ``changes``."""
        return self.model_copy(update={"index": "bounds", "unit": "page", "query": "last", **changes})

    @property
    def implemented_by(self) -> str:
        return "kvchat.kv.modes.freekv:FreeKV" if self.unit == "page" else self.implementation


class FreezeParameters(PaperParameters):
    name: ClassVar[str] = "freeze"
    title: ClassVar[str] = "drops irrelevant tokens for longer and longer, then brings them back (ASR-KF-EGR)"
    implementation: ClassVar[str] = "kvchat.kv.modes.freeze:Freeze"
    published: ClassVar[Mapping[str, Any]] = {"score": "always", "tau": 0.5, "k": 2.0, "K": 32, "recovery": False}
    figures: ClassVar[Mapping[str, str]] = {
        "frozen now": "tokens off the device until their timers run out, the same in all layers and heads",
        "mean timer": "steps a frozen token still waits, on average",
        "restored per step": "tokens brought back per step, on average since the mode was entered",
    }
    own: ClassVar[Mapping[str, str]] = {
        "budget": "with a budget freeze forgets: tokens beyond it stay frozen even when the model looks for them, and"
        " facts told earlier are lost; budget=auto lifts the limit"
    }

    recovery: bool = True
    """if the text goes wrong (entropy), bring tokens back; as a last resort undo some words"""
    profile: Literal["default", "paper"] = "default"
    """paper: as published; every token outside the window is flagged, none is protected or recalled, no recovery"""
    score: Literal["prob_rel", "raw", "always"] = "prob_rel"
    """relevance score: attention relative to uniform, mean over heads; |q·k| (the paper's Eq. 2); always flag"""
    tau: float = Field(0.5, allow_inf_nan=False)
    """flag a token as irrelevant when it scores below tau; 0 flags none"""
    k: float = Field(2.0, ge=1e-4)
    """softness: the c-th flag freezes a token for floor(sqrt(c) / k) steps"""
    K: int = Field(32, ge=1)
    """sliding window: most recent tokens, never frozen"""
    floor: int | None = Field(None, ge=0)
    """minimum tokens to read: nothing freezes below, above the least relevant first (auto: 400; profile=paper: 0)"""
    budget: int | None = Field(None, ge=MIN_BUDGET)
    """tokens a decoded token may attend to: all others are forgotten; not shared with other modes (auto: no limit)"""


class SyncParameters(BudgetParameters, PaperParameters):
    name: ClassVar[str] = "sync"
    title: ClassVar[str] = "a few heads read everything and choose what the other heads read (SyncKV)"
    implementation: ClassVar[str] = "kvchat.kv.modes.sync:Sync"
    published: ClassVar[Mapping[str, Any]] = {"mem": 0.5, "representatives": "centroid", "rho": 0.5, "m": 5}
    unless: ClassVar[Mapping[str, str]] = {"mem": "budget"}
    figures: ClassVar[Mapping[str, str]] = {
        "representative heads": "KV heads that see everything and choose for the others, layer by layer",
        "measured on": "the text that they were found on",
        "k": "tokens that a following head reads because its representative chose them",
        "recent": "most recent tokens, which every following head also reads",
        "of full's memory": "K/V on the device, as a share of what full mode holds there",
        "anticipation steps": "steps that renewed the choice for the next steps, since the mode was entered",
        "set overlap": "share of the choice that was also in the previous choice",
    }

    budget: int | None = Field(None, ge=MIN_BUDGET)
    """tokens a following head may attend to, the most recent included (auto: from mem, at least 64 beside those)"""
    mem: float | None = Field(None, gt=0, le=1)
    """fraction of full mode's device K/V to use, unless budget is set (auto: 0.5, more if one head of two leads)"""
    clusters: int | None = Field(None, ge=1)
    """N_r: representative heads per layer (auto: from the calibration)"""
    representatives: Literal["retrieval", "centroid"] = "retrieval"
    """representative of a cluster: its best retrieval head, or the head nearest to the centroid (paper)"""
    rho: float = Field(0.5, ge=0, le=1)
    """fraction of the selected tokens that is static: selected once per turn, at the end of the prompt"""
    m: int = Field(5, ge=1)
    """steps between two selections of the dynamic tokens"""
    offload: bool = True
    """false keeps all K/V on the device, in as much memory as full mode, and only masks it"""


class ComparedParameters(BudgetParameters):
    """Methods of other papers with a budget."""

    for_comparison: ClassVar[bool] = True


class QuestParameters(ComparedParameters):
    name: ClassVar[str] = "quest"
    title: ClassVar[str] = "pages by bounds on their keys, chosen by each token's own query (Quest)"
    implementation: ClassVar[str] = "kvchat.kv.modes.comparison.quest:Quest"
    figures: ClassVar[Mapping[str, str]] = PAGE_FIGURES

    whole_layers: int = Field(2, ge=0)
    """first layers that read everything"""


class ArkValeParameters(ComparedParameters):
    name: ClassVar[str] = "arkvale"
    title: ClassVar[str] = "pages by boxes around their keys, one set for a layer, evicted worst first (ArkVale)"
    implementation: ClassVar[str] = "kvchat.kv.modes.comparison.arkvale:ArkVale"
    figures: ClassVar[Mapping[str, str]] = PAGE_FIGURES


class ShadowKVParameters(ComparedParameters):
    name: ClassVar[str] = "shadowkv"
    title: ClassVar[str] = "pages by their mean keys, plus outliers (ShadowKV without its compressed keys)"
    implementation: ClassVar[str] = "kvchat.kv.modes.comparison.shadowkv:ShadowKV"
    figures: ClassVar[Mapping[str, str]] = PAGE_FIGURES


class RaaSParameters(ModeParameters):
    name: ClassVar[str] = "raas"
    title: ClassVar[str] = "the prompt, and the pages of the answer that mattered last (RaaS)"
    implementation: ClassVar[str] = "kvchat.kv.modes.comparison.raas:RaaS"
    for_comparison: ClassVar[bool] = True
    figures: ClassVar[Mapping[str, str]] = {
        "answer pages": "pages of 32 tokens decoded since the prompt that a token reads besides the prompt",
        "dropped pages": "pages no longer read until the next prompt",
    }
    own: ClassVar[Mapping[str, str]] = {
        "budget": "here the budget covers only the answer; the whole prompt is read as well"
    }

    budget: int = Field(1024, ge=MIN_BUDGET)
    """decoded tokens that a token attends to, in whole pages, besides the prompt; not shared with other modes"""


class RazorParameters(ComparedParameters):
    name: ClassVar[str] = "razor"
    title: ClassVar[str] = "retrieval heads read everything, others sinks and a window (RazorAttention)"
    implementation: ClassVar[str] = "kvchat.kv.modes.comparison.razor:Razor"
    figures: ClassVar[Mapping[str, str]] = {
        "retrieval heads": "KV heads that read everything",
        "recent": "most recent tokens that each other head reads, besides the first 4",
    }

    budget: int | None = Field(None, ge=MIN_BUDGET)
    """tokens that each other head attends to, or a fifth of a longer prompt (auto: context/32)"""
    share: float = Field(0.15, gt=0, le=1)
    """share of KV heads that read everything"""


class SnapKVParameters(ComparedParameters):
    name: ClassVar[str] = "snapkv"
    title: ClassVar[str] = "what a prompt's last tokens attend to, chosen once a prompt (SnapKV)"
    implementation: ClassVar[str] = "kvchat.kv.modes.comparison.snapkv:SnapKV"
    figures: ClassVar[Mapping[str, str]] = OBSERVED_FIGURES

    budget: int | None = Field(None, ge=MIN_BUDGET)
    """tokens of the prompt that a KV head keeps, the window included; answers are kept (auto: context/32)"""
    window: int = Field(32, ge=1, le=32)
    """w, last tokens of a prompt, which choose and are kept"""


class PyramidKVParameters(SnapKVParameters):
    name: ClassVar[str] = "pyramidkv"
    title: ClassVar[str] = "SnapKV with less from layer to layer (PyramidKV)"
    implementation: ClassVar[str] = "kvchat.kv.modes.comparison.pyramidkv:PyramidKV"

    beta: int = Field(20, ge=1)
    """the last layer keeps 1/beta of the average and the first makes up for it; 1 keeps all the same"""


class CakeParameters(SnapKVParameters):
    name: ClassVar[str] = "cake"
    title: ClassVar[str] = "SnapKV with a budget for each layer by how its attention spreads and moves (CAKE)"
    implementation: ClassVar[str] = "kvchat.kv.modes.comparison.cake:Cake"

    tau1: float = Field(1.0, ge=0.1, allow_inf_nan=False)
    """the larger, the less a layer's spread of attention counts for its budget"""
    tau2: float = Field(1.0, ge=0.1, allow_inf_nan=False)
    """the larger, the less it counts that attention moves from query to query"""
    gamma: float = Field(200.0, ge=0, allow_inf_nan=False)
    """how much the variance of a token's weights counts relative to their mean"""


class H2OParameters(ComparedParameters):
    name: ClassVar[str] = "h2o"
    title: ClassVar[str] = "tokens that got the most attention so far, and recent ones (H2O)"
    implementation: ClassVar[str] = "kvchat.kv.modes.comparison.h2o:H2O"
    figures: ClassVar[Mapping[str, str]] = OBSERVED_FIGURES


class AutoParameters(ModeParameters):
    """Not a mode: entering it lets ``kvchat.kv.auto`` choose one."""

    name: ClassVar[str] = "auto"
    title: ClassVar[str] = "chooses the mode for you: the most faithful one that is fast enough"
    implementation: ClassVar[str] = ""

    tokens_per_s: float = Field(10.0, ge=0.1, le=1000, allow_inf_nan=False)
    """the speed to reach; kvchat takes the most faithful mode that reaches it, never streaming"""
    budget: int | None = Field(None, ge=MIN_BUDGET)
    """maximum tokens per KV head that a token may read when not reading everything (auto: half of the context)"""


BUILT_IN: tuple[type[ModeParameters], ...] = (
    FullParameters,
    FreezeParameters,
    StreamingParameters,
    SyncParameters,
    SpeculativeParameters,
    QuestParameters,
    ArkValeParameters,
    ShadowKVParameters,
    RaaSParameters,
    RazorParameters,
    SnapKVParameters,
    PyramidKVParameters,
    CakeParameters,
    H2OParameters,
)
# Modes by their role; no package above this one names a mode.
REFERENCE = FullParameters.name  # reads everything; others are compared with it
COMPARED = SpeculativeParameters.name  # compared with the reference unless another is named
HOLDS_LEAST = StreamingParameters.name
AUTO = AutoParameters.name
ENTERED_BY_AUTO = (REFERENCE, COMPARED, SyncParameters.name)


def registered() -> Mapping[str, type[ModeParameters]]:
    """Every mode's parameter class by name: built-in modes, those for comparison last, then installed ones."""
    return _registry()[0]


def choosable() -> Mapping[str, type[ModeParameters]]:
    """All that can be entered by name: auto, and every mode."""
    return {AUTO: AutoParameters, **registered()}


def problems() -> tuple[str, ...]:
    """One sentence for each installed mode that cannot be used."""
    return _registry()[1]


def mode_names() -> list[str]:
    """Names of the modes that kvchat offers, in the order F6 visits them: all but those for comparison."""
    return [name for name, cls in registered().items() if not cls.for_comparison]


def grouped() -> dict[str, list[type[ModeParameters]]]:
    """``choosable`` by the title of its group in lists; the title of what kvchat itself offers is empty."""
    offered, compared = (
        [cls for cls in choosable().values() if cls.for_comparison is is_compared] for is_compared in (False, True)
    )
    return {"": offered, "for comparison": compared}


def next_mode(mode: str, step: int = 1) -> str:
    """The mode that F6 enters ``step`` modes after ``mode``; the first, if F6 does not visit ``mode``."""
    names = mode_names()
    return names[(names.index(mode) + step) % len(names)] if mode in names else names[0]


def having(parameter: str) -> list[str]:
    return [name for name, cls in choosable().items() if parameter in cls.model_fields]


def shared_by(mode: str) -> frozenset[str]:
    return SHARED - registered()[mode].own.keys() if mode in registered() else SHARED


def accepting(parameter: str, value: Any) -> list[str]:
    """The modes that have a parameter and accept the value; its range may differ between modes."""

    def accepts(mode: str) -> bool:
        try:
            return bool(parse(mode, {parameter: value}))
        except UsageError:
            return False

    return [name for name in having(parameter) if accepts(name)]


def by_mode(mode: str, changes: Params) -> dict[str, Params]:
    """``changes`` by mode: those for auto may include changes for other modes, under the names of these."""
    nested = {name: changes[name] for name in registered() if mode == AUTO and name in changes}
    return {**nested, mode: {name: value for name, value in changes.items() if name not in nested}}


def together(mode: str, *parts: Params) -> Params:
    """Merge changes for ``mode`` of the form that ``by_mode`` reads; later ones override earlier ones."""
    found: dict[str, Params] = {mode: {}}
    for part in parts:
        for name, params in by_mode(mode, part).items():
            found.setdefault(name, {}).update(params)
    own = found.pop(mode)
    return {**own, **{name: params for name, params in found.items() if params}}


def remember(given: dict[str, Params], mode: str, changes: Params) -> None:
    """Add run-time ``changes`` of ``mode`` to ``given``; a shared value replaces those of other modes that share it."""
    for other, params in given.items():
        for name in shared_by(mode) & shared_by(other) & changes.keys():
            params.pop(name, None)
    given.setdefault(mode, {}).update(changes)


def overrides_for(given: Mapping[str, Params], mode: str) -> tuple[Params, Params]:
    """The values given at run time that apply in ``mode``: shared ones, and its own."""
    shared = {
        name: value
        for other, params in given.items()
        for name, value in params.items()
        if name in shared_by(mode) & shared_by(other)
    }
    own = {name: value for name, value in given.get(mode, {}).items() if name not in shared_by(mode)}
    return shared, own


def parse(mode: str, params: Params) -> ModeParameters:
    """The parameters of ``mode``, or of auto, with the given values and defaults for the rest.

    Raises:
        UsageError: an unknown mode, an unknown parameter or a value out of range.
    """
    check_known(mode, choosable(), "KV mode")
    return validated(choosable()[mode], params, mode)


def effective_params(
    mode: str, settings: Mapping[str, Params], given: Mapping[str, Params], changes: Params | None = None
) -> ModeParameters:
    """The parameters of ``mode``: its settings, overridden by values given at run time, then by ``changes``.

    Raises:
        UsageError: as ``parse``; a shared value that the mode does not have is no error.
    """
    return parse(mode, {**asked_for(mode, settings, given), **(changes or {})})


def asked_for(mode: str, settings: Mapping[str, Params], given: Mapping[str, Params]) -> Params:
    """The values set for ``mode``: its settings, overridden by values given at run time; kvchat chooses the rest."""
    shared, own = overrides_for(given, mode)
    known = choosable()[mode].model_fields if mode in choosable() else {}
    shared = {name: value for name, value in shared.items() if name in known}
    return {**settings.get(mode, {}), **shared, **own}


def to_keep(mode: str, settings: Mapping[str, Params], given: Mapping[str, Params]) -> Params:
    """``asked_for`` as a conversation or a preset saves it: for auto also, under their names, the modes it enters."""
    own = asked_for(mode, settings, given)
    entered = {name: asked_for(name, settings, given) for name in ENTERED_BY_AUTO if mode == AUTO}
    return own | {
        name: more for name, params in entered.items() if (more := {n: params[n] for n in params if n not in own})
    }


@cache
def _registry() -> tuple[dict[str, type[ModeParameters]], tuple[str, ...]]:
    """All parameter classes by name, and a sentence for each entry point that is ignored."""
    classes = {cls.name: cls for cls in BUILT_IN}
    problems = []
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: (entry.name, entry.value)):
        try:
            cls = entry.load()
            _check(cls)
            if cls.name in (*classes, AUTO):
                raise ValueError(f'there is already a mode "{cls.name}"')
            classes[cls.name] = cls
        except Exception as error:  # noqa: BLE001  # another package's code may raise anything
            detail = str(error).partition("\n")[0] or type(error).__name__
            package = f"{entry.dist.name} {entry.dist.version}" if entry.dist else "an unknown package"
            problems.append(f'The mode "{entry.name}" of {package} is ignored: {detail}.')
    return classes, tuple(problems)


def _check(cls: Any) -> None:
    """Check that the value of an entry point is the parameter class of a mode.

    Raises:
        ValueError: it is not, or lacks a name, a title, an implementation or a default.
    """
    if not (isinstance(cls, type) and issubclass(cls, ModeParameters)):
        raise ValueError(f"its value is not a subclass of {__name__}.{ModeParameters.__name__}")
    for attribute in ("name", "title", "implementation"):
        if not isinstance(getattr(cls, attribute, None), str):
            raise ValueError(f"{cls.__name__} has no {attribute}")
    if not re.fullmatch(r"[a-z][a-z0-9_]*", cls.name) or hasattr(BaseModel, cls.name) or cls.name in ("mode", "params"):
        raise ValueError(f'"{cls.name}" is not a valid name for a mode: use lower-case letters, digits and _')
    if not re.fullmatch(r"[\w.]+:\w+", cls.implementation):
        raise ValueError(f'its implementation "{cls.implementation}" is not package.module:Class')
    missing = [name for name, field in cls.model_fields.items() if field.is_required()]
    if missing:
        raise ValueError(f"its parameter {missing[0]} has no default")
    cls()  # a validator of its own may refuse the defaults


def refuse_too_much(model: str, context: int, messages: int, system: int = 0) -> None:
    """Refuse to pin so many tokens of ``messages`` and of the ``system`` prompt together.

    Raises:
        TooMuchPinnedError: they leave the model too little of its context for the rest.
    """
    if messages + system <= context // SHARE:
        return
    parts = (("the system prompt", system), ("the pinned messages", messages))
    pinned = " and ".join(f"{name} {tokens:,}" for name, tokens in parts if tokens)
    raise TooMuchPinnedError(
        "Too much is pinned.",
        f"Tokens: {pinned}. Of the {context:,} that {model} can read at once, at most {context // SHARE:,} may be "
        "pinned, to leave room for the mode.",
        "Pin less: /pin unpins a pinned message, /pin system the system prompt, /pin none everything.",
    )
