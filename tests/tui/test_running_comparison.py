"""A comparison while it is made: what it says is being done, and when it is over."""

from __future__ import annotations

from kvchat.protocol.figures import Run
from kvchat.protocol.messages import Compared, Comparing, Sampling, Variant
from kvchat.tui.state import RunningComparison


def test_the_stage_follows_the_engine_until_the_result_is_there():
    shown = RunningComparison("What?", "bundled", (Variant("full"), Variant("sync", {"budget": 128})), Sampling())
    stages = [shown.stage]
    shown.read(1000, 2000)
    stages.append(shown.stage)
    shown.note(Comparing(1, "It is", 4))
    stages.append(shown.stage)
    shown.note(Comparing(1, "It is", 4, checked=3))
    stages.append(shown.stage)
    assert stages == [
        "waiting for the engine …",
        "reading 1,000 of 2,000 tokens …",
        "sync budget=128 answers: 4 tok",
        "sync budget=128 is given the first answer: 3 tok",
    ]
    assert shown.progress[1].text == "It is"
    assert not shown.is_over
    runs = (Run("full", {}), Run("sync", {"budget": 128}))
    shown.finish(Compared(runs, 2000))
    assert shown.is_over
    assert (shown.result.question, shown.result.prompt_tokens, shown.result.runs) == ("What?", 2000, runs)


def test_an_error_ends_it_too():
    assert RunningComparison("What?", "bundled", (), Sampling(), error="stopped").is_over
