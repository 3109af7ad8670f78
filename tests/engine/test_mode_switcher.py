"""Parameters given at run time: those of one mode, and those that all share."""

from __future__ import annotations

from support.loads import entering

from kvchat.config.modes import registered
from kvchat.engine.session import Session
from kvchat.protocol.messages import Load


def test_a_budget_holds_in_every_mode_and_tau_only_where_it_was_said(model):
    session = Session(model, entering("speculative", {"budget": 128, "tau": -2.0}))
    assert session.switch("freeze").params["tau"] == registered()["freeze"]().tau
    assert session.switch("streaming").params["budget"] == 128
    assert session.switch(budget=96).params["budget"] == 96
    back = session.switch("speculative").params
    assert (back["budget"], back["tau"]) == (96, -2.0)


def test_freeze_has_a_budget_only_if_it_is_given_to_freeze_and_says_that_it_forgets(model):
    session = Session(model, entering("speculative", {"budget": 128}))
    assert session.switch("freeze").params["budget"] is None
    assert not session.snapshot().badges
    assert session.switch(budget=120).params["budget"] == 120
    (badge,) = session.snapshot().badges
    assert badge.partition(":")[0] == "capped"
    assert session.switch("streaming").params["budget"] == 128
    assert session.switch("freeze").params["budget"] == 120
    assert session.switch(budget=None).params["budget"] is None
    assert not session.snapshot().badges
    session.close()


def test_values_given_for_one_mode_reach_no_other(model) -> None:
    given = {"speculative": {"tau": 0.9, "budget": 128}, "freeze": {}}
    session = Session(model, Load(mode="freeze", given=given))
    assert session.info.params["tau"] == 0.5
    assert session.switch("speculative").params["tau"] == 0.9
    assert session.switch("streaming").params["budget"] == 128
    session.close()


def test_of_shared_values_the_last_given_counts(model) -> None:
    session = Session(
        model, Load(mode="speculative", given={"speculative": {"budget": 128}, "streaming": {"budget": 256}})
    )
    assert session.info.params["budget"] == 256
    assert session.switch("speculative", budget=192).params["budget"] == 192
    assert session.switch("streaming").params["budget"] == 192
    session.close()


def test_a_later_shared_value_is_not_undone_by_a_plain_switch(model) -> None:
    session = Session(model, entering("speculative", {"budget": 128}))
    session.switch("streaming", budget=256)
    assert session.switch("speculative").params["budget"] == 256
    assert session.switch("streaming").params["budget"] == 256
    session.close()


def test_a_switch_tells_what_was_given_so_far(model) -> None:
    """Also what is left to kvchat again, and nothing of what kvchat chose."""
    session = Session(model, entering("speculative", {"tau": 0.9}))
    first, second = session.switch(budget=128), session.switch("streaming", budget=None)
    assert first.given == {"speculative": {"tau": 0.9, "budget": 128}}
    assert second.given == {"speculative": {"tau": 0.9}, "streaming": {"budget": None}}
    assert second.params["budget"] is not None
    session.close()
