"""The benchmark of drafts: both ways answer the same task, and the rows say how many forwards it took."""

from __future__ import annotations

import json

import pytest

from kvchat.bench import draft
from kvchat.bench.frame import Frame, ModelChoice
from kvchat.bench.report import tables
from kvchat.bench.settings import Draft
from kvchat.errors import UsageError

CPU = ModelChoice(device="cpu", dtype="float32")


def test_rows_tell_what_drafts_saved():
    lines, settings = [], Draft(tasks=("quote", "story"), contexts=(700,), tokens=60, rounds=1)
    result = draft.run(settings, CPU, Frame(report=lines.append))
    assert [(row["context"], row["task"], row["temperature"], row["draft"]) for row in result["rows"]] == [
        (700, task, temperature, kind)
        for task in ("quote", "story")
        for temperature in (0.0, 0.8)
        for kind in ("lookup", "window", "auto")
    ]
    for row in result["rows"]:
        assert row["same"]
        assert 0 < row["forwards"] <= row["tokens"] == 60
        assert row["processor_gain"] > 0
        assert row["gain"] == pytest.approx(row["ms_without"] / row["ms"])
        if row["drafted"]:
            assert row["tokens_a_round"] >= 1
            assert row["accepted"] == pytest.approx((row["tokens"] - row["forwards"]) / row["drafted"])
        else:
            assert row["accepted"] is None
    assert any(row["drafted"] for row in result["rows"])
    json.dumps(result)
    assert len(tables(result)[0].rows) == 12


def test_without_a_book_the_task_is_all_that_is_asked():
    asked = Draft(drafts=("lookup",), tasks=("list",), temperatures=(0.0,), contexts=(0, 64), tokens=8, rounds=1)
    assert [row["context"] for row in draft.run(asked, CPU)["rows"]] == [0, 64]


def test_a_task_nobody_knows_is_refused_before_a_model_is_loaded():
    with pytest.raises(UsageError, match="sing"):
        draft.run(Draft(tasks=("sing",)), ModelChoice(model="there is none"))
