"""What a variant sends to a session: what it names, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import kvchat
from kvchat.bench import frame
from kvchat.bench.frame import Experiment, difference, incompatible, load, methods, parsed
from kvchat.bench.report import rendered
from kvchat.config.modes import ModeParameters, SyncParameters


class Entered:
    """A session that notes the parameters it is to enter a mode with."""

    def enter(self, parameters: ModeParameters) -> None:
        self.parameters = parameters


@pytest.mark.parametrize(
    ("variant", "named"),
    [
        ("freeze:profile=paper", {"profile", "score", "recovery", "tau", "k", "K"}),  # by the profile itself
        ("sync:budget=140", {"budget"}),
        ("full", set()),
    ],
)
def test_only_what_is_named_is_sent(variant: str, named: set[str]) -> None:
    session: Any = Entered()
    session.enter(parsed(variant))
    assert session.parameters.model_fields_set == named


def test_a_variant_forgets_what_an_earlier_one_was_given() -> None:
    session = kvchat.load("bundled")
    session.enter(parsed("speculative:budget=128,unit=page,tau=0.1,sink=4,window=32"))
    session.enter(parsed("speculative:budget=160,unit=page"))
    assert session.info.params["tau"] == 0.8
    session.enter(parsed("streaming"))
    assert session.info.params["budget"] == 512
    assert parsed("freeze:K=8", 300).model_fields_set == {"K"}
    assert parsed("sync:m=3", 300).model_fields_set == {"m", "budget"}


# ---- What a result is of: equal measurements, and results that may stand side by side


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


@pytest.mark.parametrize("file", KEPT, ids=lambda file: file.stem)
def test_a_kept_result_has_its_tables_today(file):
    assert "### " in rendered([load(file)])


def test_what_changes_logits_or_times_does_not_stand_side_by_side():
    one = result()
    assert incompatible(one, result()) == ""
    assert incompatible(one, result(environment={**one["environment"], "python": "3.12"})) == ""
    assert "environment.torch" in incompatible(one, result(environment={**one["environment"], "torch": "3"}))
    assert "model.name" in incompatible(one, result(model={"name": "other"}))
    assert difference(one, result(settings={"tokens": 5})) == "settings.tokens is 4 in one and 5 in the other"
    assert difference(one, result()) == ""


@pytest.mark.parametrize("pair", [({"a": 1}, {}), ({}, {"a": 1})])
def test_a_missing_setting_is_a_difference(pair):
    one, other = (result(settings=settings) for settings in pair)
    assert "settings.a" in difference(one, other)
