"""The registry of KV modes: names, parameters and implementations; imports no torch.

Each mode has a parameter class. A field's docstring is its help text everywhere (``kvchat modes``, the palette,
errors). Other packages add modes through the entry-point group ``kvchat.modes``: an entry point's value is a parameter
class, which must import quickly; its ``implementation`` is imported when the mode is entered. Packages whose mode
cannot be used are listed in ``problems()`` and have no other effect.
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
MAX_COUNT = 10**12  # maximum number of tokens or steps: exceeds any conversation, and sums of several fit in 64 bits
# Parameters with the same meaning in every mode that does not list them in ``own``; tau, k, sink and window of
# different modes are unrelated.
SHARED = frozenset({"budget", "pin_system", "draft"})
GROUP = "kvchat.modes"
SHARE = 2  # at most 1 / SHARE of the model's context may be pinned
PAGE_FIGURES = {
    "pages per head": "pages of 32 tokens that each KV head chooses, besides those it always reads",
    "candidate pages": "stored pages that it chooses from",
}
OBSERVED_FIGURES = {
    "observed": "last tokens of the prompt: their queries chose what is kept",
    "dropped": "prompt tokens not read until the next prompt, on average over the layers",
}


class ModeParameters(BaseModel):
    """Base of all parameter classes: frozen; unknown names are rejected.

    - ``implementation``: ``package.module:Class`` of the mode itself.
    - ``figures``: the meaning of each metric that the mode reports, by its label; shown in help and panels.
    - ``tradeoff``: what is lost compared with full mode; shown when the mode is suggested.
    - ``for_comparison``: the mode is entered only by its name; F6 skips it and nothing suggests it.
    - ``own``: shared parameters that apply here only if set for this mode, with their effect, shown when one is set.
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
        """The implementation selected by these values."""
        return self.implementation

    recovery: bool = False
    """if the text goes wrong (entropy), bring tokens back; as a last resort undo some words"""
    pin_system: bool = False
    """read the whole system prompt for every token, beyond the budget"""

    @field_validator("*", mode="before")
    @classmethod
    def _left_to_kvchat(cls, value: Any, info: ValidationInfo) -> Any:
        """Read ``auto`` as None for parameters that kvchat can choose."""
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
        "tokens a round": "with draft: tokens added per verification, including the one that it samples",
    }

    resident: int | None = Field(None, ge=MIN_BUDGET)
    """most recent tokens kept on a GPU; the rest is streamed from RAM (auto: all, or what fits; none on a CPU)"""
    cpu: float | None = Field(None, ge=0, le=1)
    """share of the tokens in RAM that the CPU attends to (auto: by measured speed; not for float16 and 8-bit pages)"""
    draft: Literal["off", "auto", "lookup", "window"] = "off"
    """guess several tokens and verify them at once: lookup finds repeated text, window drafts from recent tokens"""


class PaperParameters(ModeParameters):
    """Modes from a paper: ``profile="paper"`` makes the ``published`` values the defaults.

    ``unless`` maps a parameter to one that determines it; if that is given, the published value is not used.
    """

    published: ClassVar[Mapping[str, Any]]
    unless: ClassVar[Mapping[str, str]] = {}

    profile: Literal["default", "paper"] = "default"
    """paper: use the values of the mode's paper as defaults"""

    @model_validator(mode="before")
    @classmethod
    def _as_published(cls, given: Any) -> Any:
        if not isinstance(given, dict) or given.get("profile") != "paper":
            return given
        chosen = {name for name, value in given.items() if value not in (None, "auto")}
        values = {name: value for name, value in cls.published.items() if cls.unless.get(name) not in chosen}
        return {**values, **given}


class BudgetParameters(ModeParameters):
    """Modes in which a token attends to a limited number of tokens."""

    budget: int | None = Field(None, ge=MIN_BUDGET)
    """tokens per KV head that a new token may read, with sinks and window (auto: context/32, 256 to 2048)"""


class StreamingParameters(BudgetParameters, PaperParameters):
    name: ClassVar[str] = "streaming"
    title: ClassVar[str] = (
        "reads the first and the most recent tokens, forgets the middle (StreamingLLM with Lazy Pruning)"
    )
    implementation: ClassVar[str] = "kvchat.kv.modes.streaming:Streaming"
    published: ClassVar[Mapping[str, Any]] = {"budget": 2048, "sink": 4, "B": 0, "R": 32, "sigma": 16, "delta": 32}
    unless: ClassVar[Mapping[str, str]] = {"budget": "window"}
    figures: ClassVar[Mapping[str, str]] = {
        "cached": "tokens kept: the sinks, and tokens that no prune has dropped yet",
        "dropped": "tokens after the sinks that were dropped: not readable here, but stored for other modes",
    }
    tradeoff: ClassVar[str] = "everything between the first tokens and the window"

    budget: int | None = Field(None, ge=MIN_BUDGET)
    """C, which is sink + window + B; a new token reads C to C + R tokens (auto: context/32, 256 to 2048)"""
    sink: int | None = Field(None, ge=0)
    """S, first tokens, always read (auto: the system prompt, at least 4, at most a quarter of the budget)"""
    window: int | None = Field(None, ge=1)
    """W, most recent tokens that a prune keeps; sets the budget to sink + window + B (auto: from the budget)"""
    B: int = Field(0, ge=0)
    """non-core tokens: older tokens kept in addition to the window"""
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
        "index": "bytes of the low-bit keys on the device by which tokens are chosen",
        "measured on": "the text that the budget was measured on",
        "expected to cover": "share of full attention that the budget covered there",
        "pages per head": "with unit=page: pages of 32 tokens that each KV head chooses, besides sinks and window",
        "candidate pages": "with unit=page: stored pages that it chooses from",
        "heads corrected": "with unit=page: share of KV heads whose choice was replaced before attention, since the"
        " mode was entered",
        "mean C": "with unit=page: cosine between a head's query and its previous one, on average since the mode was"
        " entered: 1 is no change; below tau the head is corrected",
    }
    tradeoff: ClassVar[str] = "reading everything for every token: speculative chooses what to read"

    budget: int | None = Field(None, ge=MIN_BUDGET)
    """tokens per KV head a token may read, with sinks and window (auto: measured, 256 to 2048; pages: context/32)"""
    index: Literal["bounds", "blocks", "bits2", "bits4"] | None = None
    """choose by keys in 2 or 4 bits (auto: 2, or as calibrated), or pages by the bounds of 32 or 8 keys (FreeKV)"""
    unit: Literal["token", "page"] = "token"
    """choose single tokens, or pages of 32 (FreeKV)"""
    query: Literal["own", "ahead", "last"] | None = None
    """query that chooses: the token's own, an estimate one layer ahead, or the last token's (auto: ahead on a GPU)"""
    sink: int | None = Field(None, ge=0)
    """S, first tokens, always read (auto: 4; profile=paper: a quarter of the budget)"""
    window: int | None = Field(None, ge=1)
    """W, most recent tokens, always read (auto: 32 with query=own, otherwise a quarter of the budget)"""
    tau: float | None = Field(None, allow_inf_nan=False)
    """with unit=page, query=last: correct a head if its query's cosine to the previous is below tau (auto: 0.8)"""
    first_full: bool = True
    """keep and read all tokens in the first layer"""
    rest: Literal["mean", "none"] = "mean"
    """approximate unread tokens by their pages' mean values, weighted by the index, or not (unit=page: none)"""

    @model_validator(mode="before")
    @classmethod
    def _as_freekv(cls, given: Any) -> Any:
        """Select FreeKV if a parameter is set that only FreeKV has: ``tau`` or an index of bounds."""
        if not isinstance(given, dict):
            return given
        asked = {name for name, value in given.items() if value not in (None, "auto")}
        if "tau" in asked and not asked & {"index", "unit", "query"}:
            return {**given, "index": "bounds", "unit": "page", "query": "last"}
        if given.get("index") in ("bounds", "blocks") and "unit" not in asked:
            return {**given, "unit": "page"}
        return given

    def of_pages(self, **changes: Any) -> SpeculativeParameters:
        """Return FreeKV's parameters with the same budget, sinks and window, and with ``changes``."""
        return self.model_copy(update={"index": "bounds", "unit": "page", "query": "last", **changes})

    @property
    def implemented_by(self) -> str:
        return "kvchat.kv.modes.freekv:FreeKV" if self.unit == "page" else self.implementation


class FreezeParameters(PaperParameters):
    name: ClassVar[str] = "freeze"
    title: ClassVar[str] = "skips tokens that keep scoring low, longer each time, then brings them back (ASR-KF-EGR)"
    implementation: ClassVar[str] = "kvchat.kv.modes.freeze:Freeze"
    published: ClassVar[Mapping[str, Any]] = {"score": "always", "tau": 0.5, "k": 2.0, "K": 32, "recovery": False}
    figures: ClassVar[Mapping[str, str]] = {
        "frozen now": "tokens off the device until their timers run out, the same in all layers and heads",
        "mean timer": "steps until a frozen token returns, on average",
        "restored per step": "tokens brought back per step, on average since the mode was entered",
    }
    own: ClassVar[Mapping[str, str]] = {
        "budget": "with a budget, freeze forgets: tokens beyond it stay frozen even if the model looks for them, and"
        " facts told earlier are lost; budget=auto removes the limit"
    }

    recovery: bool = True
    """if the text goes wrong (entropy), bring tokens back; as a last resort undo some words"""
    profile: Literal["default", "paper"] = "default"
    """paper: as published; every token outside the window is flagged, none is protected or recalled, no recovery"""
    score: Literal["prob_rel", "raw", "always"] = "prob_rel"
    """relevance score: attention relative to uniform, averaged over heads; |q·k| (the paper's Eq. 2); always flag"""
    tau: float = Field(0.5, allow_inf_nan=False)
    """flag a token as irrelevant if it scores below tau; 0 flags none"""
    k: float = Field(2.0, ge=1e-4)
    """softness: the c-th flag freezes a token for floor(sqrt(c) / k) steps"""
    K: int = Field(32, ge=1)
    """sliding window: most recent tokens, never frozen"""
    floor: int | None = Field(None, ge=0)
    """read at least this many tokens; above that, the least relevant freeze first (auto: 400; profile=paper: 0)"""
    budget: int | None = Field(None, ge=MIN_BUDGET)
    """tokens that a new token may read: others are forgotten; not shared with other modes (auto: no limit)"""


class SyncParameters(BudgetParameters, PaperParameters):
    name: ClassVar[str] = "sync"
    title: ClassVar[str] = "a few heads read everything and choose what the other heads read (SyncKV)"
    implementation: ClassVar[str] = "kvchat.kv.modes.sync:Sync"
    published: ClassVar[Mapping[str, Any]] = {"mem": 0.5, "representatives": "centroid", "rho": 0.5, "m": 5}
    unless: ClassVar[Mapping[str, str]] = {"mem": "budget"}
    figures: ClassVar[Mapping[str, str]] = {
        "representative heads": "KV heads that read everything and choose for the others, layer by layer",
        "measured on": "the text that they were found on",
        "k": "tokens that a following head reads because its representative chose them",
        "recent": "most recent tokens, which every following head also reads",
        "of full's memory": "K/V on the device, as a share of what full mode holds there",
        "anticipation steps": "steps that chose tokens for the following steps, since the mode was entered",
        "set overlap": "share of the chosen tokens that were also chosen the time before",
    }

    budget: int | None = Field(None, ge=MIN_BUDGET)
    """tokens that a following head may read, recent ones included (auto: from mem, at least 64 besides those)"""
    mem: float | None = Field(None, gt=0, le=1)
    """fraction of full mode's device K/V to use, unless budget is set (auto: 0.5, more if over 1/4 of heads choose)"""
    clusters: int | None = Field(None, ge=1)
    """N_r: representative heads per layer (auto: from the calibration)"""
    representatives: Literal["retrieval", "centroid"] = "retrieval"
    """representative of a cluster: its best retrieval head, or the head nearest to the centroid (paper)"""
    rho: float = Field(0.5, ge=0, le=1)
    """fraction of the chosen tokens that is static: chosen once per turn, at the end of the prompt"""
    m: int = Field(5, ge=1)
    """steps between two choices of the dynamic tokens"""
    offload: bool = True
    """false: keep all K/V on the device, in as much memory as full mode, and only mask them"""


class ComparedParameters(BudgetParameters):
    for_comparison: ClassVar[bool] = True


class QuestParameters(ComparedParameters):
    name: ClassVar[str] = "quest"
    title: ClassVar[str] = "reads pages by bounds of their keys, chosen by each token's own query (Quest)"
    implementation: ClassVar[str] = "kvchat.kv.modes.comparison.quest:Quest"
    figures: ClassVar[Mapping[str, str]] = PAGE_FIGURES

    whole_layers: int = Field(2, ge=0)
    """number of first layers that read everything"""


class ArkValeParameters(ComparedParameters):
    name: ClassVar[str] = "arkvale"
    title: ClassVar[str] = "reads pages by boxes around their keys, one set per layer, evicts the worst (ArkVale)"
    implementation: ClassVar[str] = "kvchat.kv.modes.comparison.arkvale:ArkVale"
    figures: ClassVar[Mapping[str, str]] = PAGE_FIGURES


class ShadowKVParameters(ComparedParameters):
    name: ClassVar[str] = "shadowkv"
    title: ClassVar[str] = "reads pages by their mean keys, plus outliers (ShadowKV without its compressed keys)"
    implementation: ClassVar[str] = "kvchat.kv.modes.comparison.shadowkv:ShadowKV"
    figures: ClassVar[Mapping[str, str]] = PAGE_FIGURES


class RaaSParameters(ModeParameters):
    name: ClassVar[str] = "raas"
    title: ClassVar[str] = "reads the prompt, and the pages of the answer that mattered last (RaaS)"
    implementation: ClassVar[str] = "kvchat.kv.modes.comparison.raas:RaaS"
    for_comparison: ClassVar[bool] = True
    figures: ClassVar[Mapping[str, str]] = {
        "answer pages": "pages of 32 tokens of the answer that a token reads, besides the prompt",
        "dropped pages": "pages of the answer that are not read until the next prompt",
    }
    own: ClassVar[Mapping[str, str]] = {
        "budget": "here the budget covers only the answer; the whole prompt is read as well"
    }

    budget: int = Field(1024, ge=MIN_BUDGET)
    """tokens of the answer that a token reads, in whole pages, besides the prompt; not shared with other modes"""


class RazorParameters(ComparedParameters):
    name: ClassVar[str] = "razor"
    title: ClassVar[str] = "retrieval heads read everything, the others sinks and a window (RazorAttention)"
    implementation: ClassVar[str] = "kvchat.kv.modes.comparison.razor:Razor"
    figures: ClassVar[Mapping[str, str]] = {
        "retrieval heads": "KV heads that read everything",
        "recent": "most recent tokens that all other heads read, besides the first 4",
    }

    budget: int | None = Field(None, ge=MIN_BUDGET)
    """tokens that all other heads read; a fifth of the prompt if that is more (auto: context/32)"""
    share: float = Field(0.15, gt=0, le=1)
    """share of KV heads that read everything"""


class SnapKVParameters(ComparedParameters):
    name: ClassVar[str] = "snapkv"
    title: ClassVar[str] = "reads what a prompt's last tokens attend to, chosen once per prompt (SnapKV)"
    implementation: ClassVar[str] = "kvchat.kv.modes.comparison.snapkv:SnapKV"
    figures: ClassVar[Mapping[str, str]] = OBSERVED_FIGURES

    budget: int | None = Field(None, ge=MIN_BUDGET)
    """tokens of the prompt that a KV head keeps, window included; answers are kept too (auto: context/32)"""
    window: int = Field(32, ge=1, le=32)
    """w, last tokens of a prompt, which choose the others and are kept"""


class PyramidKVParameters(SnapKVParameters):
    name: ClassVar[str] = "pyramidkv"
    title: ClassVar[str] = "SnapKV with a smaller budget in each higher layer (PyramidKV)"
    implementation: ClassVar[str] = "kvchat.kv.modes.comparison.pyramidkv:PyramidKV"

    beta: int = Field(20, ge=1)
    """the last layer keeps 1/beta of the average, and the first keeps more instead; 1 gives all layers the same"""


class CakeParameters(SnapKVParameters):
    name: ClassVar[str] = "cake"
    title: ClassVar[str] = "SnapKV with a budget per layer, set by how its attention spreads and shifts (CAKE)"
    implementation: ClassVar[str] = "kvchat.kv.modes.comparison.cake:Cake"

    tau1: float = Field(1.0, ge=0.1, allow_inf_nan=False)
    """the larger, the less the spread of a layer's attention counts for its budget"""
    tau2: float = Field(1.0, ge=0.1, allow_inf_nan=False)
    """the larger, the less shifts of a layer's attention between queries count for its budget"""
    gamma: float = Field(200.0, ge=0, allow_inf_nan=False)
    """weight of the variance of a token's attention weights, relative to their mean"""


class H2OParameters(ComparedParameters):
    name: ClassVar[str] = "h2o"
    title: ClassVar[str] = "reads the tokens that got the most attention so far, and recent ones (H2O)"
    implementation: ClassVar[str] = "kvchat.kv.modes.comparison.h2o:H2O"
    figures: ClassVar[Mapping[str, str]] = OBSERVED_FIGURES


class AutoParameters(ModeParameters):
    """Not a mode: lets ``kvchat.kv.auto`` choose one."""

    name: ClassVar[str] = "auto"
    title: ClassVar[str] = "chooses the mode for you: the one closest to full that is fast enough"
    implementation: ClassVar[str] = ""

    tokens_per_s: float = Field(10.0, ge=0.1, le=1000, allow_inf_nan=False)
    """speed to reach: kvchat uses the mode closest to full that reaches it, never streaming"""
    budget: int | None = Field(None, ge=MIN_BUDGET)
    """maximum tokens per KV head that a token may read, unless it reads everything (auto: half of the context)"""


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
# Modes by role, so that no other package names a mode.
REFERENCE = FullParameters.name  # reads everything; other modes are compared with it
COMPARED = SpeculativeParameters.name  # the mode compared with the reference by default
HOLDS_LEAST = StreamingParameters.name
AUTO = AutoParameters.name
ENTERED_BY_AUTO = (REFERENCE, COMPARED, SyncParameters.name)


def registered() -> Mapping[str, type[ModeParameters]]:
    """Return every mode's parameter class by name: built-in modes, those for comparison last, then installed modes."""
    return _registry()[0]


def choosable() -> Mapping[str, type[ModeParameters]]:
    """Return everything that can be entered by name: auto and every mode."""
    return {AUTO: AutoParameters, **registered()}


def problems() -> tuple[str, ...]:
    """Return one sentence for each installed mode that cannot be used."""
    return _registry()[1]


def mode_names() -> list[str]:
    """Return the names of the modes that kvchat offers, in the order of F6: all except those for comparison."""
    return [name for name, cls in registered().items() if not cls.for_comparison]


def grouped() -> dict[str, list[type[ModeParameters]]]:
    """Return the classes of ``choosable`` by group title, which is empty for all but modes for comparison."""
    offered, compared = (
        [cls for cls in choosable().values() if cls.for_comparison is is_compared] for is_compared in (False, True)
    )
    return {"": offered, "for comparison": compared}


def next_mode(mode: str, step: int = 1) -> str:
    """Return the mode that F6 enters ``step`` modes after ``mode``; the first if F6 skips ``mode``."""
    names = mode_names()
    return names[(names.index(mode) + step) % len(names)] if mode in names else names[0]


def having(parameter: str) -> list[str]:
    return [name for name, cls in choosable().items() if parameter in cls.model_fields]


def shared_by(mode: str) -> frozenset[str]:
    return SHARED - registered()[mode].own.keys() if mode in registered() else SHARED


def accepting(parameter: str, value: Any) -> list[str]:
    """Return the modes that have the parameter and accept the value; ranges can differ between modes."""

    def accepts(mode: str) -> bool:
        try:
            return bool(parse(mode, {parameter: value}))
        except UsageError:
            return False

    return [name for name in having(parameter) if accepts(name)]


def by_mode(mode: str, changes: Params) -> dict[str, Params]:
    """Return ``changes`` by mode: those for auto can include changes for other modes, under their names."""
    nested = {name: changes[name] for name in registered() if mode == AUTO and name in changes}
    return {**nested, mode: {name: value for name, value in changes.items() if name not in nested}}


def together(mode: str, *parts: Params) -> Params:
    """Merge changes for ``mode``, in the form that ``by_mode`` reads; later ones override earlier ones."""
    found: dict[str, Params] = {mode: {}}
    for part in parts:
        for name, params in by_mode(mode, part).items():
            found.setdefault(name, {}).update(params)
    own = found.pop(mode)
    return {**own, **{name: params for name, params in found.items() if params}}


def remember(given: dict[str, Params], mode: str, changes: Params) -> None:
    """Add run-time ``changes`` of ``mode`` to ``given``; a shared value replaces the values of modes that share it."""
    for other, params in given.items():
        for name in shared_by(mode) & shared_by(other) & changes.keys():
            params.pop(name, None)
    given.setdefault(mode, {}).update(changes)


def overrides_for(given: Mapping[str, Params], mode: str) -> tuple[Params, Params]:
    """Return the values given at run time that apply in ``mode``: shared ones, and its own."""
    shared = {
        name: value
        for other, params in given.items()
        for name, value in params.items()
        if name in shared_by(mode) & shared_by(other)
    }
    own = {name: value for name, value in given.get(mode, {}).items() if name not in shared_by(mode)}
    return shared, own


def parse(mode: str, params: Params) -> ModeParameters:
    """Return the parameters of ``mode``, or of auto, with the given values, and defaults for the rest.

    Raises:
        UsageError: unknown mode, unknown parameter, or value out of range.
    """
    check_known(mode, choosable(), "KV mode")
    return validated(choosable()[mode], params, mode)


def effective_params(
    mode: str, settings: Mapping[str, Params], given: Mapping[str, Params], changes: Params | None = None
) -> ModeParameters:
    """Return the parameters of ``mode``: its settings, overridden by values given at run time, then by ``changes``.

    Raises:
        UsageError: as in ``parse``; shared values that the mode does not have are ignored.
    """
    return parse(mode, {**asked_for(mode, settings, given), **(changes or {})})


def asked_for(mode: str, settings: Mapping[str, Params], given: Mapping[str, Params]) -> Params:
    """Return the values set for ``mode``: its settings, overridden by values given at run time."""
    shared, own = overrides_for(given, mode)
    known = choosable()[mode].model_fields if mode in choosable() else {}
    shared = {name: value for name, value in shared.items() if name in known}
    return {**settings.get(mode, {}), **shared, **own}


def to_keep(mode: str, settings: Mapping[str, Params], given: Mapping[str, Params]) -> Params:
    """Return ``asked_for`` as a conversation or preset saves it; for auto, with those of its modes, by name."""
    own = asked_for(mode, settings, given)
    entered = {name: asked_for(name, settings, given) for name in ENTERED_BY_AUTO if mode == AUTO}
    return own | {
        name: more for name, params in entered.items() if (more := {n: params[n] for n in params if n not in own})
    }


@cache
def _registry() -> tuple[dict[str, type[ModeParameters]], tuple[str, ...]]:
    """Return all parameter classes by name, and a sentence for each ignored entry point."""
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
    """Check that the value of an entry point is a mode's parameter class.

    Raises:
        ValueError: it is not, or it lacks a name, title, implementation or default.
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
    cls()  # its validators may refuse the defaults


def refuse_too_much(model: str, context: int, messages: int, system: int = 0) -> None:
    """Check the number of pinned tokens, of ``messages`` and of the ``system`` prompt together.

    Raises:
        TooMuchPinnedError: they leave too little of the model's context for everything else.
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
