"""Rows of numbers: complete, aligned, honest about what is missing."""

from __future__ import annotations

from kvchat.config.modes import PARAMETERS
from kvchat.protocol.messages import Gpu, Snapshot
from kvchat.tui.widgets.panels import (
    WIDTH,
    Rows,
    context_rows,
    extra_rows,
    gpu_rows,
    memory_rows,
    mode_rows,
    recall_rows,
)


def snapshot(**changes: object) -> Snapshot:
    given = {"mode": "full", "params": {}, "active": 0.0, "total": 0, "context": 0, "kv_device_bytes": 0}
    return Snapshot(**{**given, "kv_host_bytes": 0, **changes})


def as_dict(rows: Rows) -> dict[str, str]:
    return dict(rows)


def test_few_parameters_stand_alone_and_many_are_paired():
    assert mode_rows(snapshot()) == [("parameters", "none")]
    assert mode_rows(snapshot(params={"budget": None, "tau": 0.8})) == [("budget", "auto"), ("tau", "0.8")]


def test_many_parameters_share_lines_that_fit():
    assert mode_rows(snapshot(params={"a": 1, "b": True, "c": 3, "d": 4, "e": 5})) == [
        ("a · b · c · d", "1 · yes · 3 · 4"),
        ("e", "5"),
    ]
    for mode, cls in PARAMETERS.items():
        params = cls().model_dump()
        rows = mode_rows(snapshot(mode=mode, params=params))
        assert sorted(" · ".join(label for label, _ in rows).split(" · ")) == (sorted(params) or ["parameters"])
        assert all(len(label) + 1 + len(value) <= WIDTH for label, value in rows)
        assert len(rows) <= 8


def test_what_is_not_read_and_what_was_computed_with_less():
    rows = as_dict(context_rows(snapshot(active=512.0, total=2048, context=16384, reduced_tokens=120)))
    assert rows["stored"] == "2,048 of 16,384"
    assert rows["not read"] == "75 %"
    assert rows["reduced context"] == "120 tok"
    assert "reduced context" not in as_dict(context_rows(snapshot(total=1)))


def test_missing_readings_are_never_zero():
    assert as_dict(recall_rows(snapshot()))["hit rate"] == "n/a"
    assert as_dict(recall_rows(snapshot()))["p50 / p95"] == "n/a"
    memory = as_dict(memory_rows(snapshot()))
    assert memory["GPU"] == memory["torch"] == "n/a"
    allocated = as_dict(memory_rows(snapshot(torch_allocated=2**30, torch_reserved=2**31)))
    assert allocated["torch"] == "1.0 GiB of 2.0 GiB"
    assert as_dict(gpu_rows(Gpu("H200", used=2**30)))["load"] == "n/a · n/a · n/a"
    assert as_dict(gpu_rows(Gpu("H200")))["used"] == "n/a"


def test_extras_are_shown_as_they_come():
    assert extra_rows({"pages a step": 1.5, "note": "x"}) == [("pages a step", "1.5"), ("note", "x")]
