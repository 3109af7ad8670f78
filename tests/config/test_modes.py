from typing import Any, ClassVar

import pytest
from support.message import lacks

from kvchat.config import modes
from kvchat.config.modes import SpeculativeParameters, StreamingParameters, registered
from kvchat.errors import UsageError


@pytest.mark.parametrize(
    ("mode", "params", "facts"),
    [
        ("frezee", {}, ('"frezee"', '"freeze"')),
        ("full", {"budget": 512}, ("full", '"budget"', "pin_system, recovery, resident")),
        ("streaming", {"sigm": 1}, ("streaming", '"sigm"', '"sigma"')),
        ("speculative", {"budget": 3}, ("speculative: budget = 3", "64")),
        ("speculative", {"tau": "high"}, ("speculative: tau = 'high'", "number")),
        ("speculative", {"tau": "nan"}, ("speculative: tau = 'nan'",)),
        ("streaming", {"window": 0}, ("streaming: window = 0", "1")),
        ("sync", {"m": 2**70}, (f"sync: m = {2**70}", "1,000,000,000,000")),
        ("freeze", {"k": 1e-300}, ("freeze: k = 1e-300", "0.0001")),
        ("sync", {"rho": 2}, ("sync: rho = 2", "0", "1")),
        ("freeze", {"score": "max"}, ("freeze: score = 'max'", "prob_rel, raw, always")),
        ("freeze", {"recovery": "often"}, ("freeze: recovery = 'often'", "true", "false")),
    ],
)
def test_invalid_modes_and_parameters_are_rejected(mode, params, facts):
    with pytest.raises(UsageError) as caught:
        modes.parse(mode, params)
    assert not lacks(caught.value, *facts)
    assert caught.value.hint or caught.value.detail


@pytest.mark.parametrize(
    ("mode", "published"),
    [
        # Section 3.4: "(S, W, R, sigma, delta) = (4, 2044, 32, 16, 32) (so C = 2048, H = 2064)".
        ("streaming", {"sink": 4, "budget": 2048, "B": 0, "R": 32, "sigma": 16, "delta": 32}),
        # Sections 5.1 and 5.2: B = 2048, the first layer is not compressed, tau = 0.9 for long generation.
        (
            "speculative",
            {"tau": 0.9, "budget": 2048, "first_full": True, "index": "bounds", "unit": "page", "query": "last"},
        ),
        # Section 5.1: Mem% to 50 %, m = 5, rho = 0.5; 4.1: the head closest to the centroid.
        ("sync", {"representatives": "centroid", "mem": 0.5, "rho": 0.5, "m": 5}),
        # Section 4.1: K = 32, tau = 0.50, k = 2.0; 3.6: recovery is future work.
        ("freeze", {"k": 2.0, "tau": 0.5, "K": 32, "score": "always", "recovery": False}),
    ],
)
def test_the_paper_profile_has_published_values_that_can_be_overridden(mode, published):
    paper = modes.parse(mode, {"profile": "paper"}).model_dump()
    assert paper == modes.parse(mode, {}).model_dump() | published | {"profile": "paper"}
    name = next(iter(published))
    other = {"sink": 8, "tau": 0.5, "representatives": "retrieval", "k": 1.0}[name]
    assert modes.parse(mode, {"profile": "paper", name: other}).model_dump() == paper | {name: other}


@pytest.mark.parametrize(
    ("mode", "given", "left_out"), [("streaming", {"window": 100}, "budget"), ("sync", {"budget": 256}, "mem")]
)
def test_a_given_parameter_replaces_its_published_equivalent(mode, given, left_out):
    paper = modes.parse(mode, {"profile": "paper", **given}).model_dump()
    assert paper[left_out] is None
    assert modes.parse(mode, paper).model_dump() == paper


def test_only_the_budget_applies_to_every_mode():
    """A window of 2,044 tokens set for streaming must not apply to speculative, whose budget it exceeds."""
    given: dict[str, modes.Params] = {}
    modes.remember(given, "streaming", {"window": 2044, "sink": 4})
    modes.remember(given, "speculative", {"budget": 512})
    assert modes.overrides_for(given, "speculative") == ({"budget": 512}, {})
    assert modes.overrides_for(given, "streaming") == ({"budget": 512}, {"window": 2044, "sink": 4})


def test_the_budget_of_another_mode_does_not_cap_freeze():
    """With a budget freeze forgets: it recalled none of 18 facts, all of which it recalls without one."""
    given: dict[str, modes.Params] = {"freeze": {"pin_system": True}}
    modes.remember(given, "speculative", {"budget": 512})
    assert modes.effective_params("freeze", {}, given).model_dump()["budget"] is None
    assert modes.effective_params("sync", {}, given).model_dump()["budget"] == 512
    assert modes.effective_params("sync", {}, given).pin_system, "freeze shares the other parameters"
    modes.remember(given, "freeze", {"budget": 400})
    assert given["speculative"] == {"budget": 512}
    budgets = {mode: modes.effective_params(mode, {}, given).model_dump().get("budget") for mode in modes.mode_names()}
    assert budgets == {"full": None, "freeze": 400, "streaming": 512, "sync": 512, "speculative": 512}
    assert set(registered()["freeze"].own) == {"budget"}, "whose effect is described"


def test_text_is_parsed_into_numbers():
    assert modes.parse("speculative", {"budget": "512", "tau": "0.5", "first_full": "false"}) == (
        SpeculativeParameters(budget=512, tau=0.5, first_full=False)
    )


def test_auto_leaves_a_parameter_unset():
    assert modes.parse("full", {"resident": "auto"}) == modes.parse("full", {})
    for mode in modes.mode_names():
        if "budget" in modes.registered()[mode].model_fields:
            assert modes.parse(mode, {"budget": "auto"}).budget is None
    assert modes.parse("streaming", {"budget": "auto", "profile": "paper"}).budget is None
    assert modes.parse("streaming", {"window": "auto", "profile": "paper"}).budget == 2048
    with pytest.raises(UsageError, match="tau = 'auto'"):
        modes.parse("freeze", {"tau": "auto"})


def test_a_switch_keeps_the_parameters_that_the_new_mode_has():
    given = {"speculative": {"budget": 512, "tau": 0.5}, "streaming": {"R": 8}}
    settings = {"streaming": {"R": 2, "delta": 3}}
    assert modes.effective_params("streaming", settings, given) == StreamingParameters(budget=512, R=8, delta=3)
    assert modes.effective_params("streaming", {}, given, {"budget": 256}) == StreamingParameters(budget=256, R=8)
    full = modes.effective_params("full", settings, given)
    defaults = {"recovery": False, "pin_system": False, "resident": None, "cpu": None, "draft": "off"}
    assert full.model_dump() == defaults
    with pytest.raises(UsageError, match="no KV mode"):
        modes.effective_params("ful", settings, given)


def test_unknown_settings_of_a_mode_are_rejected():
    """Only a shared parameter that the mode lacks, such as a budget, is silently left out."""
    with pytest.raises(UsageError, match='no parameter "sinks"'):
        modes.effective_params("streaming", {"streaming": {"sinks": 4}}, {})


def test_freeze_accepts_a_tau_of_minus_2():
    assert modes.effective_params("freeze", {}, {"freeze": {"tau": -2.0}}).model_dump()["tau"] == -2.0


def test_f6_skips_comparison_modes():
    offered, compared = (([cls.name for cls in group]) for group in modes.grouped().values())
    assert offered == [modes.AUTO, *modes.mode_names()]
    assert set(compared) == set(registered()) - set(offered)
    visited = modes.mode_names()
    assert [modes.next_mode(mode) for mode in visited] == [*visited[1:], visited[0]]
    assert {modes.next_mode(mode, step) for mode in compared for step in (1, -1)} == {visited[0]}


# ---- Modes of other packages: listed, or left out if they cannot be used


class Extra(modes.ModeParameters):
    name: ClassVar[str] = "extra"
    title: ClassVar[str] = "one more"
    implementation: ClassVar[str] = "package.module:Extra"

    amount: int = 3
    """how many"""


class Unnamed(modes.ModeParameters):
    title: ClassVar[str] = "no name"
    implementation: ClassVar[str] = "package.module:Extra"


class Required(Extra):
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
    monkeypatch.setattr(modes, "entry_points", lambda group: [Point(each) for each in loaded])
    return modes._registry.__wrapped__()


def test_modes_of_other_packages_come_after_the_built_in_ones(monkeypatch):
    classes, problems = registry(monkeypatch, Extra)
    assert list(classes) == [*(cls.name for cls in modes.BUILT_IN), "extra"]
    assert problems == ()


@pytest.mark.parametrize(
    ("loaded", "reason"),
    [
        (ImportError("No module named 'x'"), "No module named 'x'"),
        (RuntimeError(), "RuntimeError"),
        (Point, "kvchat.config.modes.ModeParameters"),
        (Unnamed, "Unnamed"),
        (Required, "needed"),
        (extra(name="full"), '"full"'),
        (extra(name="mode"), '"mode"'),
        (extra(name="copy"), '"copy"'),
        (extra(name="A-b"), '"A-b"'),
        (extra(implementation="package.Extra"), '"package.Extra"'),
    ],
    ids=str,
)
def test_unusable_modes_are_left_out_and_named(monkeypatch, loaded, reason):
    classes, (problem,) = registry(monkeypatch, loaded, Extra)
    assert list(classes) == [*(cls.name for cls in modes.BUILT_IN), "extra"]
    assert not lacks(problem, '"point"', reason)
