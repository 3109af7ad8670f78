from __future__ import annotations

from importlib.metadata import EntryPoint
from typing import Any, ClassVar

import pytest

from kvchat.config import installed_modes, modes
from kvchat.config.modes import SpeculativeParameters, StreamingParameters, registered
from kvchat.errors import UsageError


@pytest.mark.parametrize("mode", modes.mode_names())
def test_every_mode_has_defaults(mode: str) -> None:
    parsed = modes.parse(mode, {})
    assert isinstance(parsed, registered()[mode])
    assert not parsed.model_fields_set


@pytest.mark.parametrize(
    ("mode", "params", "message"),
    [
        ("frezee", {}, 'There is no KV mode "frezee". Did you mean "freeze"?'),
        ("full", {"budget": 512}, 'The full mode has no parameter "budget". Known: pin_system, recovery, resident.'),
        ("streaming", {"sigm": 1}, 'The streaming mode has no parameter "sigm". Did you mean "sigma"?'),
        ("speculative", {"budget": 3}, "speculative: budget = 3 is refused. It must be a whole number of at least 64."),
        ("speculative", {"tau": "high"}, "speculative: tau = 'high' is refused. It must be a number."),
        ("speculative", {"tau": "nan"}, "speculative: tau = 'nan' is refused."),
        ("streaming", {"window": 0}, "streaming: window = 0 is refused. It must be a whole number of at least 1."),
        ("sync", {"m": 2**70}, f"sync: m = {2**70} is refused. It must be at most 1,000,000,000,000."),
        ("freeze", {"k": 1e-300}, "freeze: k = 1e-300 is refused. It must be a number of at least 0.0001."),
        ("sync", {"rho": 2}, "sync: rho = 2 is refused. It must be a number from 0 to 1."),
        ("freeze", {"score": "max"}, "freeze: score = 'max' is refused. It must be one of prob_rel, raw, always."),
        ("freeze", {"recovery": "often"}, "freeze: recovery = 'often' is refused. It must be true or false."),
    ],
)
def test_what_cannot_be_is_refused(mode: str, params: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        modes.parse(mode, params)
    assert str(caught.value).startswith(message)
    assert caught.value.hint or "Known: " in caught.value.detail


@pytest.mark.parametrize(
    ("mode", "published"),
    [
        # Section 3.4: "(S, W, R, sigma, delta) = (4, 2044, 32, 16, 32) (so C = 2048, H = 2064)".
        ("streaming", {"sink": 4, "budget": 2048, "B": 0, "R": 32, "sigma": 16, "delta": 32}),
        # Sections 5.1 and 5.2: B = 2048, the first layer is not compressed, tau = 0.9 for long generation.
        ("speculative", {"tau": 0.9, "budget": 2048, "first_full": True}),
        # Section 5.1: Mem% to 50 %, m = 5, rho = 0.5; 4.1: the head closest to the centroid.
        ("sync", {"representatives": "centroid", "mem": 0.5, "rho": 0.5, "m": 5}),
        # Section 4.1: K = 32, tau = 0.50, k = 2.0; 3.6: recovery is future work.
        ("freeze", {"k": 2.0, "tau": 0.5, "K": 32, "score": "always", "recovery": False}),
    ],
)
def test_every_paper_has_its_values_and_what_is_given_wins(mode, published):
    paper = modes.parse(mode, {"profile": "paper"}).model_dump()
    assert paper == modes.parse(mode, {}).model_dump() | published | {"profile": "paper"}
    name = next(iter(published))
    other = {"sink": 8, "tau": 0.5, "representatives": "retrieval", "k": 1.0}[name]
    assert modes.parse(mode, {"profile": "paper", name: other}).model_dump() == paper | {name: other}


@pytest.mark.parametrize(
    ("mode", "given", "left_out"), [("streaming", {"window": 100}, "budget"), ("sync", {"budget": 256}, "mem")]
)
def test_a_published_value_is_left_out_where_another_parameter_says_the_same(mode, given, left_out):
    paper = modes.parse(mode, {"profile": "paper", **given}).model_dump()
    assert paper[left_out] is None
    assert modes.parse(mode, paper).model_dump() == paper


def test_only_the_budget_means_the_same_in_every_mode() -> None:
    """A window of 2,044 tokens given to streaming made speculative impossible (audit, 10)."""
    given: dict[str, modes.Params] = {}
    modes.remember(given, "streaming", {"window": 2044, "sink": 4})
    modes.remember(given, "speculative", {"budget": 512})
    assert modes.given_for(given, "speculative") == ({"budget": 512}, {})
    assert modes.given_for(given, "streaming") == ({"budget": 512}, {"window": 2044, "sink": 4})


def test_texts_become_numbers() -> None:
    assert modes.parse("speculative", {"budget": "512", "tau": "0.5", "first_full": "false"}) == (
        SpeculativeParameters(budget=512, tau=0.5, first_full=False)
    )


def test_a_switch_keeps_what_was_chosen_and_the_new_mode_has() -> None:
    given = {"speculative": {"budget": 512, "tau": 0.5}, "streaming": {"R": 8}}
    settings = {"streaming": {"R": 2, "delta": 3}}
    assert modes.in_force("streaming", settings, given) == StreamingParameters(budget=512, R=8, delta=3)
    assert modes.in_force("streaming", {}, given, {"budget": 256}) == StreamingParameters(budget=256, R=8)
    full = modes.in_force("full", settings, given)
    assert full.model_dump() == {"recovery": False, "pin_system": False, "resident": None}
    with pytest.raises(UsageError, match="no KV mode"):
        modes.in_force("ful", settings, given)


def test_no_unknown_setting_of_a_mode_is_passed_over() -> None:
    """It was left out in silence, as a budget given in another mode is."""
    with pytest.raises(UsageError, match='no parameter "sinks"'):
        modes.in_force("streaming", {"streaming": {"sinks": 4}}, {})


def test_speculatives_tau_for_never_is_no_obstacle_to_freeze() -> None:
    assert modes.in_force("freeze", {}, {"freeze": {"tau": -2.0}}).model_dump()["tau"] == -2.0


def test_every_parameter_is_described() -> None:
    assert all(parameters.title for parameters in registered().values())
    assert all(field.description for parameters in registered().values() for field in parameters.model_fields.values())


# ---- modes of other packages -----------------------------------------------------------------------


class Extra(modes.ModeParameters):
    name: ClassVar[str] = "extra"
    title: ClassVar[str] = "one more"
    implementation: ClassVar[str] = "package.module:Extra"

    amount: int = 3
    """how many"""


class Unnamed(modes.ModeParameters):
    title: ClassVar[str] = "no name"
    implementation: ClassVar[str] = "package.module:Extra"


class Needing(Extra):
    needed: int


def extra(**attributes: str) -> type[modes.ModeParameters]:
    return type("Extra", (Extra,), {"__module__": __name__, **attributes})


class Point:
    """An entry point that loads ``value``."""

    name, value, dist = "point", "package:Value", None

    def __init__(self, loaded: Any) -> None:
        self.loaded = loaded

    def load(self) -> Any:
        if isinstance(self.loaded, Exception):
            raise self.loaded
        return self.loaded


def registry(monkeypatch: pytest.MonkeyPatch, *loaded: Any) -> tuple[dict[str, Any], tuple[str, ...]]:
    monkeypatch.setattr(installed_modes, "entry_points", lambda group: [Point(each) for each in loaded])
    return modes._registry.__wrapped__()


def test_a_mode_of_another_package_comes_behind_the_built_in_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    classes, problems = registry(monkeypatch, Extra)
    assert list(classes) == [*(cls.name for cls in modes.BUILT_IN), "extra"]
    assert problems == ()


@pytest.mark.parametrize(
    ("loaded", "reason"),
    [
        (ImportError("No module named 'x'"), "No module named 'x'"),
        (RuntimeError(), "RuntimeError"),
        (Point, "its value is not a subclass of kvchat.config.modes.ModeParameters"),
        (Unnamed, "Unnamed has no name"),
        (Needing, "its parameter needed has no default"),
        (extra(name="full"), 'there is a mode "full" already'),
        (extra(name="mode"), '"mode" is no name for a mode'),
        (extra(name="copy"), '"copy" is no name for a mode'),
        (extra(name="A-b"), '"A-b" is no name for a mode'),
        (extra(figures={"kept": 1}), "its figures are no labels"),
        (extra(implementation="package.Extra"), 'its implementation "package.Extra" is not package.module:Class'),
    ],
    ids=str,
)
def test_a_mode_that_cannot_be_used_is_left_out_and_named(
    monkeypatch: pytest.MonkeyPatch, loaded: Any, reason: str
) -> None:
    classes, (problem,) = registry(monkeypatch, loaded, Extra)
    assert list(classes) == [*(cls.name for cls in modes.BUILT_IN), "extra"]
    assert problem.startswith(f'The mode "point" of an unknown package is left out: {reason}')


def test_of_two_modes_of_one_name_the_first_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    other = extra(title="another")
    classes, (problem,) = registry(monkeypatch, Extra, other)
    assert classes["extra"] is Extra
    assert problem.endswith('there is a mode "extra" already.')


def test_every_built_in_implementation_has_the_name_of_its_parameters() -> None:
    for cls in modes.BUILT_IN:
        mode: Any = EntryPoint(cls.name, cls.implementation, installed_modes.GROUP).load()
        assert mode.name == cls.name
