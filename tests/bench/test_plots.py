"""What plots show."""

import json
import xml.etree.ElementTree as ET

import pytest
from support.plot_result import RESULT
from typer.testing import CliRunner

from kvchat.bench import plots
from kvchat.cli.main import app
from kvchat.errors import UsageError


@pytest.fixture
def lines(monkeypatch):
    """The points of every line drawn, by its label."""
    from matplotlib.axes import Axes

    drawn, plotted = {}, Axes.plot

    def noting(self, x, y, *style, label="", **options):
        drawn[label] = list(zip(x, y, strict=True))
        return plotted(self, x, y, *style, label=label, **options)

    monkeypatch.setattr(Axes, "plot", noting)
    return drawn


def draw(tmp_path, experiment, **result):
    plots.draw({**RESULT, "experiment": experiment, "what": "what", **result}, tmp_path / "a.svg")
    return "".join(ET.parse(tmp_path / "a.svg").getroot().itertext())


def test_a_token_s_time_is_a_line_over_the_context_for_each_variant_that_did_not_fail(tmp_path, lines):
    text = draw(tmp_path, "decode")
    assert lines == {
        "dynamic": [(512, 4.0)], "full": [(512, 3.0), (8192, 8.0)], "speculative, 50 % new": [(8192, 5.0)],
    }  # fmt: skip
    assert all(shown in text for shown in ("floor 1.5 ms", "tokens stored", "a processor, 2 threads; float32; torch 2"))


def test_divergence_is_drawn_by_what_is_read_a_line_for_all_budgets_of_a_mode(tmp_path, lines):
    rows = [("sync:m=5,budget=512", 600.0, 0.1), ("sync:m=5,budget=256", 400.0, 0.2), ("full", 900.0, 0.0)]
    summary = [{"variant": name, "read_mean": read, "kl_mean": kl} for name, read, kl in rows]
    draw(tmp_path, "agreement", summary=[*summary, {"variant": "freeze", "refused": "No."}])
    assert lines == {"sync:m=5": [(400.0, 0.2), (600.0, 0.1)]}


def test_facts_found_are_drawn_by_what_is_read_all_lengths_and_depths_together(tmp_path, lines):
    row = {"task": "keys", "variant": "sync:budget=512", "cases": 4, "right": 4, "read_tokens": 600.0}
    summary = [row, {**row, "right": 2, "read_tokens": 500.0}, {**row, "variant": "sync:budget=64", "cases": 0}]
    assert "keys" in draw(tmp_path, "recall", summary=summary)
    assert lines == {"sync": [(550.0, 0.75)]}
    lines.clear()
    draw(tmp_path, "recall", summary=[{**row, "task": "switches", "asked": "freeze"}])
    assert lines == {"freeze": [(600.0, 1.0)]}, "it is asked in another mode than it was told in"


def test_a_result_without_what_is_drawn_and_one_without_a_picture_are_refused(tmp_path):
    with pytest.raises(UsageError, match=r"agreement cannot be drawn\. KeyError: 'kl_mean'"):
        draw(tmp_path, "agreement", summary=[{"variant": "full"}])
    with pytest.raises(UsageError, match=r'no plot of "prefill". There are plots of agreement, decode, recall'):
        draw(tmp_path, "prefill", summary=[])


# ---- The figures that plots are drawn in: formats, equal files, and what is refused before a measurement


def test_equal_data_gives_equal_files(tmp_path):
    for name in ("a.svg", "b.svg"):
        plots.decode(RESULT, tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_a_png_is_a_png(tmp_path):
    plots.decode(RESULT, tmp_path / "times.png")
    assert (tmp_path / "times.png").read_bytes().startswith(b"\x89PNG")


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


def test_the_command_draws_what_it_measured(tmp_path, monkeypatch):
    monkeypatch.setattr("kvchat.bench.decode.run", lambda *args: RESULT)
    ran = CliRunner().invoke(app, ["bench", "decode", "--json", "--plot", str(tmp_path / "times.svg")])
    assert json.loads(ran.stdout) == RESULT
    assert "times.svg" in ran.stderr
    assert "<svg" in (tmp_path / "times.svg").read_text()


def test_without_matplotlib_the_extra_is_named_before_anything_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(plots, "find_spec", lambda name: None)
    monkeypatch.setattr("kvchat.models.load.load_model", lambda *args: pytest.fail("loaded"))
    monkeypatch.setattr("kvchat.bench.decode.run", lambda *args: pytest.fail("measured"))
    ran = CliRunner().invoke(app, ["bench", "decode", "--plot", str(tmp_path / "x.svg")])
    assert isinstance(ran.exception, UsageError)
    assert "install 'matplotlib>=3.8'" in str(ran.exception)
