"""The plot of a calibration."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from dataclasses import replace
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from kvchat.bench import plots
from kvchat.cli.main import app
from kvchat.engine import calibration

pytestmark = pytest.mark.skipif(find_spec("matplotlib") is None, reason="draws: needs matplotlib")


def test_the_heat_map_shows_every_pair_and_marks_the_representatives(tmp_path):
    (file,) = calibration.paths.bundled_calibration_dir().glob("*.json")
    shipped = calibration.load(file)
    plots.calibration(shipped.similarity, calibration.representatives(shipped, "retrieval"), tmp_path / "heads.svg")
    texts = [text.strip() for text in ET.parse(tmp_path / "heads.svg").getroot().itertext() if text.strip()]
    shown = [text for text in texts if len(text) == 4 and text[1] == "."]
    assert shown == [f"{value:.2f}" for layer in shipped.similarity for row in layer for value in row]
    assert texts.count("▸") == 8
    assert [text for text in texts if text.startswith("layer")] == [f"layer {layer}" for layer in range(8)]


def test_calibrate_draws_what_it_measured(tmp_path, monkeypatch):
    (file,) = calibration.paths.bundled_calibration_dir().glob("*.json")
    shipped = calibration.load(file)
    monkeypatch.setattr("kvchat.models.load.load_model", lambda *args: SimpleNamespace(context=8192))
    monkeypatch.setattr(calibration, "default_samples", lambda model: [])
    monkeypatch.setattr(calibration, "calibrate", lambda *args: replace(shipped, choice=None))
    monkeypatch.setattr("kvchat.bench.coverage.choose", lambda *args: shipped.choice)
    arguments = ["calibrate", "--out", str(tmp_path / "heads.json"), "--plot", str(tmp_path / "heads.svg")]
    ran = CliRunner().invoke(app, arguments)
    assert ran.exit_code == 0, ran.output
    assert (tmp_path / "heads.json").read_text() == file.read_text()
    assert "layer 7" in "".join(ET.parse(tmp_path / "heads.svg").getroot().itertext())
