"""SyncKV (sync mode): Figures 2a to 2c, and Table 3 and Figure 6 by agreement with full."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvchat.bench.agreement import Forced, summarized
from kvchat.bench.agreement import Settings as AgreementSettings
from kvchat.bench.frame import Row
from kvchat.bench.paper.study import Lab, Part, Study, rounded, row
from kvchat.bench.texts import passages
from kvchat.config.modes import FullParameters
from kvchat.protocol.messages import Sampling

TOP = 64
PAPER = "sync:representatives=centroid"
# Table 3: rows whose "w/o" is a value of a parameter, with the LongBench average.
ABLATIONS = {
    "SyncKV (N_r=2, m=5)": ("clusters=2,m=5,rho=0.5", 48.12),
    "w/o Anticip. (rho=1)": ("clusters=2,m=5,rho=1", 47.75),
    "w/o Susp. (m=1)": ("clusters=2,m=1,rho=0.5", 48.50),
    "N_r=1": ("clusters=1,m=5,rho=0.5", 47.86),
    "N_r=3": ("clusters=3,m=5,rho=0.5", 47.63),
    "m=10": ("clusters=2,m=10,rho=0.5", 47.62),
}
RATIOS = (0.0, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class Settings:
    """``tokens`` generated after ``context`` tokens of book text.

    For the ablations ``forced`` are decoded, of which a following head may attend to ``budget``.
    """

    tokens: int = 100
    context: int = 1000
    forced: int = 100
    budget: int = 256


def _variants(settings: Settings) -> list[str]:
    params = (*(params for params, _ in ABLATIONS.values()), *map(_at_ratio, RATIOS))
    return ["full", *(_paper(settings, each) for each in params)]


def _paper(settings: Settings, params: str) -> str:
    return f"{PAPER},budget={settings.budget},{params}"


def _at_ratio(rho: float) -> str:
    return f"clusters=2,m=5,rho={rho:g}"


# ---- Figure 2 --------------------------------------------------------------------------------------


def _top_sets(lab: Lab) -> Tensor:
    """The most attended tokens of each step, layer and KV head as 0 and 1, ``[steps, layers, H, total]``."""
    (text, *_) = passages((), lab.settings.context, lab.model.tokenizer, joined=True)
    walk, end = lab.walk, lab.settings.context + lab.settings.tokens
    logits = walk.begin(text.ids, FullParameters(), lab.settings.tokens)
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
    rows = [row(f"step {step}", {"overlap": float(overlap[step])}, published.get(step)) for step in steps]
    rows[0]["lines"] = {"overlap with the first step": rounded(overlap)}
    return rows


def _locality(lab: Lab) -> list[Row]:
    sets = _top_sets(lab).flatten(1)
    pairs = lab.model.layers * lab.model.kv_heads
    overlap = sets @ sets.T / TOP / pairs
    adjacent, far = overlap.diagonal(1), overlap.diagonal(min(50, len(overlap) - 1))
    measured = {"adjacent steps": float(adjacent.mean()), "lowest pair": float(adjacent.min())}
    published = {"adjacent steps": "consistently high"}
    return [
        row("temporal locality", {**measured, "50 steps apart": float(far.mean())}, published, matrix=rounded(overlap))
    ]


def _similarity(lab: Lab) -> list[Row]:
    """The mean overlap of the heads of two layers; within a layer of two different heads."""
    sets, heads = _top_sets(lab).transpose(1, 0), lab.model.kv_heads
    layers = len(sets)
    matrix = torch.zeros(layers, layers)
    for one in range(layers):
        for other in range(layers):
            overlap = torch.einsum("sat,sbt->ab", sets[one], sets[other]) / TOP / sets.shape[1]
            same = overlap.diagonal().sum() if one == other else torch.tensor(0.0)
            matrix[one, other] = (overlap.sum() - same) / (heads * heads - (heads if one == other else 0))
    within = matrix.diagonal().mean()
    between = (matrix.sum() - matrix.diagonal().sum()) / (layers * layers - layers)
    measured = {"within a layer": float(within), "between layers": float(between), "ratio": float(within / between)}
    return [row("layers", measured, {"ratio": "significantly higher within"}, matrix=rounded(matrix))]


# ---- Table 3 and Figure 6 --------------------------------------------------------------------------


def _ablations(lab: Lab) -> list[Row]:
    forced = _forced(lab)
    return [
        _agreed(lab, forced, label, params, {"LongBench average": score})
        for label, (params, score) in ABLATIONS.items()
    ]


def _static_ratios(lab: Lab) -> list[Row]:
    forced = _forced(lab)
    return [_agreed(lab, forced, f"rho {rho:g}", _at_ratio(rho), {}) for rho in RATIOS]


def _forced(lab: Lab) -> Forced:
    settings = AgreementSettings((), lab.settings.context, lab.settings.forced)
    size = settings.context + settings.tokens
    return Forced(lab.walk, settings, passages((), size, lab.model.tokenizer, joined=True)[:1])


def _agreed(lab: Lab, forced: Forced, label: str, params: str, published: dict[str, float]) -> Row:
    variant = _paper(lab.settings, params)
    made = summarized([{**forced.row(0, variant), "variant": variant}], variant)
    return row(label, {name: made[name] for name in ("kl_mean", "same_top", "covered", "read_mean")}, published)


PARTS = {
    "figure-2a": Part(
        "Figure 2a: overlap of the most attended tokens with the first step's",
        f"Top {TOP} tokens of each KV head (maximum over its query heads) on a book; the paper's k and texts are not "
        "published with the figure.",
        _drift,
        drawn=True,
    ),
    "figure-2b": Part(
        "Figure 2b: overlap of each pair of steps", "As Figure 2a; a heat-map there.", _locality, drawn=True
    ),
    "figure-2c": Part(
        "Figure 2c: overlap within and between layers",
        "Two different heads of a layer are compared, never a head with itself.",
        _similarity,
        drawn=True,
    ),
    "table-3": Part(
        "Table 3: components",
        "LongBench averages of Llama-3.1-8B at 50 % of the memory there; here agreement with full on a book at one "
        "budget, because half of few KV heads cannot hold two that keep everything. Centroids represent, as published.",
        _ablations,
    ),
    "figure-6": Part(
        "Figure 6: static ratio rho", "Agreement with full; the paper plots task scores, best at 0.5.", _static_ratios
    ),
}
STUDY = Study("synckv", "drift, locality and similarity of attention, and ablations", PARTS, _variants)
