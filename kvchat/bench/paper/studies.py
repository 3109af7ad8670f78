"""The papers that ``kvchat bench paper`` reproduces, and the sizes set with ``--set``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from kvchat.bench.frame import Frame, ModelChoice, Result
from kvchat.bench.paper import asr_kf_egr, freekv, lazy_pruning, synckv
from kvchat.bench.paper.study import Study
from kvchat.bench.settings import Paper
from kvchat.errors import UsageError, check_known, did_you_mean

STUDIES: dict[str, tuple[Study, type]] = {
    module.STUDY.name: (module.STUDY, module.Settings) for module in (asr_kf_egr, lazy_pruning, synckv, freekv)
}
DIGITS = 12  # of a size at most, because int() refuses numbers of thousands of digits


def run(settings: Paper, choice: ModelChoice, frame: Frame) -> Result:
    """Measure the paper's parts; see ``Study.run``."""
    study, sizes = chosen(settings.paper, settings.sizes, settings.modes, settings.budgets)
    return study.run(sizes, choice, frame, settings.parts, settings.texts)


def chosen(
    paper: str, given: Sequence[str], modes: Sequence[str] = (), budgets: Sequence[int] = ()
) -> tuple[Study, Any]:
    """Return the study of a paper and its settings: ``given`` as ``KEY=VALUE``, and the modes and budgets to compare.

    Raises:
        UsageError: the paper or a key is unknown, a value is not a positive whole number, or the study compares no
            modes.
    """
    check_known(paper, STUDIES, "paper")
    study, settings = STUDIES[paper]
    compared = {"modes": tuple(modes), "budgets": tuple(budgets)}
    known = [field.name for field in fields(settings) if field.name not in compared]
    sizes: dict[str, Any] = {name: value for name, value in compared.items() if value}
    if sizes and not hasattr(settings, "modes"):
        raise UsageError(
            f"The study of {paper} does not compare modes.", hint="Omit --mode and --budget, or use freekv."
        )
    for text in given:
        name, _, value = text.partition("=")
        if name not in known:
            raise UsageError(f'{paper} has no size "{name}".', did_you_mean(name, known))
        if not value.isdecimal() or not 0 < len(value.lstrip("0")) <= DIGITS:
            raise UsageError(
                f'--set "{text}" is not valid.'[:200], hint=f"The value must be a whole number of 1 to {DIGITS} digits."
            )
        sizes[name] = int(value)
    return study, settings(**sizes)
