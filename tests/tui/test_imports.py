"""What the application's files import: no model libraries, no Textual in the controller, no circles."""

from __future__ import annotations

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import kvchat

ROOT = Path(kvchat.__file__).parents[1]


@pytest.mark.parametrize(
    ("module", "never"),
    [
        ("kvchat.tui.app", {"torch", "transformers", "numpy"}),
        ("kvchat.tui.controller", {"torch", "transformers", "numpy", "textual", "rich"}),
        ("kvchat.tui.commands", {"textual", "rich"}),
    ],
)
def test_what_is_never_loaded(module, never):
    check = f"import sys, {module}; sys.exit(bool({never} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


def test_files_do_not_import_in_circles():
    """Imports for type checkers count."""
    files = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): path
        for path in (ROOT / "kvchat" / "tui").rglob("*.py")
        if path.name != "__init__.py"
    }
    graph = {module: imports(path) & files.keys() for module, path in files.items()}
    assert graph["kvchat.tui.app"] > {"kvchat.tui.themes", "kvchat.tui.screens.chat"}
    TopologicalSorter(graph).prepare()


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found
