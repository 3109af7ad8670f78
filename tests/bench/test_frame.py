"""The frame: what was measured is kept whatever ends the program, and the same command measures the rest."""

from __future__ import annotations

import json

import pytest

from kvchat.bench.frame import Experiment, Frame, load, methods
from kvchat.errors import DoesNotFitError, UsageError

CELLS = [{"case": case, "variant": variant} for case in range(2) for variant in ("full", "sync")]


def experiment(**changes):
    fields = {
        "name": "passkey",
        "what": "numbers",
        "settings": {"cases": 2, "modes": ("full", "sync")},
        "methods": methods(["full", "sync"]),
        "model": {"name": "tiny", "revision": "1"},
        "environment": {"torch": "2"},
    }
    return Experiment(**{**fields, **changes})


class Measured:
    """Measures a cell by noting it; the one numbered ``fails`` raises ``error``."""

    def __init__(self, fails=None, error=KeyboardInterrupt):
        self.cells, self.fails, self.error = [], fails, error

    def __call__(self, cell):
        if len(self.cells) == self.fails:
            self.fails = None
            raise self.error
        self.cells.append(cell)
        return [{"value": (cell["case"], cell["variant"])}]


def line(row):
    return row["variant"]


def test_an_interrupted_measurement_goes_on_with_the_missing_cells(tmp_path):
    file, lines = tmp_path / "rows.json", []
    with pytest.raises(KeyboardInterrupt):
        Frame(file, lines.append).measure(experiment(), CELLS, Measured(fails=3), line)
    assert lines[-1] == f"3 of 4 are kept in {file}; the same command measures what is missing."
    assert [(row["case"], row["variant"]) for row in load(file)["rows"]] == [(0, "full"), (0, "sync"), (1, "full")]
    again = Measured()
    result = Frame(file, lines.append).measure(experiment(), CELLS, again, line)
    assert again.cells == CELLS[3:]
    assert [{key: row[key] for key in ("case", "variant")} for row in result["rows"]] == CELLS
    assert result["rows"][0]["value"] == [0, "full"]
    finished = Frame(file).finish(result, [{"right": 2}])
    assert load(file) == finished
    nothing = Measured()
    assert Frame(file).measure(experiment(), CELLS, nothing, line)["rows"] == result["rows"]
    assert nothing.cells == []


def test_progress_tells_what_is_done_and_how_long_the_rest_takes():
    clock, lines = iter((0.0, 10.0, 20.0, 30.0, 40.0)), []
    Frame(report=lines.append, clock=lambda: next(clock)).measure(experiment(), CELLS, Measured(), line)
    assert lines == ["[1/4, 30.0 s left] full", "[2/4, 20.0 s left] sync", "[3/4, 10.0 s left] full", "[4/4] sync"]


def test_a_refused_cell_is_a_row_that_the_next_run_tries_again(tmp_path):
    file, lines = tmp_path / "rows.json", []
    refusing = Measured(fails=1, error=DoesNotFitError("Too long."))
    result = Frame(file, lines.append).measure(experiment(), CELLS, refusing, line)
    assert [row.get("refused") for row in result["rows"]] == [None, "Too long.", None, None]
    assert lines[1].startswith("[2/4")
    assert "Too long." in lines[1]
    again = Measured()
    result = Frame(file).measure(experiment(), CELLS, again, line)
    assert again.cells == [CELLS[1]]
    assert not any("refused" in row for row in result["rows"])


def test_where_nothing_can_be_measured_the_reason_is_raised():
    def refuse(cell):
        raise DoesNotFitError(f"Case {cell['case']} is too long.")

    with pytest.raises(DoesNotFitError, match="Case 0"):
        Frame().measure(experiment(), CELLS, refuse, line)


def test_what_a_cell_is_measured_in_is_kept_at_once_until_the_cell_is(tmp_path):
    file, lines, taken = tmp_path / "rows.json", [], []

    def measured(frame, fails=None):
        def piece(name):
            if name == fails:
                raise KeyboardInterrupt
            taken.append(name)
            return (name,)

        def measure(cell):
            values = [frame.piece(cell, name, lambda name=name: piece(f"{cell['case']}{name}")) for name in "abc"]
            return [{"values": values, "spent": frame.spent(cell)}]

        return frame.measure(experiment(), [{"case": 0}, {"case": 1}], measure, lambda row: "")

    with pytest.raises(KeyboardInterrupt):
        measured(Frame(file, lines.append), fails="1c")
    assert lines[-1] == (
        f"1 of 2 are kept in {file}, and 2 pieces of others; the same command measures what is missing."
    )
    taken.clear()
    clock = iter(range(99))
    frame = Frame(file, clock=lambda: next(clock))
    result = measured(frame)
    assert taken == ["1c"]
    assert [row["values"] for row in result["rows"]] == [[[f"{case}{name}"] for name in "abc"] for case in (0, 1)]
    assert result["rows"][1]["spent"] >= 1
    assert "pieces" not in frame.finish(result, [])
    assert "pieces" not in load(file)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"settings": {"cases": 3, "modes": ("full", "sync")}}, "settings.cases is 2 in one and 3 in the other"),
        ({"methods": methods(["full", "sync:m=7"])}, "methods.sync"),
        ({"model": {"name": "tiny", "revision": "2"}}, "model.revision"),
        ({"environment": {"torch": "3"}}, "environment.torch"),
        ({"name": "recall"}, "experiment is 'passkey'"),
    ],
)
def test_another_measurement_in_the_file_is_refused_and_left_alone(tmp_path, changes, named):
    file = tmp_path / "rows.json"
    Frame(file).measure(experiment(), CELLS, Measured(), line)
    before = file.read_bytes()
    with pytest.raises(UsageError, match="holds another measurement") as refused:
        Frame(file).measure(experiment(**changes), CELLS, Measured(), line)
    assert named.casefold() in str(refused.value).casefold()
    assert file.read_bytes() == before


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", json.dumps({"experiment": "passkey"}), "\x00" * 9, "[" * 99999])
def test_a_file_that_is_no_result_is_refused(tmp_path, text):
    file = tmp_path / "rows.json"
    file.write_text(text)
    with pytest.raises(UsageError, match="is no result of kvchat bench"):
        load(file)


def test_a_folder_and_a_missing_file_are_refused(tmp_path):
    for place in (tmp_path, tmp_path / "none.json"):
        with pytest.raises(UsageError, match="cannot be read"):
            load(place)
    with pytest.raises(UsageError, match="cannot be written"):
        Frame(tmp_path).measure(experiment(), CELLS, Measured(), line)
