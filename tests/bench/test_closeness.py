"""Plots of how near a mode stays to full: what they show."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from importlib.util import find_spec

import pytest
from support.plot_result import RESULT

from kvchat.bench import plots
from kvchat.errors import UsageError

pytestmark = pytest.mark.skipif(find_spec("matplotlib") is None, reason="draws: needs matplotlib")


@pytest.fixture
def lines(monkeypatch):
    """The values of every line drawn, by its label."""
    from matplotlib.axes import Axes

    drawn, plotted = {}, Axes.plot

    def noting(self, *values, label="", **options):
        drawn[label] = list(values[-1])
        return plotted(self, *values, label=label, **options)

    monkeypatch.setattr(Axes, "plot", noting)
    return drawn


def row(variant, passage, *nats):
    return {"variant": variant, "passage": passage, "nats": nats}


def draw(tmp_path, experiment, **result):
    plots.draw({**RESULT, "experiment": experiment, "what": "what", **result}, tmp_path / "a.svg")
    return "".join(ET.parse(tmp_path / "a.svg").getroot().itertext())


def test_perplexity_is_drawn_along_the_passage_beyond_full(tmp_path, lines):
    rows = [row("full", 0, 1.0, 2.0), row("sync", 0, 1.5, 2.0), row("sync", 1, 9.0, 9.0), {"refused": "no"}]
    assert "nats beyond full" in draw(tmp_path, "perplexity", rows=rows, summary=[])
    assert lines == {"sync": [0.5, 0.25]}, "a passage that full did not read is left out, tokens are smoothed"


def test_a_text_that_full_cannot_read_is_drawn_in_nats(tmp_path, lines):
    assert "nats a token" in draw(tmp_path, "perplexity", rows=[row("streaming", 0, 1.0, 2.0)], summary=[])
    assert lines == {"streaming": [1.0, 1.5]}


def test_a_result_without_what_is_drawn_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"perplexity cannot be drawn\. KeyError: 'nats'"):
        draw(tmp_path, "perplexity", rows=[{"variant": "full", "passage": 0}], summary=[])
