"""What a measurement sets against what: ``MODE[:KEY=VALUE[,KEY=VALUE...]]``."""

from __future__ import annotations

from kvchat.config.modes import ModeParameters, parse, registered
from kvchat.engine.session import Session
from kvchat.errors import UsageError
from kvchat.protocol.messages import Params


def enter(session: Session, contender: str) -> None:
    """Switch to the contender's mode, all it does not name at the mode's defaults.

    Raises:
        KvchatError: there is no such mode or parameter, or the mode refuses.
    """
    mode, params = split(contender)
    # What an earlier contender was given would stay, were it not said anew.
    fields = registered()[mode].model_fields if mode in registered() else {}
    session.switch(mode, **{**{name: field.default for name, field in fields.items()}, **params})


def parsed(contender: str, budget: int) -> ModeParameters:
    """The contender's parameters, with ``budget`` where the mode has one and none is named.

    Raises:
        UsageError: an unknown mode or parameter, or a value out of range.
    """
    mode, params = split(contender)
    known = registered()[mode].model_fields if mode in registered() else {}
    return parse(mode, {**({"budget": budget} if "budget" in known else {}), **params})


def split(contender: str) -> tuple[str, Params]:
    """The mode and what is given for it.

    Raises:
        UsageError: what is given is not KEY=VALUE.
    """
    mode, _, listed = contender.partition(":")
    pairs = [pair.partition("=") for pair in listed.split(",") if pair]
    if not all(equals for _, equals, _ in pairs):
        raise UsageError(f'The contender "{contender}" is not MODE:KEY=VALUE,KEY=VALUE.')
    return mode, {key: value for key, _, value in pairs}
