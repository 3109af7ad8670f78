"""Runs a measurement cell by cell and saves each cell as it finishes.

A cell is measured in one go and named by its coordinates, such as variant and case. It gives one or more rows, which
include the coordinates. A variant is written ``MODE[:KEY=VALUE[,KEY=VALUE...]]``.

A result records its settings, the modes with their parameters, the model, the environment and the commit of kvchat,
which decide whether two results may be combined in one report.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from kvchat import files, units
from kvchat.config.modes import BudgetParameters, ModeParameters, parse, registered
from kvchat.errors import KvchatError, UsageError
from kvchat.protocol.figures import Params
from kvchat.protocol.messages import Load

if TYPE_CHECKING:
    from kvchat.models.load import LoadedModel


Row = dict[str, Any]
Cell = Mapping[str, Any]
Report = Callable[[str], None]
# Results are comparable if these are equal: each changes times, and most change the last digits of logits.
COMPARED = ("processor", "threads", "gpu", "cuda", "torch", "transformers")
Result = dict[str, Any]
# The coordinates of a question or passage; variants are compared where these are equal.
ASKED = ("task", "tokens", "depth", "case", "passage")
NORMAL_95 = 1.959964  # 95 % of a normal distribution lie within this many standard deviations


@dataclass(frozen=True)
class Frame:
    """Saves a measurement's rows and reports them.

    Without a ``file`` they are kept only in memory; an existing file is replaced. ``report`` gets lines to show,
    ``progress`` the stages of loading, then ""; ``command`` is recorded in the result.
    """

    file: Path | None = None
    report: Report = lambda line: None
    progress: Report = lambda stage: None
    clock: Callable[[], float] = time.monotonic
    command: str = ""

    def measure(
        self,
        head: Result,
        cells: Sequence[Cell],
        measure: Callable[[Cell], Sequence[Row]],
        line: Callable[[Row], str],
        summary: Callable[[list[Row]], Sequence[Row]] = list,
    ) -> Result:
        """Measure the cells; return ``head`` with their rows and their ``summary`` as plain data.

        The file always contains the cells measured so far. A refused cell becomes a row with the reason in ``refused``.

        Raises:
            UsageError: the file cannot be written.
            KvchatError: no cell could be measured; this is the first cell's error.
        """
        result: Result = _plain({**head, "command": self.command, "cells": len(cells), "rows": []})
        began, refused = self.clock(), list[KvchatError]()
        for done, cell in enumerate(cells, 1):
            try:
                rows = [_plain({**cell, **row}) for row in measure(cell)]
            except KvchatError as error:
                rows = [_plain({**cell, "refused": str(error)})]
                refused.append(error)
            result["rows"] += rows
            self._keep(result)
            left = (self.clock() - began) / done * (len(cells) - done)
            ahead = f"{done}/{len(cells)}" + (f", {units.seconds(left)} left" if left else "")
            for row in rows:
                self.report(f"[{ahead}] {row['refused'] if 'refused' in row else line(row)}")
        if refused and len(refused) == len(cells):
            raise refused[0]
        result["summary"] = _plain(summary(result["rows"]))
        self._keep(result)
        return result

    def _keep(self, result: Result) -> None:
        if self.file is not None:
            files.save(self.file, (json.dumps(result) + "\n").encode(), "Use another --out.")


def load(file: Path) -> Result:
    """Read a result.

    Raises:
        UsageError: the file cannot be read, or is not a result.
    """
    try:
        result: Result = json.loads(files.read_text(file))
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"{file} is not a result of kvchat bench.", f"It is not JSON: {error}.", "Use a file written by --out."
        ) from None
    kinds = {"experiment": str, "settings": dict, "methods": dict, "model": dict, "environment": dict, "rows": list}
    is_one = isinstance(result, dict) and all(isinstance(result.get(name), kind) for name, kind in kinds.items())
    if not is_one or not all(isinstance(row, dict) for name in ("rows", "summary") for row in result.get(name, ())):
        raise UsageError(
            f"{file} is not a result of kvchat bench.",
            "It lacks the experiment, its settings, its environment or its rows.",
            "Use a file written by --out.",
        )
    return result


def _plain(value: Any) -> Any:
    """Return the value after a round trip through JSON, which turns tuples into lists."""
    return json.loads(json.dumps(value))


def experiment(
    name: str, what: str, settings: Mapping[str, Any], methods: Mapping[str, Any], model: LoadedModel, **found: Any
) -> Result:
    """Return the head of a result: ``settings`` of the command, ``methods`` by variant, the model and the environment.

    ``found`` are facts about the whole run that do not identify it, such as rates of the device.
    """
    from kvchat.bench.timing import fingerprint  # imports torch

    identity = {
        "name": model.name,
        "revision": model.revision,
        "dtype": str(model.dtype).removeprefix("torch."),
        "weights": model.weights,
        "device": model.device.type,
    }
    head = {"experiment": name, "what": what, "settings": settings, "methods": methods, "model": identity}
    return {**head, "environment": fingerprint(model.device), **found}


def methods(variants: Sequence[str], budget: int | None = None) -> dict[str, Any]:
    """Return the mode and all parameters of each variant; ``budget`` is as in ``parsed``."""
    found = {variant: parsed(variant, budget) for variant in variants}
    return {variant: {"mode": chosen.name, "parameters": chosen.model_dump()} for variant, chosen in found.items()}


def incompatible(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Return why two results cannot be compared, or "" if they can."""
    environments = [{key: result["environment"].get(key) for key in COMPARED} for result in (one, other)]
    return _difference("environment", *environments) or _difference("model", one.get("model"), other.get("model"))


def _difference(name: str, one: Any, other: Any) -> str:
    """Return the first innermost difference, with its path; a missing key is a difference."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for key in dict.fromkeys((*one, *other)):
            if found := _difference(f"{name}.{key}", one.get(key), other.get(key)):
                return found
        return ""
    return "" if one == other else f"{name} is {one!r} in one and {other!r} in the other"


def parsed(variant: str, budget: int | None = None) -> ModeParameters:
    """Parse the variant's parameters; ``budget`` applies if the mode has one and the variant sets none."""
    mode, params = split(variant)
    return parse(mode, {"budget": budget, **params} if budget is not None and _has_budget(mode) else params)


def split(variant: str) -> tuple[str, Params]:
    """Split a variant into its mode and its parameters, which stay strings.

    Raises:
        UsageError: a parameter is not KEY=VALUE.
    """
    mode, _, listed = variant.partition(":")
    pairs = [pair.partition("=") for pair in listed.split(",") if pair]
    if not all(equals for _, equals, _ in pairs):
        raise UsageError(
            f'The variant "{variant}" is not MODE:KEY=VALUE,KEY=VALUE.',
            hint="For example: speculative:budget=512,tau=0.9",
        )
    return mode, {key: value for key, _, value in pairs}


def with_budgets(variants: Sequence[str], budgets: Sequence[int]) -> tuple[str, ...]:
    """Return each variant at each budget in tokens; unchanged if it sets a budget or its mode has none.

    Raises:
        UsageError: a mode or parameter is unknown, or a budget is out of range.
    """
    found = list[str]()
    for variant in variants:
        mode, params = split(variant)
        if budgets and "budget" not in params and _has_budget(mode):
            found += [f"{variant}{',' if params else ':'}budget={budget}" for budget in budgets]
        else:
            found.append(variant)
    for variant in found:
        parsed(variant)
    return tuple(dict.fromkeys(found))


def _has_budget(mode: str) -> bool:
    return mode in registered() and issubclass(registered()[mode], BudgetParameters)


@dataclass(frozen=True)
class ModelChoice(Load):
    """Model, device, dtype, quantization and host dtype, as on the command line."""

    quantize: str = "none"

    def load(self, progress: Report) -> LoadedModel:
        """Load the weights; ``progress`` is called with each stage, and with "" at the end."""
        from kvchat.models import compile_ahead  # imports torch
        from kvchat.models.load import load_model

        try:
            loaded = load_model(self, progress)
            compile_ahead.finish(progress)
        finally:
            progress("")
        return loaded

    def settings(self) -> dict[str, str]:
        """Return the settings that a result's ``model`` does not include."""
        return {} if self.host_dtype == "model" else {"host_dtype": self.host_dtype}


def mean(values: Iterable[float]) -> float | None:
    """Return the arithmetic mean; None without values."""
    found = list(values)
    return math.fsum(found) / len(found) if found else None


def quantile(values: Sequence[float], share: float) -> float | None:
    """Return the smallest value that at least a ``share`` of the values do not exceed.

    None if less than one value lies beyond it: the 99.9 % quantile needs 1,000 values.
    """
    if not values or len(values) * min(share, 1 - share) < 1 - 1e-9:
        return None
    return sorted(values)[math.ceil(share * len(values) - 1e-9) - 1]


def wilson(right: int, cases: int) -> tuple[float, float] | None:
    """Return the 95 % Wilson score interval of a share; None without cases."""
    if not cases:
        return None
    share, z2 = right / cases, NORMAL_95**2
    middle = (share + z2 / (2 * cases)) / (1 + z2 / cases)
    half = NORMAL_95 / (1 + z2 / cases) * math.sqrt(share * (1 - share) / cases + z2 / (4 * cases**2))
    return max(0.0, middle - half), min(1.0, middle + half)


def sign_test(more: int, fewer: int) -> float:
    """Return the probability that chance splits at least as unevenly as ``more`` and ``fewer``: two-sided, exact.

    For questions that only one of two settings answered, this is McNemar's exact test.
    """
    pairs = more + fewer
    return min(1.0, 2 * sum(math.comb(pairs, each) for each in range(min(more, fewer) + 1)) / (1 << pairs))


def chance(one: Sequence[Row], other: Sequence[Row], figure: str) -> float | None:
    """Apply ``sign_test`` to the cells that both have, by whose ``figure`` is higher; None if they share no cell.

    A list counts as its mean. Refused cells, and questions asked after a switch, are left out.
    """
    sides = [
        {
            tuple(row.get(name) for name in ASKED): fmean(row[figure]) if isinstance(row[figure], list) else row[figure]
            for row in rows
            if figure in row and "asked" not in row
        }
        for rows in (one, other)
    ]
    pairs = [(value, sides[1][place]) for place, value in sides[0].items() if place in sides[1]]
    return sign_test(sum(a > b for a, b in pairs), sum(a < b for a, b in pairs)) if pairs else None
