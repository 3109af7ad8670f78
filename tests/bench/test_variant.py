"""What a variant sends to a session: what it names, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest

import kvchat
from kvchat.bench.frame import enter, parsed
from kvchat.config.modes import ModeParameters


class Entered:
    """A session that notes the parameters it is to enter a mode with."""

    def enter(self, parameters: ModeParameters) -> None:
        self.parameters = parameters


@pytest.mark.parametrize(
    ("variant", "named"),
    [
        ("freeze:profile=paper", {"profile", "score", "recovery", "tau", "k", "K"}),  # by the profile itself
        ("sync:budget=140", {"budget"}),
        ("full", set()),
    ],
)
def test_only_what_is_named_is_sent(variant: str, named: set[str]) -> None:
    session: Any = Entered()
    enter(session, variant)
    assert session.parameters.model_fields_set == named


def test_a_variant_forgets_what_an_earlier_one_was_given() -> None:
    session = kvchat.load("bundled")
    enter(session, "speculative:budget=128,unit=page,tau=0.1,sink=4,window=32")
    enter(session, "speculative:budget=160,unit=page")
    assert session.info.params["tau"] == 0.8
    enter(session, "streaming")
    assert session.info.params["budget"] == 512
    assert parsed("freeze:K=8", 300).model_fields_set == {"K"}
    assert parsed("sync:m=3", 300).model_fields_set == {"m", "budget"}
