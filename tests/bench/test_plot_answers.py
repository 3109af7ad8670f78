"""Plots of answers: what they show."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from importlib.util import find_spec

import pytest
from support.plot_result import RESULT

from kvchat.bench import plots

pytestmark = pytest.mark.skipif(find_spec("matplotlib") is None, reason="draws: needs matplotlib")

HALF = {"right": 2, "cases": 4, "interval": [0.15, 0.85], "read_tokens": 700.0}
DRAWN = {
    "data": ([{"task": "qa", "variant": "full", "score": 0.42}], ["qa", "full", "42", "what"]),
    "recall": ([{"task": "keys", "variant": "sync", "tokens": 1500, "depth": 0.5, **HALF}], ["keys", "1,500", "50"]),
}


@pytest.mark.parametrize("experiment", DRAWN)
def test_answers_are_drawn_with_their_shares(tmp_path, experiment):
    summary, shown = DRAWN[experiment]
    plots.draw({**RESULT, "experiment": experiment, "what": "what", "summary": summary}, tmp_path / "a.svg")
    texts = [text.strip() for text in ET.parse(tmp_path / "a.svg").getroot().itertext()]
    assert all(any(part in text for text in texts) for part in shown), texts
