"""Parameters of a mode compared: agreement with full and recall of every combination, at each budget.

What the defaults are chosen by. A value may be a share of the budget, as ``1/4``.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction

from kvchat.bench.agreement import Forced, summarized
from kvchat.bench.agreement import Settings as AgreementSettings
from kvchat.bench.environment import fingerprint
from kvchat.bench.frame import Cell, Frame, Row
from kvchat.bench.identity import Experiment, Result, methods, model_identity
from kvchat.bench.intervals import mean, wilson
from kvchat.bench.model_choice import ModelChoice
from kvchat.bench.recall_tasks import case
from kvchat.bench.texts import passages
from kvchat.bench.variant import parsed
from kvchat.bench.walk import Walk
from kvchat.config.modes import BudgetParameters, registered
from kvchat.engine.generate.prompt import PromptEncoder
from kvchat.engine.generate.stored import Stored
from kvchat.errors import UsageError

ANSWER_TOKENS = 24
TASK, KEYS, DEPTHS = "keys", 4, (0.1, 0.5, 0.9)
# What is varied where nothing is named: the parameters that share a budget out, or decide what leaves.
GRIDS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "speculative": {"sink": ("4", "32", "1/4"), "window": ("1/4", "1/2", "3/4")},
    "streaming": {"R": ("1", "16", "64"), "delta": ("0", "16")},
    "freeze": {"tau": ("0.25", "0.5", "1"), "k": ("1", "2")},
    "sync": {"rho": ("0", "0.5", "0.8"), "m": ("1", "5")},
}


@dataclass(frozen=True)
class Settings:
    """The measurement: ``mode`` at each of ``budgets`` with every combination of ``grid``, of pairs (name, values).

    Agreement over ``tokens`` tokens after ``context`` on each of ``passages``, recall of ``cases`` at each depth.
    """

    mode: str
    budgets: tuple[int, ...] = (256, 512)
    grid: tuple[tuple[str, tuple[str, ...]], ...] = ()
    context: int = 1500
    tokens: int = 100
    passages: int = 2
    cases: int = 2


def grid(mode: str, given: Sequence[str]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """The grid that ``given`` names as ``KEY=VALUE,VALUE``, or the mode's usual grid.

    Raises:
        UsageError: there is no such mode, it is not of that form, or there is neither.
    """
    parsed(mode)
    if not given and mode not in GRIDS:
        raise UsageError(f"There is nothing to vary in {mode}.", "", "Give --vary KEY=VALUE,VALUE.")
    found = []
    for text in given:
        name, equals, values = text.partition("=")
        if not (name and equals and values):
            raise UsageError(f'--vary "{text}" is not KEY=VALUE,VALUE.', hint="For example: --vary budget=256,512")
        found.append((name, tuple(values.split(","))))
    return tuple(found or GRIDS[mode].items())


def variants(settings: Settings) -> list[str]:
    """Every combination as a variant.

    Raises:
        UsageError: a combination is refused, or a share stands where there is no budget.
    """
    cls = registered().get(settings.mode)
    budgets: Sequence[int | None] = settings.budgets if cls and issubclass(cls, BudgetParameters) else [None]
    names = [name for name, _ in settings.grid]
    found = []
    for budget, values in itertools.product(budgets, itertools.product(*(values for _, values in settings.grid))):
        pairs = [f"{name}={_value(value, budget)}" for name, value in zip(names, values, strict=True)]
        pairs = [f"budget={budget}", *pairs] if budget else pairs
        found.append(f"{settings.mode}:{','.join(pairs)}")
        parsed(found[-1])
    return list(dict.fromkeys(found))


def _value(text: str, budget: int | None) -> str:
    """A share of the budget in tokens; anything else as it is."""
    if "/" not in text:
        return text
    try:
        share = Fraction(text)
    except (ValueError, ZeroDivisionError):
        share = Fraction(-1)
    if budget is None or not 0 < share <= 1:
        raise UsageError(f'The share "{text}" is refused.', hint="It must be between 0 and 1, of a mode with a budget.")
    return str(round(share * budget))


def run(settings: Settings, choice: ModelChoice = ModelChoice(), frame: Frame | None = None) -> Result:
    """Measure and return plain data, ready for JSON: a row for each combination.

    Raises:
        KvchatError: a combination is refused, or the model cannot be loaded.
    """
    named = variants(settings)
    frame, found = frame or Frame(), methods(named)
    model = choice.load(frame.report)
    walk = Walk(model)
    size = settings.context + settings.tokens
    texts = passages((), size, model.tokenizer, joined=True)[: settings.passages]
    forced = Forced(walk, AgreementSettings((), settings.context, settings.tokens), texts)
    experiment = Experiment(
        "sweep",
        f"{settings.mode} by its parameters: agreement with full and recall",
        asdict(settings),
        found,
        model_identity(model),
        fingerprint(model.device),
    )
    cells = [{"passage": number, "variant": variant} for number in range(len(texts)) for variant in named]
    cells += [{"recall": number, "variant": variant} for number in range(settings.cases) for variant in named]
    result = frame.measure(experiment, cells, lambda cell: [_measured(walk, forced, settings, cell)], _line)
    return frame.finish(result, [_summary(result["rows"], variant) for variant in named])


def _measured(walk: Walk, forced: Forced, settings: Settings, cell: Cell) -> Row:
    if "passage" not in cell:
        return {"right": [_recalled(walk, settings, cell, depth) for depth in DEPTHS]}
    parameters, ids = parsed(cell["variant"]), forced.ids(cell["passage"])
    return {**forced.row(cell["passage"], parameters), "ms": 1000 * walk.times(ids, settings.context, parameters)[1]}


def _recalled(walk: Walk, settings: Settings, cell: Cell, depth: float) -> bool:
    tokenizer = walk.model.tokenizer
    asked = case(TASK, settings.context, depth, KEYS, f"sweep/{cell['recall']}", tokenizer)
    prompt = PromptEncoder(tokenizer).encode(asked.turns, Stored()).ids
    logits = walk.begin(prompt, parsed(cell["variant"]), ANSWER_TOKENS)
    answer = list[int]()
    for _ in range(ANSWER_TOKENS):
        answer.append(int(logits.argmax()))
        logits = walk.step(answer[-1])
    return all(part in tokenizer.decode(answer) for part in asked.answers)


def _summary(rows: Sequence[Row], variant: str) -> Row:
    mine = [row for row in rows if row["variant"] == variant]
    if refused := [row["refused"] for row in mine if "refused" in row]:
        return {"variant": variant, "refused": refused[0]}
    right = [each for row in mine for each in row.get("right", ())]
    forced = [row for row in mine if "kl" in row]
    return summarized(forced, variant) | {
        "right": sum(right),
        "cases": len(right),
        "recall": mean(right),
        "recall_interval": wilson(sum(right), len(right)),
        "ms": statistics.fmean(row["ms"] for row in forced),
    }


def _line(row: Row) -> str:
    found = f"KL {mean(row['kl']):.4f}" if "kl" in row else f"{sum(row['right'])} of {len(row['right'])} found"
    return f"{row['variant']:<56} {found}"
