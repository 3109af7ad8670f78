"""Plots: what they show, their formats, and what is refused before a measurement."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from importlib.util import find_spec

import pytest
from typer.testing import CliRunner

from kvchat.bench import plot
from kvchat.cli.main import app
from kvchat.engine import calibration
from kvchat.errors import UsageError

drawing = pytest.mark.skipif(find_spec("matplotlib") is None, reason="draws: needs kvchat[plot]")

RESULT = {
    "experiment": "decode",
    "model": {"name": "tiny", "dtype": "float32"},
    "environment": {"gpu": None, "processor": "a processor", "threads": 2, "torch": "2", "transformers": "5"},
    "floor_ms": 1.5,
    "rows": [
        {"context": 512, "variant": "dynamic", "ms": 4.0, "tokens_per_s": 250.0},
        {"context": 512, "variant": "offloaded", "failed": "The offloaded cache needs a GPU."},
        {"context": 8192, "variant": "full", "change_rate": "natural", "ms": 8.0, "tokens_per_s": 125.0},
        {
            "context": 8192,
            "variant": "speculative",
            "change_rate": 0.5,
            "ms": 5.0,
            "tokens_per_s": 200.0,
            "exposed_ms": 1.25,
        },
    ],
}


@pytest.fixture
def bars(monkeypatch):
    """Left end, right end and color of every bar drawn."""
    from matplotlib.axes import Axes

    drawn = []
    barh = Axes.barh

    def noting(self, y, width, left=0.0, color=None, **options):
        drawn.append((left, left + width, color))
        return barh(self, y, width, left=left, color=color, **options)

    monkeypatch.setattr(Axes, "barh", noting)
    return drawn


@drawing
def test_bars_are_times_and_their_orange_end_is_exposed_recall(tmp_path, bars):
    plot.decode(RESULT, tmp_path / "times.svg")
    assert bars == [
        (0.0, 4.0, plot.BASELINE), (0.0, 8.0, plot.MODE), (0.0, 5.0, plot.MODE), (3.75, 5.0, plot.EXPOSED),
    ]  # fmt: skip


@drawing
def test_an_svg_names_variants_contexts_reasons_and_the_floor(tmp_path):
    plot.decode(RESULT, tmp_path / "times.svg")
    text = "".join(ET.parse(tmp_path / "times.svg").getroot().itertext())
    for shown in (
        "dynamic", "speculative, 50 % new", "512 tokens", "8,192 tokens", "The offloaded cache needs a GPU.",
        "4 ms · 250 tok/s", "exposed recall", "floor 1.5 ms", "a processor, 2 threads; float32; torch 2",
    ):  # fmt: skip
        assert shown in text


@drawing
def test_equal_data_gives_equal_files(tmp_path):
    for name in ("a.svg", "b.svg"):
        plot.decode(RESULT, tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


@drawing
def test_a_png_is_a_png(tmp_path):
    plot.decode(RESULT, tmp_path / "times.png")
    assert (tmp_path / "times.png").read_bytes().startswith(b"\x89PNG")


@drawing
def test_the_heat_map_shows_every_pair_and_marks_the_representatives(tmp_path):
    (file,) = calibration.paths.bundled_calibration_dir().glob("*.json")
    shipped = calibration.load(file)
    plot.calibration(shipped.similarity, calibration.representatives(shipped, "retrieval"), tmp_path / "heads.svg")
    texts = [text.strip() for text in ET.parse(tmp_path / "heads.svg").getroot().itertext() if text.strip()]
    shown = [text for text in texts if len(text) == 4 and text[1] == "."]
    assert shown == [f"{value:.2f}" for layer in shipped.similarity for row in layer for value in row]
    assert texts.count("▸") == 8
    assert [text for text in texts if text.startswith("layer")] == [f"layer {layer}" for layer in range(8)]


@drawing
def test_a_file_that_cannot_be_written_is_an_error_with_its_name(tmp_path):
    (tmp_path / "times.svg").mkdir()
    with pytest.raises(UsageError, match=r"times\.svg cannot be written"):
        plot.decode(RESULT, tmp_path / "times.svg")


@pytest.mark.parametrize(
    ("name", "message"), [("times.jpeg", r"neither \.svg nor \.png"), ("no/times.svg", "There is no folder .*no")]
)
def test_a_plot_that_cannot_be_drawn_is_refused(tmp_path, name, message):
    with pytest.raises(UsageError, match=message):
        plot.check(tmp_path / name)


@drawing
def test_the_command_draws_what_it_measured(tmp_path, monkeypatch):
    monkeypatch.setattr("kvchat.bench.decode.run", lambda *args: RESULT)
    ran = CliRunner().invoke(app, ["bench", "decode", "--json", "--plot", str(tmp_path / "times.svg")])
    assert json.loads(ran.stdout) == RESULT
    assert "times.svg" in ran.stderr
    assert "<svg" in (tmp_path / "times.svg").read_text()


@drawing
def test_calibrate_draws_what_it_measured(tmp_path, monkeypatch):
    (file,) = calibration.paths.bundled_calibration_dir().glob("*.json")
    monkeypatch.setattr("kvchat.engine.model.load.load_model", lambda *args: None)
    monkeypatch.setattr(calibration, "default_samples", lambda model: [])
    monkeypatch.setattr(calibration, "calibrate", lambda *args: calibration.load(file))
    arguments = ["calibrate", "--out", str(tmp_path / "heads.json"), "--plot", str(tmp_path / "heads.svg")]
    ran = CliRunner().invoke(app, arguments)
    assert ran.exit_code == 0, ran.output
    assert (tmp_path / "heads.json").read_text() == file.read_text()
    assert "layer 7" in "".join(ET.parse(tmp_path / "heads.svg").getroot().itertext())


@pytest.mark.parametrize("command", [["bench", "decode"], ["calibrate"]])
def test_without_matplotlib_the_extra_is_named_before_anything_is_measured(command, tmp_path, monkeypatch):
    monkeypatch.setattr(plot, "find_spec", lambda name: None)
    monkeypatch.setattr("kvchat.engine.model.load.load_model", lambda *args: pytest.fail("loaded"))
    monkeypatch.setattr("kvchat.bench.decode.run", lambda *args: pytest.fail("measured"))
    ran = CliRunner().invoke(app, [*command, "--plot", str(tmp_path / "x.svg")])
    assert isinstance(ran.exception, UsageError)
    assert "pip install 'kvchat[plot]'" in str(ran.exception)
