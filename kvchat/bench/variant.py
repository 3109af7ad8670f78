"""The notation of a variant: ``MODE[:KEY=VALUE[,KEY=VALUE...]]``."""

from __future__ import annotations

from kvchat.config.modes import BudgetParameters, ModeParameters, parse, registered
from kvchat.engine.session import Session
from kvchat.errors import UsageError
from kvchat.protocol.figures import Params


def enter(session: Session, variant: str) -> None:
    """Enter the variant's mode with the parameters that it names and no others.

    Raises:
        KvchatError: an unknown mode or parameter, or the mode cannot be entered.
    """
    session.enter(parse(*split(variant)))


def parsed(variant: str, budget: int) -> ModeParameters:
    """Parse the variant's parameters; ``budget`` is used where the mode works with one and the variant names none.

    Raises:
        UsageError: an unknown mode or parameter, or a value out of range.
    """
    mode, params = split(variant)
    budgeted = mode in registered() and issubclass(registered()[mode], BudgetParameters)
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
