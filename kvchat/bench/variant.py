"""The notation of a variant: ``MODE[:KEY=VALUE[,KEY=VALUE...]]``."""

from __future__ import annotations

from kvchat.config.modes import ModeParameters, parse, registered
from kvchat.engine.session import Session
from kvchat.errors import UsageError
from kvchat.protocol.messages import Params


def enter(session: Session, variant: str) -> None:
    """Switch to the variant's mode; parameters that it does not name have the mode's defaults.

    Raises:
        KvchatError: an unknown mode or parameter, or the mode cannot be entered.
    """
    mode, params = split(variant)
    # A parameter keeps the value that an earlier variant was given unless it is given again.
    fields = registered()[mode].model_fields if mode in registered() else {}
    session.switch(mode, **{**{name: field.default for name, field in fields.items()}, **params})


def parsed(variant: str, budget: int) -> ModeParameters:
    """Parse the variant's parameters; ``budget`` is used where the mode has one and the variant names none.

    Raises:
        UsageError: an unknown mode or parameter, or a value out of range.
    """
    mode, params = split(variant)
    known = registered()[mode].model_fields if mode in registered() else {}
    return parse(mode, {**({"budget": budget} if "budget" in known else {}), **params})


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
