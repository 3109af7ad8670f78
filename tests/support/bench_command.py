"""Commands of ``kvchat bench`` that measure nothing."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
from typer.testing import CliRunner

from kvchat.bench.frame import ModelChoice
from kvchat.cli.main import app


def asked(monkeypatch: pytest.MonkeyPatch, line: str, owner: ModuleType, name: str = "run") -> tuple[Any, ModelChoice]:
    """The settings and the model that the command ``line`` gives to ``owner.name``."""
    given: list[Any] = []
    monkeypatch.setattr(owner, name, lambda *args: given.extend(args) or {"rows": []})
    ran = CliRunner().invoke(app, ["bench", *line.split(), "--json"], catch_exceptions=False)
    assert ran.exit_code == 0, ran.output
    settings, choice, _ = given
    return settings, choice
