"""Reports: their tables and notes, and the results that they reject."""

import json

import pytest
from typer.testing import CliRunner

from kvchat.bench import report
from kvchat.bench.frame import COMPARED, methods
from kvchat.bench.report import Column, Table, figure, interval, share, tabulated, variant
from kvchat.cli.main import app
from kvchat.errors import UsageError

ROW = {"variant": "sync:m=7", "kl_mean": 0.5, "kl_median": 0.25, "kl_99": None, "same_top": 0.75, "decoded": 8}
ROW |= {"same_top_interval": [0.5, 0.9], "read_mean": 100.0, "covered": 0.9, "covered_least": 0.5}
RESULT = {"experiment": "agreement", "what": "KL", "settings": {"tokens": 8}, "methods": methods(["sync:m=7"])}
RESULT |= {"environment": dict.fromkeys(COMPARED, "x") | {"gpu": None, "threads": 1}, "cells": 1, "rows": []}
RESULT |= {"model": {"name": "tiny", "dtype": "float32", "weights": ""}, "summary": [ROW]}


@pytest.fixture
def write(tmp_path):
    """Write the result with changes; parts that are None are left out."""

    def write(name, **changes):
        result = {part: value for part, value in {**RESULT, **changes}.items() if value is not None}
        (tmp_path / name).write_text(json.dumps(result))
        return tmp_path / name

    return write


def run(*arguments):
    return CliRunner().invoke(app, ["bench", *map(str, arguments)])


def test_reports_combine_several_results(write):
    one, other = write("a.json"), write("b.json")
    text = run("report", one, other)
    assert text.stdout.count("| sync, m=7 | 0.5000 | 0.2500 | 75.0 % | 50 – 90 |") == 2
    assert "x, 1 thread; torch x, transformers x." in text.stdout


def test_results_of_different_environments_are_rejected(write):
    other = write("b.json", environment=RESULT["environment"] | {"gpu": "H200"})
    with pytest.raises(UsageError, match=r"a\.json and .*b\.json cannot be in one report.*environment\."):
        report.read([write("a.json"), other])


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"summary": [{"variant": "x"}, 3]}, "is not a result"), ({"summary": [{"no": 1}]}, "cannot be read"),
     ({"experiment": "gone"}, 'no table of "gone"'), ({"model": {}}, "cannot be read"),
     ({"summary": None}, "not complete")],
)  # fmt: skip
def test_damaged_results_are_rejected(write, changes, message):
    ran = run("report", write("a.json", **changes))
    assert isinstance(ran.exception, UsageError)
    assert message in str(ran.exception)


# ---- Tables in Markdown: no text breaks out of its cell


def test_tables_are_rendered_as_markdown():
    columns = (Column("mode", variant), Column("share", share("share", 1)), Column("95 %", interval("interval")))
    rows = [
        {"variant": "sync:budget=512,m=5", "share": 0.5, "interval": (0.25, 0.75)},
        {"variant": "x", "refused": "No."},
    ]
    table = tabulated("A title", columns, rows, "A note.")
    assert table.markdown().splitlines() == [
        "### A title", "", "| mode | share | 95 % |", "| --- | ---: | ---: |",
        "| sync, budget=512, m=5 | 50.0 % | 25 – 75 |", "| x | No. |  |", "", "A note.",
    ]  # fmt: skip


@pytest.mark.parametrize(("text", "escaped"), [("a|b", "a\\|b"), ("a\nb", "a b"), ("\x1b[2J", "␛[2J")])
def test_cell_text_is_escaped(text, escaped):
    assert f"| {escaped} |" in Table("t", ("h",), ((text,),)).markdown()


def test_missing_figures_are_not_shown_as_zero():
    assert (figure("x", 2)({}), share("x")({"x": None}), interval("x")({})) == ("n/a", "n/a", "n/a")


def test_unmeasured_columns_are_left_out():
    columns = (Column("mode", variant), Column("a", figure("a")), Column("b", figure("b")), Column("c", figure("c")))
    table = tabulated("t", columns, [{"variant": "full", "c": 3}, {"variant": "x", "refused": "No."}])
    assert (table.heads, table.rows) == (("mode", "a", "c"), (("full", "n/a", "3"), ("x", "No.", "")))
