"""What a measurement sets against what: ``MODE[:KEY=VALUE[,KEY=VALUE...]]``."""

from __future__ import annotations

from kvchat.engine.session import Session
from kvchat.parameters import PARAMETERS
from kvchat.protocol import Params


def enter(session: Session, contender: str) -> None:
    """Switch to the contender's mode, all it does not name at the mode's defaults.

    Raises:
        KvchatError: there is no such mode or parameter, or the mode refuses.
    """
    mode, _, pairs = contender.partition(":")
    params: Params = dict(pair.split("=") for pair in pairs.split(",") if pair)
    # What an earlier contender was given would stay, were it not said anew.
    fields = PARAMETERS[mode].model_fields if mode in PARAMETERS else {}
    session.switch(mode, **{**{name: field.default for name, field in fields.items()}, **params})
