"""Speculative mode that corrects a fixed share of heads."""

from __future__ import annotations

from kvchat.bench import decode
from kvchat.bench.report import named
from kvchat.bench.settings import Decode
from kvchat.config.profiles import Measured


def test_a_share_of_corrections_is_what_is_corrected(monkeypatch):
    monkeypatch.setattr(decode, "measure", lambda device, dtype: Measured())
    measured = {"shape": "tiny", "contexts": (900,), "budget": 256, "steps": 60, "rounds": 1, "baselines": ()}
    modes = ("full", "speculative")
    rows = decode.run(Decode(**measured, modes=modes, corrections=(0, 0.25, 1)))["rows"]
    assert [row["variant"] for row in rows] == ["full"] + ["speculative"] * 4
    assert [row.get("corrections_set") for row in rows] == [None, None, 0, 0.25, 1]
    assert rows[2]["corrected"] == 0
    assert 0.2 < rows[3]["corrected"] < 0.3
    assert rows[4]["corrected"] == 1
    assert rows[0]["corrected"] is None
    assert "25 % corrected" in named(rows[3])
