"""Recall by its time: bars as long as there are steps, divided by what of their time was hidden."""

from __future__ import annotations

from kvchat.protocol.messages import RECALL_EDGES_MS, RecallBin
from kvchat.tui.widgets.charts import EXPOSED, HIDDEN, bar, label, occupied


def test_a_bar_is_as_long_as_there_are_steps_and_divided_by_their_time():
    drawn = [
        "".join(text for text, _ in bar(one, 40, 20))
        for one in (RecallBin(40, 3, 1), RecallBin(20, 0, 2), RecallBin(1, 1, 0), RecallBin())
    ]
    assert drawn == [HIDDEN * 15 + EXPOSED * 5, EXPOSED * 10 + " " * 10, HIDDEN + " " * 19, " " * 20]


def test_only_the_times_that_occurred_are_shown():
    bins = [RecallBin()] * (len(RECALL_EDGES_MS) + 1)
    assert not occupied(bins)
    bins[2] = bins[4] = RecallBin(3, 1, 1)
    assert [label(place) for place in occupied(bins)] == ["0.2–0.5 ms", "0.5–1 ms", "1–2 ms"]
    assert list(occupied(bins)) == [2, 3, 4]
    assert (label(0), label(len(RECALL_EDGES_MS))) == ("< 0.1 ms", "≥ 50 ms")
