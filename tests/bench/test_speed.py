"""Plots of times: what they show."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from importlib.util import find_spec

import pytest
from support.plot_result import RESULT

from kvchat.bench import plots

pytestmark = pytest.mark.skipif(find_spec("matplotlib") is None, reason="draws: needs matplotlib")


def texts(file):
    return "".join(ET.parse(file).getroot().itertext())


@pytest.fixture
def bars(monkeypatch):
    """Left end, right end and color of every bar drawn."""
    from matplotlib.axes import Axes

    drawn = []
    barh = Axes.barh

    def noting(self, y, width, height=0.8, left=0.0, color=None, **options):
        drawn.append((left, width if isinstance(width, tuple) else left + width, color))
        return barh(self, y, width, height, left=left, color=color, **options)

    monkeypatch.setattr(Axes, "barh", noting)
    return drawn


def test_bars_are_times_and_their_orange_end_is_exposed_recall(tmp_path, bars):
    plots.decode(RESULT, tmp_path / "times.svg")
    assert bars == [
        (0.0, 4.0, plots.BASELINE), (0.0, 8.0, plots.MODE), (0.0, 5.0, plots.MODE), (3.75, 5.0, plots.EXPOSED),
    ]  # fmt: skip


def test_an_svg_names_variants_contexts_reasons_and_the_floor(tmp_path):
    plots.decode(RESULT, tmp_path / "times.svg")
    text = "".join(ET.parse(tmp_path / "times.svg").getroot().itertext())
    for shown in (
        "dynamic", "speculative, 50 % new", "512 tokens", "8,192 tokens", "The offloaded cache needs a GPU.",
        "4 ms · 250 tok/s", "exposed recall", "floor 1.5 ms", "a processor, 2 threads; float32; torch 2",
    ):  # fmt: skip
        assert shown in text


def test_a_prompt_is_drawn_in_chunks_and_in_one_forward_where_that_was_measured(tmp_path, bars):
    rows = [{"tokens": 512, "seconds": 0.5, "one_shot_seconds": 0.25}, {"tokens": 8192, "seconds": 6.5}]
    plots.prefill({**RESULT, "summary": rows}, tmp_path / "prompt.svg")
    assert {(right, color) for _, right, color in bars} == {((0.5, 6.5), plots.MODE), ((0.25,), plots.BASELINE)}
    assert all(shown in texts(tmp_path / "prompt.svg") for shown in ("8,192 tokens", "6.5 s", "0.25 s", "one forward"))
