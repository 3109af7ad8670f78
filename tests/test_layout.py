"""The top level holds what the design names, and no test imports another."""

from __future__ import annotations

import ast
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests"
FILES = sorted(TESTS.rglob("*.py"))


def name_of(path: Path) -> str:
    return path.relative_to(TESTS).with_suffix("").as_posix()


def imported(tree: ast.AST) -> Iterator[str]:
    """Every module and every name imported anywhere in a file, dotted."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imported_tests(tree: ast.AST) -> list[str]:
    """Imports with a ``test_`` part; the names of kvchat and of libraries have none."""
    return [name for name in imported(tree) if any(part.startswith("test_") for part in name.split("."))]


def test_no_file_imports_a_test_file() -> None:
    found = {name_of(path): imported_tests(ast.parse(path.read_text())) for path in FILES}
    assert len(found) > 400
    assert not {name: names for name, names in found.items() if names}


def test_a_forbidden_import_is_found() -> None:
    code = (
        "from kv.modes.test_every_mode import ROWS\nimport engine.test_cuda\nfrom kv import test_manager\nimport json"
    )
    assert len(imported_tests(ast.parse(code))) == 3


def test_the_top_level_holds_what_the_design_names() -> None:
    if not (shutil.which("git") and (ROOT / ".git").exists()):
        pytest.skip("no checkout of git")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    tops = {name.partition("/")[0] for name in listed.stdout.splitlines()}
    named = {"pyproject.toml", "kvchat", "themes", "tests", "README.md", "LICENSE"}
    assert {name for name in tops if not name.startswith(".")} == named
