"""The ribbon: where each stored token lies, and what of it was read or recalled just now."""

from __future__ import annotations

import pytest
from support.filled_session import SPECULATIVE, STREAMING, filled

from kvchat.protocol.figures import MAX_RIBBON_CELLS


def test_full_is_on_the_device_and_read_everywhere(session):
    snapshot = filled(session, 100).snapshot()
    assert (snapshot.ribbon, snapshot.attended, snapshot.active) == ("DDDD", "9999", 100)


def test_streaming_shows_sinks_window_and_what_is_out_of_reach(session):
    filled(session, 300, "streaming", **STREAMING)
    for token in range(21):
        session.step(token)
    snapshot = session.snapshot()
    assert snapshot.ribbon == "SXXXXXXWWWW"
    assert snapshot.attended == "90000009999"
    assert snapshot.extras["dropped"] == 321 - 128
    assert snapshot.active == 129


def test_speculative_shows_what_was_recalled_just_now_and_what_is_on_the_host(session):
    filled(session, 640, "speculative", **SPECULATIVE)
    session.step(5)
    session.snapshot()
    session.step(700)
    first, second = session.snapshot(), session.snapshot()
    assert first.ribbon[0] == second.ribbon[0] == "S"
    assert second.ribbon.endswith("WWW")
    assert "R" in first.ribbon
    assert "R" not in second.ribbon  # nothing moved in between
    assert set(second.ribbon[1:-3]) <= {"D", "H"}


@pytest.mark.parametrize(
    ("mode", "params"), [("sync", {"budget": 160, "m": 1}), ("freeze", {"profile": "paper", "k": 0.5})]
)
def test_what_comes_back_in_other_modes_is_shown_as_well(session, mode, params):
    filled(session, 500, mode, **params)
    shown = ""
    for token in range(12):
        session.step(100 + 50 * token)
        shown += session.snapshot().ribbon
    assert "R" in shown


def test_what_streaming_dropped_comes_back_with_full(session):
    filled(session, 300, "streaming", **STREAMING)
    session.step(5)
    assert "R" not in session.snapshot().ribbon
    session.switch("full")
    session.step(6)
    assert session.snapshot().ribbon[2:5] == "RRR"


def test_cells_grow_with_the_conversation_and_stay_within_the_limit(session, monkeypatch):
    filled(session, 600)
    monkeypatch.setattr("kvchat.engine.metrics.MAX_RIBBON_CELLS", 8)
    snapshot = session.snapshot()
    assert (snapshot.cell_tokens, len(snapshot.ribbon)) == (96, 7)
    assert MAX_RIBBON_CELLS == 1024
