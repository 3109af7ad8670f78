"""The frame: the file keeps every measured row however the program ends; refused cells are rows too."""

import json
from typing import Any

import pytest

import kvchat
from kvchat.bench import frame
from kvchat.bench.frame import Frame, chance, incompatible, load, methods, parsed, sign_test
from kvchat.config.modes import ModeParameters, SyncParameters
from kvchat.errors import DoesNotFitError, UsageError

CELLS = [{"case": case, "variant": variant} for case in range(2) for variant in ("full", "sync")]


EXPERIMENT = {"experiment": "passkey", "what": "numbers", "settings": {"cases": 2, "modes": ("full", "sync")}}
EXPERIMENT |= {"methods": methods(["full", "sync"]), "model": {"name": "tiny", "revision": "1"}}
EXPERIMENT |= {"environment": {"torch": "2"}}


class Measured:
    """Records the cells that it measures; cell number ``fails`` raises ``error`` once."""

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


def test_interrupted_measurements_keep_their_rows_until_the_next(tmp_path):
    file = tmp_path / "rows.json"
    with pytest.raises(KeyboardInterrupt):
        Frame(file).measure(EXPERIMENT, CELLS, Measured(fails=3), line)
    assert [(row["case"], row["variant"]) for row in load(file)["rows"]] == [(0, "full"), (0, "sync"), (1, "full")]
    assert "summary" not in load(file)
    again = Measured()
    result = Frame(file).measure(EXPERIMENT, CELLS, again, line, lambda rows: [{"right": (len(rows),)}])
    assert again.cells == CELLS
    assert [{key: row[key] for key in ("case", "variant")} for row in result["rows"]] == CELLS
    assert result["rows"][0]["value"] == [0, "full"]
    assert result["summary"] == [{"right": [4]}]
    assert load(file) == result


def test_progress_shows_the_count_and_the_time_left():
    clock, lines = iter((0.0, 10.0, 20.0, 30.0, 40.0)), []
    Frame(report=lines.append, clock=lambda: next(clock)).measure(EXPERIMENT, CELLS, Measured(), line)
    assert lines == ["[1/4, 30 s left] full", "[2/4, 20 s left] sync", "[3/4, 10 s left] full", "[4/4] sync"]


def test_refused_cells_become_rows_with_the_reason(tmp_path):
    file, lines = tmp_path / "rows.json", []
    refusing = Measured(fails=1, error=DoesNotFitError("Too long."))
    result = Frame(file, lines.append).measure(EXPERIMENT, CELLS, refusing, line)
    assert [row.get("refused") for row in result["rows"]] == [None, "Too long.", None, None]
    assert load(file)["rows"] == result["rows"]
    assert lines[1].startswith("[2/4")
    assert "Too long." in lines[1]


def test_the_first_refusal_is_raised_if_every_cell_is_refused():
    def refuse(cell):
        raise DoesNotFitError(f"Case {cell['case']} is too long.")

    with pytest.raises(DoesNotFitError, match="Case 0"):
        Frame().measure(EXPERIMENT, CELLS, refuse, line)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", json.dumps({"experiment": "passkey"}), "\x00" * 9, "[" * 99999])
def test_files_without_a_result_are_rejected(tmp_path, text):
    file = tmp_path / "rows.json"
    file.write_text(text)
    with pytest.raises(UsageError, match=r"rows\.json is not a"):
        load(file)


def test_folders_and_missing_files_are_rejected(tmp_path):
    for place in (tmp_path, tmp_path / "none.json"):
        with pytest.raises(UsageError, match="cannot be read"):
            load(place)
    with pytest.raises(UsageError, match="cannot be written"):
        Frame(tmp_path).measure(EXPERIMENT, CELLS, Measured(), line)


@pytest.mark.parametrize(
    ("more", "fewer", "p"),
    [(0, 0, 1), (1, 0, 1), (3, 3, 1), (5, 0, 2 / 32), (0, 6, 2 / 64), (1, 3, 2 * (1 + 4) / 16),
     (10, 2, 2 * (1 + 12 + 66) / 4096), (1000, 1000, 1)],
)  # fmt: skip
def test_sign_test_returns_the_two_sided_probability(more, fewer, p):
    assert sign_test(more, fewer) == p


def test_only_cases_of_both_variants_are_compared():
    def answers(*right, first=0):
        return [{"task": "fact", "case": case, "right": each} for case, each in enumerate(right, first)]

    one, other = answers(True, True, True, False, True), answers(False, False, False, False, True, True)
    assert chance(one, other, "right") == 2 / 8, "three cases won, two ties, one not asked of both"
    refused = [{"task": "fact", "case": 0, "refused": "too long"}, *one[1:]]
    assert chance(refused, other, "right") == 2 / 4
    assert chance(one, answers(True, first=9), "right") is None


def test_texts_are_compared_by_their_mean_over_tokens():
    one = [{"passage": 0, "kl": [0.1, 0.9]}, {"passage": 1, "kl": [0.2, 0.2]}]
    other = [{"passage": 0, "kl": [0.4, 0.4]}, {"passage": 1, "kl": [0.1, 0.1]}]
    assert chance(one, other, "kl") == 2 / 4


# ---- A variant sends a session only the parameters that it names


class RecordingSession:
    """A session that records the parameters of the mode it enters."""

    def enter(self, parameters: ModeParameters) -> None:
        self.parameters = parameters


@pytest.mark.parametrize(
    ("variant", "named"),
    [
        ("freeze:profile=paper", {"profile", "score", "recovery", "tau", "k", "K"}),  # set by the profile
        ("sync:budget=140", {"budget"}),
        ("full", set()),
    ],
)
def test_only_named_parameters_are_sent(variant, named):
    session: Any = RecordingSession()
    session.enter(parsed(variant))
    assert session.parameters.model_fields_set == named


def test_variants_do_not_inherit_earlier_parameters():
    session = kvchat.load("bundled")
    session.enter(parsed("speculative:budget=128,unit=page,tau=0.1,sink=4,window=32"))
    session.enter(parsed("speculative:budget=160,unit=page"))
    assert session.info.params["tau"] == 0.8
    session.enter(parsed("streaming"))
    assert session.info.params["budget"] == 512
    assert parsed("freeze:K=8", 300).model_fields_set == {"K"}
    assert parsed("sync:m=3", 300).model_fields_set == {"m", "budget"}


# ---- What results record, and which of them may be compared


def result(**changes):
    environment = dict.fromkeys(frame.COMPARED, "x") | {"python": "3.11"}
    base = {"experiment": "agreement", "what": "KL", "settings": {"tokens": 4}, "model": {"name": "tiny"}}
    return {**base, "methods": methods(["sync:m=7"]), "environment": environment, **changes}


def test_methods_list_the_mode_with_all_parameters():
    found = methods(["sync:m=7", "streaming"], budget=256)
    assert found["sync:m=7"]["mode"] == "sync"
    assert found["sync:m=7"]["parameters"] == SyncParameters(m=7, budget=256).model_dump()
    assert found["streaming"]["parameters"]["budget"] == 256


def test_results_of_other_libraries_or_models_are_incompatible():
    one = result()
    assert incompatible(one, result()) == ""
    assert incompatible(one, result(environment={**one["environment"], "python": "3.12"})) == ""
    assert "environment.torch" in incompatible(one, result(environment={**one["environment"], "torch": "3"}))
    assert "model.name" in incompatible(one, result(model={"name": "other"}))
