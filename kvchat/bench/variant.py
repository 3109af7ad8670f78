"""The notation of a variant: ``MODE[:KEY=VALUE[,KEY=VALUE...]]``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from kvchat.config.modes import BudgetParameters, ModeParameters, parse, registered
from kvchat.errors import UsageError
from kvchat.protocol.figures import Params

if TYPE_CHECKING:
    from kvchat.engine.session import Session


def enter(session: Session, variant: str) -> None:
    """Enter the variant's mode with the parameters that it names and no others.

    Raises:
        KvchatError: an unknown mode or parameter, or the mode cannot be entered.
    """
    session.enter(parsed(variant))


def parsed(variant: str, budget: int | None = None) -> ModeParameters:
    """Parse the variant's parameters; ``budget`` is used where the mode works with one and the variant names none.

    Raises:
        UsageError: an unknown mode or parameter, or a value out of range.
    """
    mode, params = split(variant)
    budgeted = budget is not None and mode in registered() and issubclass(registered()[mode], BudgetParameters)
    return parse(mode, {**({"budget": budget} if budgeted else {}), **params})


def split(variant: str) -> tuple[str, Params]:
    """Split into the mode and its parameters, still strings.

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
    """Each variant at each budget in tokens; one that names a budget, or whose mode has none, stays as it is.

    Raises:
        UsageError: an unknown mode or parameter, or a budget out of range.
    """
    found = [at for variant in variants for at in _at_budgets(variant, budgets)]
    for variant in found:
        parsed(variant)
    return tuple(dict.fromkeys(found))


def _at_budgets(variant: str, budgets: Sequence[int]) -> Iterator[str]:
    mode, params = split(variant)
    budgeted = mode in registered() and issubclass(registered()[mode], BudgetParameters)
    if not budgeted or not budgets or "budget" in params:
        yield variant
        return
    for budget in budgets:
        yield f"{variant}{',' if params else ':'}budget={budget}"
