"""Modes of other packages: listed, left out where they cannot be used."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from support.message import lacks

from kvchat.config import modes


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
    monkeypatch.setattr(modes, "entry_points", lambda group: [Point(each) for each in loaded])
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
        (Point, "kvchat.config.modes.ModeParameters"),
        (Unnamed, "Unnamed"),
        (Needing, "needed"),
        (extra(name="full"), '"full"'),
        (extra(name="mode"), '"mode"'),
        (extra(name="copy"), '"copy"'),
        (extra(name="A-b"), '"A-b"'),
        (extra(implementation="package.Extra"), '"package.Extra"'),
    ],
    ids=str,
)
def test_a_mode_that_cannot_be_used_is_left_out_and_named(
    monkeypatch: pytest.MonkeyPatch, loaded: Any, reason: str
) -> None:
    classes, (problem,) = registry(monkeypatch, loaded, Extra)
    assert list(classes) == [*(cls.name for cls in modes.BUILT_IN), "extra"]
    assert not lacks(problem, '"point"', reason)


def test_of_two_modes_of_one_name_the_first_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    other = extra(title="another")
    classes, (problem,) = registry(monkeypatch, Extra, other)
    assert classes["extra"] is Extra
    assert '"extra"' in problem
