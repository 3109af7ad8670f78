"""Questions by turn and the switch matrix: their rows, and that what a mode lost is lost only in that mode."""

from __future__ import annotations

import json

from kvchat.bench import turns
from kvchat.bench.turns import QUESTIONS, Settings, SwitchSettings

STREAMING = "streaming:budget=64,sink=4"


def test_every_turn_asks_for_another_fact():
    result = turns.run(Settings(("full",), cases=1, tokens=300))
    assert json.loads(json.dumps(result)) == result
    assert [row["turn"] for row in result["summary"]] == list(range(1, QUESTIONS + 1))
    assert sum(row["right"] for row in result["summary"]) >= QUESTIONS - 2
    assert len({row["text"] for row in result["rows"]}) >= QUESTIONS - 2


def test_what_streaming_dropped_is_found_after_leaving_it():
    result = turns.switches(SwitchSettings(("full", STREAMING), cases=1, tokens=300, inside=50))
    right = {(row["told"], row["asked"]): row["right"] for row in result["summary"]}
    assert set(right) == {(told, asked) for told in ("full", STREAMING) for asked in ("full", STREAMING)}
    assert right["full", "full"] == right[STREAMING, "full"] == 1
    assert right["full", STREAMING] == right[STREAMING, STREAMING] == 0
