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
    lines = []
    result = draft.run(Draft(tasks=("quote", "story"), tokens=60, rounds=1), CPU, Frame(report=lines.append))
    assert [row["task"] for row in result["rows"]] == ["quote", "story"]
    for row in result["rows"]:
        assert row["same"]
        assert 0 < row["forwards"] <= row["tokens"] <= 60
        assert row["gain"] == pytest.approx(row["tokens_per_s"] / row["tokens_per_s_without"])
        assert row["accepted"] is None if row["forwards"] == row["tokens"] else row["accepted"] > 0
    json.dumps(result)
    assert len(tables(result)[0].rows) == 2


def test_a_task_nobody_knows_is_refused_before_a_model_is_loaded():
    with pytest.raises(UsageError, match="sing"):
        draft.run(Draft(tasks=("sing",)), ModelChoice(model="there is none"))
