"""A comparison while it is made: what it says is being done, and when it is over."""

from __future__ import annotations

from support.message import lacks

from kvchat.protocol.figures import Run
from kvchat.protocol.messages import Compared, Comparing, Sampling, Variant
from kvchat.tui.state import RunningComparison


def test_the_stage_follows_the_engine_until_the_result_is_there():
    shown = RunningComparison("What?", "bundled", (Variant("full"), Variant("sync", {"budget": 128})), Sampling())
    assert "waiting" in shown.stage
    shown.read(1000, 2000)
    assert "1,000 of 2,000" in shown.stage
    shown.note(Comparing(1, "It is", 4))
    assert not lacks(shown.stage, "sync budget=128", "4 tok")
    shown.note(Comparing(1, "It is", 4, checked=3))
    assert not lacks(shown.stage, "sync budget=128", "3 tok")
    assert shown.progress[1].text == "It is"
    assert not shown.is_over
    runs = (Run("full", {}), Run("sync", {"budget": 128}))
    shown.finish(Compared(runs, 2000))
    assert shown.is_over
    assert (shown.result.question, shown.result.prompt_tokens, shown.result.runs) == ("What?", 2000, runs)


def test_an_error_ends_it_too():
    assert RunningComparison("What?", "bundled", (), Sampling(), error="stopped").is_over
