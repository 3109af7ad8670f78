"""What ``pyproject.toml`` asks for: every package that is imported, in bounds that let bug-fix releases in."""

from __future__ import annotations

import ast
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
REQUIREMENTS = [
    Requirement(text)
    for texts in (PROJECT["dependencies"], *PROJECT["optional-dependencies"].values())
    for text in texts
]
DECLARED = {canonicalize_name(requirement.name) for requirement in REQUIREMENTS}
# Where the name of a package is not that of its distribution; a package that is not installed here is its own.
DISTRIBUTIONS = packages_distributions()


def imported() -> set[str]:
    """The packages that kvchat's files import, also inside functions."""
    names = set()
    for path in (ROOT / "kvchat").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names.add(node.module or "")
    return {name.partition(".")[0] for name in names} - {*sys.stdlib_module_names, "kvchat"}


@pytest.mark.parametrize("name", sorted(imported()))
def test_what_is_imported_is_declared(name: str) -> None:
    assert {canonicalize_name(one) for one in DISTRIBUTIONS.get(name, [name])} & DECLARED


@pytest.mark.parametrize("requirement", REQUIREMENTS, ids=str)
def test_a_bug_fix_release_may_come(requirement: Requirement) -> None:
    bounds = {one.operator: one.version for one in requirement.specifier}
    assert not bounds.keys() & {"==", "===", "<=", "~="}
    assert bounds.get("<", "").count(".") < 2, "an upper bound names a minor release"
