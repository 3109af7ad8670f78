from __future__ import annotations

import pytest

from kvchat.errors import DoesNotFitError, EngineError, KvchatError, ModelError, UsageError, did_you_mean


@pytest.mark.parametrize(
    ("cls", "code"), [(KvchatError, 1), (UsageError, 2), (ModelError, 2), (DoesNotFitError, 3), (EngineError, 1)]
)
def test_each_kind_has_its_exit_code(cls: type[KvchatError], code: int) -> None:
    assert cls("Title.").exit_code == code


def test_the_parts_are_joined_without_gaps() -> None:
    assert str(UsageError("Title.", "Detail.", "Hint.")) == "Title. Detail. Hint."
    assert str(UsageError("Title.", hint="Hint.")) == "Title. Hint."
    assert str(UsageError("Title.")) == "Title."


def test_the_nearest_word_is_suggested_and_all_are_named() -> None:
    assert did_you_mean("frezee", ["full", "freeze"]) == 'Did you mean "freeze"? Known: freeze, full.'
    assert did_you_mean("xyz", ["full", "freeze"]) == "Known: freeze, full."
