"""Tables in Markdown: nothing in a cell breaks out of it."""

from __future__ import annotations

import pytest

from kvchat.bench.report import Column, Table, figure, interval, share, tabulated, variant


def test_the_markdown_of_a_table():
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
def test_a_cell_stays_a_cell(text, escaped):
    assert f"| {escaped} |" in Table("t", ("h",), ((text,),)).markdown()


def test_a_missing_figure_is_not_zero():
    assert (figure("x", 2)({}), share("x")({"x": None}), interval("x")({})) == ("n/a", "n/a", "n/a")


def test_a_column_of_which_nothing_was_measured_is_left_out():
    columns = (Column("mode", variant), Column("a", figure("a")), Column("b", figure("b")), Column("c", figure("c")))
    table = tabulated("t", columns, [{"variant": "full", "c": 3}, {"variant": "x", "refused": "No."}])
    assert (table.heads, table.rows) == (("mode", "a", "c"), (("full", "n/a", "3"), ("x", "No.", "")))
