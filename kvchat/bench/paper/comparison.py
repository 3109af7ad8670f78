"""All modes at one budget, including those of other papers: facts found, agreement with full and time, in one table.

Two variants are compared question by question and passage by passage; p is the probability that chance alone would
split them as unevenly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvchat.bench import agreement, decode, recall
from kvchat.bench.frame import Frame, ModelChoice, Report, Result, Row, chance, split, with_budgets
from kvchat.bench.paper.study import AGREEMENT, Lab, row
from kvchat.bench.settings import Agreement, Decode, Recall
from kvchat.config.modes import registered
from kvchat.models.load import LoadedModel

FULL, SPECULATIVE = "full", "speculative"
FREEKV = "speculative:profile=paper"
DEPTHS = (0.1, 0.5, 0.9)
ROUNDS = 3  # of timing


@dataclass(frozen=True)
class Loaded(ModelChoice):
    """A choice whose model is already loaded."""

    loaded: LoadedModel | None = None

    def load(self, progress: Report) -> LoadedModel:
        assert self.loaded is not None
        return self.loaded


def variants(settings: Any) -> list[str]:
    """Return full, speculative and the requested modes (default: all, and FreeKV as published), at each budget."""
    asked = dict.fromkeys((FULL, SPECULATIVE, *(settings.modes or (FREEKV, *registered()))))
    # ``with_budgets`` leaves out RaaS, whose budget counts the answer's tokens only.
    raas = [f"raas:budget={budget}" for budget in _budgets(settings)]
    named = [each for variant in asked for each in (raas if variant == "raas" else [variant])]
    return list(with_budgets(named, _budgets(settings)))


def _budgets(settings: Any) -> Sequence[int]:
    return settings.budgets or (settings.budget,)


def compared(lab: Lab) -> list[Row]:
    """Return a row for each variant: facts found, agreement with full on passages, and ms per token.

    Times are the wall time of the median step and the mean CPU time, which other programs hardly change.

    Raises:
        KvchatError: no mode accepts the model, or a text is too short.
    """
    settings, modes = lab.settings, tuple(variants(lab.settings))
    choice, context, tokens = Loaded(**vars(lab.choice), loaded=lab.model), settings.context, settings.compared
    found = recall.run(Recall(modes, ("fact",), (context,), DEPTHS, settings.cases), choice, Frame(report=lab.report))
    passages = Agreement(modes, context=context, tokens=tokens, passages=settings.passages, texts=lab.texts)
    agreed = agreement.run(passages, choice, Frame(report=lab.report))
    timed = Decode(contexts=(context,), modes=modes, steps=tokens, rounds=ROUNDS, baselines=())
    times = decode.run(timed, choice, Frame(report=lab.report))
    return [row(each, _figures(each, settings, found, agreed, times)) for each in modes]


def _figures(variant: str, settings: Any, found: Result, agreed: Result, times: Result) -> dict[str, Any]:
    """Return a variant's figures, compared with full and with speculative at its budget, and why any were refused."""
    answers, passages, timed = (_of(result["rows"], variant) for result in (found, agreed, times))
    budget = split(variant)[1].get("budget", _budgets(settings)[0])
    references = {FULL: FULL, SPECULATIVE: f"{SPECULATIVE}:budget={budget}"}
    figures: dict[str, Any] = {}
    if right := [each["right"] for each in answers if "right" in each]:
        figures |= {"facts found": sum(right), "questions": len(right)}
        for name, other in references.items():
            theirs = [] if other == variant else _of(found["rows"], other)
            figures[f"facts: p against {name}"] = chance(answers, theirs, "right")
    (agreeing,) = _of(agreed["summary"], variant)
    if "refused" not in agreeing:
        figures["KL"] = agreeing["kl_mean"]
        others = [] if variant in references.values() else _of(agreed["rows"], references[SPECULATIVE])
        figures["KL: p against speculative"] = chance(passages, others, "kl")
        figures |= {name: agreeing[of] for name, of in AGREEMENT.items() if of in ("same_top", "covered")}
        stored = settings.context + (settings.compared + 1) / 2  # mean of the steps
        figures["share read"] = agreeing["read_mean"] / stored
    if spent := [each for each in timed if "ms" in each]:
        figures |= {"ms a token": spent[0]["ms"], "processor ms a token": spent[0]["processor_ms"]}
    reasons = [each[name] for each in (*answers, *passages, *timed) for name in ("refused", "failed") if name in each]
    return figures | ({"refused": reasons[0]} if reasons else {})


def _of(rows: Sequence[Row], variant: str) -> list[Row]:
    return [each for each in rows if each["variant"] == variant]
