"""What a result is of: equal measurements, results that may stand side by side, and results older than the code."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from kvchat.bench import frame
from kvchat.bench.frame import SCHEMA, VERSIONS, Experiment, difference, incompatible, load, methods, outdated
from kvchat.config.modes import SyncParameters, parse
from kvchat.kv.modes import implementation

README = Path(frame.__file__).parent / "README.md"
KEPT = sorted((Path(frame.__file__).parent / "results").glob("*.json"))


def result(**changes):
    environment = dict.fromkeys(frame.COMPARED, "x") | {"python": "3.11"}
    made = Experiment("agreement", "KL", {"tokens": 4}, methods(["sync:m=7"]), {"name": "tiny"}, environment).head()
    return {**made, **changes}


def test_a_method_is_its_mode_with_all_parameters_and_its_version():
    found = methods(["sync:m=7", "streaming"], budget=256)
    assert found["sync:m=7"]["mode"] == "sync"
    assert found["sync:m=7"]["version"] == SyncParameters.version
    assert found["sync:m=7"]["constants"]["RING"] == 128
    assert found["sync:m=7"]["parameters"] == SyncParameters(m=7, budget=256).model_dump()
    assert found["streaming"]["parameters"]["budget"] == 256


def test_what_was_measured_today_is_not_outdated():
    assert outdated(result()) == ""


@pytest.mark.parametrize("file", KEPT, ids=lambda file: file.stem)
def test_a_kept_result_that_is_older_than_the_code_says_so_in_its_table(file):
    table = README.read_text("utf-8").split(f"<!-- {file.stem} -->")[1].split("<!-- end -->")[0]
    assert ("Older than the code" in table) == bool(outdated(load(file))), "run .ci/tables.py --write"


@pytest.mark.parametrize("file", [file for file in KEPT if not outdated(load(file))], ids=lambda file: file.stem)
def test_a_kept_result_is_older_once_a_constant_of_a_mode_is_another(file, monkeypatch):
    kept = load(file)
    for mode in {method["mode"] for method in kept["methods"].values()} - {"full"}:
        cls = implementation(parse(mode, {}))
        for name, value in cls.constants.items():
            with monkeypatch.context() as patch:
                patch.setattr(cls, "constants", {**cls.constants, name: "another"})
                assert f"constants.{name} is" in outdated(kept), f"{mode} had {value}"


def test_another_default_another_version_and_another_schema_are_told(monkeypatch):
    before = result()
    assert "schema is 0" in outdated(result(schema=0))
    assert "schema is none" in outdated({"rows": []})
    assert "agreement has version" in outdated(result(version=VERSIONS["agreement"] + 1))
    assert "no KV mode" in outdated(result(methods={"gone": {}}))
    monkeypatch.setattr(SyncParameters, "version", 99)
    assert "methods.sync:m=7.version is 1 in one and 99 in the other" in outdated(before)


def test_a_changed_default_makes_a_result_older():
    before = result()
    before["methods"]["sync:m=7"]["parameters"]["rho"] = 0.25
    assert "parameters.rho" in outdated(before)


def test_a_parameter_that_came_later_does_not():
    before = result()
    del before["methods"]["sync:m=7"]["parameters"]["rho"]
    assert outdated(before) == ""
    before["methods"]["sync:m=7"]["parameters"]["gone"] = 1
    assert "parameters.gone" in outdated(before)


def test_what_changes_logits_or_times_does_not_stand_side_by_side():
    one = result()
    assert incompatible(one, result()) == ""
    assert incompatible(one, result(environment={**one["environment"], "python": "3.12"})) == ""
    assert "environment.torch" in incompatible(one, result(environment={**one["environment"], "torch": "3"}))
    assert "model.name" in incompatible(one, result(model={"name": "other"}))
    assert difference(one, result(settings={"tokens": 5})) == "settings.tokens is 4 in one and 5 in the other"
    assert difference(one, result()) == ""


def test_every_experiment_has_a_version():
    room = Path(frame.__file__).parent
    scripts = room.parents[1] / ".ci"
    named = {
        node.args[0].value
        for path in (*room.rglob("*.py"), *scripts.glob("*.py"))
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Call)
        and getattr(node.func, "id", "") in ("Experiment", "_experiment")
        and isinstance(node.args[0], ast.Constant)
    }
    assert named == {name for name in VERSIONS if not name.startswith("paper ")}
    assert isinstance(SCHEMA, int)


@pytest.mark.parametrize("pair", [({"a": 1}, {}), ({}, {"a": 1})])
def test_a_missing_setting_is_a_difference(pair):
    one, other = (result(settings=settings) for settings in pair)
    assert "settings.a" in difference(one, other)
