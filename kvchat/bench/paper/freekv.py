"""FreeKV (speculative mode): Figure 3a, heads corrected by tau, and the appendix's ablation of the retrieving query.

It also has the comparison of all modes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvchat.bench.frame import Row, parsed
from kvchat.bench.paper import comparison
from kvchat.bench.paper.study import Lab, Part, Study, agreement, forced, row
from kvchat.config.modes import FullParameters, SpeculativeParameters
from kvchat.kv.modes.freekv import FreeKV
from kvchat.kv.state import KVState
from kvchat.protocol.messages import Sampling

TAUS = (0.0, 0.2, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
ACCURACY_TAUS = (-2.0, 0.5, 0.8, 0.9, 2.0)
# Which query retrieves: tau, the source and the paper's verdict.
SOURCES: dict[str, tuple[float, Source, str]] = {
    "the step before, never corrected": (-2.0, "own", "significantly worse than with correction"),
    "the step before, corrected at tau 0.8": (0.8, "own", "used"),
    "the layer below, same step": (2.0, "layer below", "worse than the step before"),
    "the layer's own, same step": (2.0, "own", "not speculative: the step waits for the recall"),
}
Source = Literal["own", "layer below"]


@dataclass(frozen=True)
class Settings:
    """Generates ``tokens`` tokens after ``context`` tokens of a book; accuracy and ablations have ``budget``.

    The comparison has ``cases`` questions at each depth, ``compared`` tokens of each of ``passages`` passages,
    ``modes`` (default: all) and ``budgets`` (default: ``budget``).
    """

    tokens: int = 500
    context: int = 1000
    budget: int = 512
    forced: int = 150
    cases: int = 4
    passages: int = 8
    compared: int = 32
    modes: tuple[str, ...] = ()
    budgets: tuple[int, ...] = ()


def _variants(settings: Settings) -> list[str]:
    return [*comparison.variants(settings), *(_at(settings, tau) for tau in ACCURACY_TAUS)]


def _at(settings: Settings, tau: float) -> str:
    return f"speculative:profile=paper,budget={settings.budget},tau={tau:g}"


def _similarities(lab: Lab) -> Tensor:
    """Return C, the cosine of adjacent queries, ``[steps, layers, H_q]`` while full mode generates."""
    logits = lab.walk.begin(lab.passage(lab.settings.context), FullParameters(), lab.settings.tokens)
    before, found = lab.walk.queries.clone(), []
    for _ in lab.generate(logits, lab.settings.tokens, Sampling(temperature=0.7, seed=0)):
        now = lab.walk.queries.clone()
        found.append(torch.cosine_similarity(before, now, dim=-1))
        before = now
    return torch.stack(found).cpu()


def _figure_3a(lab: Lab) -> list[Row]:
    by_head = _similarities(lab).mean(0)
    measured = {
        "lowest head": float(by_head.min()),
        "mean": float(by_head.mean()),
        "heads above 0.9": float((by_head > 0.9).float().mean()),
        "heads above 0.84": float((by_head > 0.84).float().mean()),
    }
    published = {"lowest head": "above 0.84", "heads above 0.9": "most", "heads above 0.84": 1.0}
    return [row("mean C of each head", measured, published)]


def _corrections(lab: Lab) -> list[Row]:
    """Tabulate the share of (step, KV head) pairs with a mean C below tau; the first layer retrieves nothing."""
    similar = _similarities(lab)
    grouped = similar.view(*similar.shape[:2], lab.model.kv_heads, -1).mean(-1)[:, 1:]
    shares = {tau: float((grouped < tau).float().mean()) for tau in TAUS}
    published = {0.8: {"used for": "LongBench v2"}, 0.9: {"used for": "long reasoning"}}
    return [row(f"tau {tau:g}", {"head-steps corrected": share}, published.get(tau)) for tau, share in shares.items()]


def _accuracy(lab: Lab) -> list[Row]:
    """Measure agreement with full, from never correcting to always correcting."""
    decoded = forced(lab)
    taus = {f"tau {tau:g}": tau for tau in ACCURACY_TAUS}
    return lab.each(taus, lambda label: row(label, agreement(decoded, parsed(_at(lab.settings, taus[label])))))


def _sources(lab: Lab) -> list[Row]:
    decoded = forced(lab)

    def asked(label: str) -> Row:
        tau, source, verdict = SOURCES[label]
        ablated = AblatedParameters(profile="paper", budget=lab.settings.budget, tau=tau, source=source)
        return row(label, agreement(decoded, ablated), {"same top token": verdict})

    return lab.each(SOURCES, asked)


class AblatedParameters(SpeculativeParameters):
    """``SpeculativeParameters`` with a ``source``; "layer below" retrieves at every step and needs tau above 1."""

    implementation: ClassVar[str] = "kvchat.bench.paper.freekv:Ablated"

    @property
    def implemented_by(self) -> str:
        return self.implementation

    source: Source = "own"
    """the query that retrieves: the layer's own, or the same step's query in the layer below"""


PARTS = {
    "figure-3a": Part(
        "Figure 3a: cosine of adjacent queries (C), each head's mean over a generation",
        "The paper generated 13,000 tokens with Llama-3.1-8B and DeepSeek-R1-Qwen-14B. The bundled model's queries "
        "change direction much more, so the paper's tau corrects nearly every head.",
        _figure_3a,
    ),
    "corrections": Part(
        "Share of heads corrected per step, by tau",
        "The paper has no such table. The first layer retrieves nothing and is left out. A tau that corrects nearly "
        "every head amounts to synchronous retrieval.",
        _corrections,
    ),
    "accuracy": Part(
        "What corrections are worth: agreement with full by tau",
        "tau=-2 never corrects, tau=2 always does. The paper compares task scores of large models; a small model fails "
        "those tasks.",
        _accuracy,
    ),
    "query-source": Part(
        "The query that retrieves (appendix)",
        "The paper compares task scores. The layer below lends its query of the same step, as in methods that predict "
        "from one layer to the next, but without their projection.",
        _sources,
    ),
    "comparison": Part(
        "All modes at one budget",
        "The paper compares task scores of large models. Here the tasks are facts hidden in a book and the next tokens "
        "of books. p is the probability of as uneven a split by chance: of the questions that only one of two variants "
        "answers (exact McNemar test), or of the passages on which one is closer to full (sign test). The question "
        "ends the prompt, which helps SnapKV, PyramidKV, CAKE and H2O: they choose by the prompt's end. Freeze has no "
        "budget; RaaS' budget counts the answer only. Processor ms add up all threads and hardly depend on other "
        "programs. The bundled model answers few of these questions.",
        comparison.compared,
    ),
}
STUDY = Study("freekv", "speculative mode: adjacent queries, corrections, all modes compared", PARTS, _variants)


class Ablated(FreeKV):
    """FreeKV that retrieves with the query of its ``source``."""

    parameters: AblatedParameters

    def attach(self, state: KVState) -> None:
        super().attach(state)
        self._below = state.query[0]

    def attention_begin(self, layer: int, query: Tensor, key: Tensor) -> bool:
        below, self._below = self._below, query
        asked = below if self.parameters.source == "layer below" and layer else query
        return super().attention_begin(layer, asked, key)
