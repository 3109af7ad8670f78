"""No test imports another."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

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
    assert len(found) > 300
    assert not {name: names for name, names in found.items() if names}
