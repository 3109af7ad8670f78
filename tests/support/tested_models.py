"""Models that passed their self-test once in this process: nine of ten tests that load one do not test that."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

passed: dict[str, Any] = {}


def share(loads: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``kvchat.models.load`` also find what passed in another test."""
    find, keep = loads.find_tested, loads.keep_tested

    def keep_too(key: str, tested: Any) -> None:
        passed[key] = tested
        keep(key, tested)

    monkeypatch.setattr(loads, "find_tested", lambda key: find(key) or passed.get(key))
    monkeypatch.setattr(loads, "keep_tested", keep_too)


class Forgetful(dict[str, Any]):
    """Remembers nothing, for tests of the self-test."""

    def __setitem__(self, key: str, tested: Any) -> None:
        """Keep nothing."""
