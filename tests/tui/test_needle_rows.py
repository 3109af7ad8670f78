"""Rows of a needle search: waiting, found, missed, refused."""

from __future__ import annotations

from support.message import lacks

from kvchat.protocol.figures import Run, Stats
from kvchat.protocol.messages import Compared, Comparing, Sampling, Variant
from kvchat.tui.comparisons import FOUND, MISSED, WAITING, needle_rows, verdict
from kvchat.tui.state import RunningComparison

MODES = ("full", "streaming", "sync", "freeze")


def test_rows_fill_while_the_modes_answer():
    shown = RunningComparison("What?", "bundled", tuple(map(Variant, MODES)), Sampling(), fact="123")
    shown.note(Comparing(1, "It is\n123", 4))
    assert needle_rows(shown) == [
        ("full", "", WAITING, "", "", ""),
        ("streaming", "It is 123", WAITING, "", "", ""),
        ("sync", "", WAITING, "", "", ""),
        ("freeze", "", WAITING, "", "", ""),
    ]
    runs = (
        Run("full", {}, ("It is ", "123."), stats=Stats(read_share=1.0, decode_tokens_per_s=20.0)),
        Run("streaming", {}, ("It is \x1b7.",), stats=Stats(read_share=0.25)),
        Run("sync", {}, refusal="It does not fit."),
    )
    shown.finish(Compared(runs, 900))
    assert needle_rows(shown) == [
        ("full", "It is 123.", FOUND, "100 %", "0 B", "20.0"),
        ("streaming", "It is ␛7.", MISSED, "25 %", "0 B", "n/a"),
        ("sync", "It does not fit.", "refused", "", "", ""),
        ("freeze", "", "", "", "", ""),
    ]
    assert not lacks(verdict(shown), "full found", "100 %", "streaming did not")
