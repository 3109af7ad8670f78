"""SyncKV (sync mode): Figures 2a and 4, and Table 3 and Figure 6 measured as agreement with full."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from kvchat.bench.agreement import Forced
from kvchat.bench.frame import Row, parsed
from kvchat.bench.paper.study import Lab, Part, Study, agreement, forced, row
from kvchat.bench.recall_tasks import case
from kvchat.config.modes import FullParameters
from kvchat.engine.prompt import PromptEncoder, Stored
from kvchat.protocol.messages import Sampling

TOP = 64
PAPER = "sync:profile=paper"
# Table 3: parameters, and the published LongBench average, prefill in seconds and ms per step.
ABLATIONS = {
    "SyncKV (N_r=2, m=5)": ("clusters=2,m=5,rho=0.5", 48.12, 2.45, 40),
    "w/o Init. (nothing leaves the GPU)": ("clusters=2,m=5,rho=0.5,offload=false", 48.12, 2.19, 50),
    "w/o Anticip. (rho=1)": ("clusters=2,m=5,rho=1", 47.75, 2.43, 40),
    "w/o Susp. (m=1)": ("clusters=2,m=1,rho=0.5", 48.50, 2.63, 210),
    "N_r=1": ("clusters=1,m=5,rho=0.5", 47.86, 2.45, 40),
    "N_r=3": ("clusters=3,m=5,rho=0.5", 47.63, 2.52, 70),
    "m=10": ("clusters=2,m=10,rho=0.5", 47.62, 2.51, 40),
}
PREFILL, STEP = "prefill, s", "ms a step"
RATIOS = (0.0, 0.25, 0.5, 0.75, 1.0)
NEEDLE_SCORE = 0.989  # Figure 4


@dataclass(frozen=True)
class Settings:
    """Generates ``tokens`` tokens after ``context`` tokens of a book.

    The ablations decode ``forced`` tokens, where a follower head may read ``budget`` tokens. Figure 4 has ``lengths``
    lengths up to ``longest`` tokens and ``depths`` depths, with ``cases`` needles each.
    """

    tokens: int = 100
    context: int = 1000
    forced: int = 100
    budget: int = 256
    longest: int = 4000
    lengths: int = 4
    depths: int = 5
    cases: int = 2


def _variants(settings: Settings) -> list[str]:
    params = (*(params for params, *_ in ABLATIONS.values()), *map(_at_ratio, RATIOS))
    return ["full", _default(settings), *(_paper(settings, each) for each in params)]


def _paper(settings: Settings, params: str) -> str:
    return f"{PAPER},budget={settings.budget},{params}"


def _default(settings: Settings) -> str:
    return f"sync:budget={settings.budget}"


def _at_ratio(rho: float) -> str:
    return f"clusters=2,m=5,rho={rho:g}"


# ---- Figure 2 --------------------------------------------------------------------------------------
def _top_sets(lab: Lab) -> Tensor:
    """Return 1 for the ``TOP`` most attended tokens of each step, layer and KV head: ``[steps, layers, H, total]``."""
    walk, end = lab.walk, lab.settings.context + lab.settings.tokens
    logits = walk.begin(lab.passage(lab.settings.context), FullParameters(), lab.settings.tokens)
    found = []
    for _ in lab.generate(logits, lab.settings.tokens, Sampling(temperature=0.7, seed=0)):
        weights = torch.stack([walk.weights(layer).amax(1) for layer in range(lab.model.layers)])
        found.append(torch.zeros(*weights.shape[:2], end).scatter_(2, weights.topk(TOP, 2).indices.cpu(), 1.0))
    return torch.stack(found)


def _drift(lab: Lab) -> list[Row]:
    sets = _top_sets(lab)
    overlap = (sets * sets[0]).sum(-1).mean((1, 2)) / TOP
    published = {50: {"overlap": 0.30}}
    steps = sorted({step for step in (1, 10, 50, len(overlap) - 1) if step < len(overlap)})
    return [row(f"step {step}", {"overlap": float(overlap[step])}, published.get(step)) for step in steps]


# ---- Table 3 and Figure 6 --------------------------------------------------------------------------
def _ablations(lab: Lab) -> list[Row]:
    decoded = forced(lab)

    def ablated(label: str) -> Row:
        params, score, seconds, milliseconds = ABLATIONS[label]
        published = {"LongBench average": score, PREFILL: seconds, STEP: milliseconds}
        return _agreed(lab, decoded, label, params, published)

    return lab.each(ABLATIONS, ablated)


def _static_ratios(lab: Lab) -> list[Row]:
    decoded, ratios = forced(lab), {f"rho {rho:g}": rho for rho in RATIOS}
    return lab.each(ratios, lambda label: _agreed(lab, decoded, label, _at_ratio(ratios[label]), {}))


def _agreed(lab: Lab, decoded: Forced, label: str, params: str, published: dict[str, float]) -> Row:
    variant = _paper(lab.settings, params)
    return row(label, agreement(decoded, parsed(variant)) | _times(lab, variant), published)


def _times(lab: Lab, variant: str) -> dict[str, float]:
    """Return seconds to prefill and enter the mode, and ms per decoded token of the same text."""
    context, tokens = int(lab.settings.context), int(lab.settings.forced)
    prefill, step = lab.walk.times(lab.passage(context + tokens), context, parsed(variant))
    return {PREFILL: prefill, STEP: 1000 * step}


# ---- Figure 4 --------------------------------------------------------------------------------------
def _needles(lab: Lab) -> list[Row]:
    """Return the share of needles found at all depths and lengths: full, the paper's settings, kvchat's."""
    variants = {
        "full": "full",
        "sync, as published": _paper(lab.settings, _at_ratio(0.5)),
        "sync, default": _default(lab.settings),
    }
    lengths = [lab.settings.longest * (step + 1) // lab.settings.lengths for step in range(lab.settings.lengths)]
    depths = [round(float(depth), 2) for depth in torch.linspace(0, 1, lab.settings.depths)]
    cells = itertools.product(lengths, depths, range(lab.settings.cases))
    needles = {f"needle {number}: {cell[1]:g} of {cell[0]:,} tokens": cell for number, cell in enumerate(cells, 1)}
    found = lab.each(needles, lambda label: _answers(lab, variants, *needles[label]))
    hits = torch.tensor([[float(answers[label]) for answers in found] for label in variants])
    right = hits.view(len(variants), -1, lab.settings.cases).mean(-1)
    return [
        row(
            label,
            {"score": float(shares.mean()), "lowest cell": float(shares.min())},
            {"score": NEEDLE_SCORE} if label == "sync, as published" else {},
        )
        for label, shares in zip(variants, right, strict=True)
    ]


def _answers(lab: Lab, variants: dict[str, str], tokens: int, depth: float, number: int) -> dict[str, bool]:
    """Return whether each variant finds the needle."""
    tokenizer = lab.model.tokenizer
    asked = case("passkey", tokens, depth, 1, str(number), tokenizer)
    prompt = PromptEncoder(tokenizer).encode(asked.turns, Stored()).ids
    return {label: asked.answer in lab.answer(prompt, variant) for label, variant in variants.items()}


PARTS = {
    "figure-2a": Part(
        "Figure 2a: how many of the most attended tokens are the same as at the first step",
        f"The top {TOP} tokens of each KV head (maximum over its query heads), on a book. The paper does not say which "
        "k and texts it used.",
        _drift,
    ),
    "table-3": Part(
        "Table 3: components",
        "The paper has LongBench averages of Llama-3.1-8B at 50 % of the memory. Here it is agreement with full on a "
        "book at one budget, because half the memory of a model with few KV heads cannot hold two heads that keep "
        "everything; the rest is profile=paper. Prefill is a prompt of 1,000 tokens and the switch to the mode. "
        "kvchat writes every prompt to RAM during prefill, so w/o Init. saves no time.",
        _ablations,
    ),
    "figure-4": Part(
        "Figure 4: needles found by depth and length",
        "The paper has 16,000 to 128,000 tokens and Llama-3.1-8B. Here a passkey is hidden in texts of the lengths "
        "shown, with greedy answers. By default the head that retrieves best represents a cluster; in the paper it is "
        "the head nearest to the centroid.",
        _needles,
    ),
    "figure-6": Part(
        "Figure 6: static ratio rho",
        "Agreement with full. The paper plots task scores, which are best at 0.5.",
        _static_ratios,
    ),
}
STUDY = Study("synckv", "sync mode: drift of attention, ablations, needles", PARTS, _variants)
