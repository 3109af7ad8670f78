"""The figures that plots are drawn in: formats, equal files, and what is refused before a measurement."""

from __future__ import annotations

import json
from importlib.util import find_spec

import pytest
from support.plot_result import RESULT
from typer.testing import CliRunner

from kvchat.bench import plots
from kvchat.cli.main import app
from kvchat.errors import UsageError

drawing = pytest.mark.skipif(find_spec("matplotlib") is None, reason="draws: needs matplotlib")


@drawing
def test_equal_data_gives_equal_files(tmp_path):
    for name in ("a.svg", "b.svg"):
        plots.decode(RESULT, tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


@drawing
def test_a_png_is_a_png(tmp_path):
    plots.decode(RESULT, tmp_path / "times.png")
    assert (tmp_path / "times.png").read_bytes().startswith(b"\x89PNG")


@drawing
def test_a_file_that_cannot_be_written_is_an_error_with_its_name(tmp_path):
    (tmp_path / "times.svg").mkdir()
    with pytest.raises(UsageError, match=r"times\.svg cannot be written"):
        plots.decode(RESULT, tmp_path / "times.svg")


@pytest.mark.parametrize(
    ("name", "message"),
    [("times.jpeg", r"does not end in \.svg or \.png"), ("no/times.svg", "There is no folder .*no")],
)
def test_a_plot_that_cannot_be_drawn_is_refused(tmp_path, name, message):
    with pytest.raises(UsageError, match=message):
        plots.check(tmp_path / name)


@drawing
def test_the_command_draws_what_it_measured(tmp_path, monkeypatch):
    monkeypatch.setattr("kvchat.bench.decode.run", lambda *args: RESULT)
    ran = CliRunner().invoke(app, ["bench", "decode", "--json", "--plot", str(tmp_path / "times.svg")])
    assert json.loads(ran.stdout) == RESULT
    assert "times.svg" in ran.stderr
    assert "<svg" in (tmp_path / "times.svg").read_text()


@pytest.mark.parametrize("command", [["bench", "decode"], ["calibrate"]])
def test_without_matplotlib_the_extra_is_named_before_anything_is_measured(command, tmp_path, monkeypatch):
    monkeypatch.setattr(plots, "find_spec", lambda name: None)
    monkeypatch.setattr("kvchat.models.load.load_model", lambda *args: pytest.fail("loaded"))
    monkeypatch.setattr("kvchat.bench.decode.run", lambda *args: pytest.fail("measured"))
    ran = CliRunner().invoke(app, [*command, "--plot", str(tmp_path / "x.svg")])
    assert isinstance(ran.exception, UsageError)
    assert "install 'matplotlib>=3.8'" in str(ran.exception)
