"""Imports go down only: cli -> tui | engine -> kv -> torch; the leaves know nobody above them."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvchat

PACKAGE = Path(kvchat.__file__).parent
LEAVES = {"errors", "paths", "protocol", "units"}
HEAVY = {"torch", "transformers", "tokenizers", "safetensors", "numpy", "triton"}

# room -> what it may import: other rooms of kvchat, and libraries that others may not.
MAY = {
    "leaves": {"leaves"},
    "nvml": {"leaves", "pynvml"},
    "config": {"leaves", "nvml", "config"},
    "kv": {"leaves", "config", "kv", "torch", "numpy", "triton"},
    "engine": {"leaves", "nvml", "config", "kv", "engine", *HEAVY},
    "tui": {"leaves", "config", "tui", "textual", "rich"},
    "doctor": {"leaves", "nvml", "config", "kv", "doctor"},
    "bench": {"leaves", "nvml", "config", "kv", "engine", "bench", *HEAVY},
    "cli": {"leaves", "config", "engine", "doctor", "tui", "bench", "cli"},
}
ROOMS = {name: name for name in ("nvml", "config", "kv", "engine", "tui", "doctor", "bench")}
RESTRICTED = HEAVY | {"textual", "rich", "pynvml"} | set(MAY)


def room(module: str) -> str:
    """The room of ``kvchat.x.y``; the package itself is a leaf, its lazy ``load`` aside."""
    parts = module.split(".")
    if len(parts) == 1 or parts[1] in LEAVES:
        return "leaves"
    return ROOMS.get(parts[1], "cli")


def imports(tree: ast.AST) -> Iterator[str]:
    """Modules imported anywhere in a file, also inside functions; those for type checkers only do not count."""
    skipped = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            # `from kvchat import paths` imports a module, `from kvchat.errors import UsageError` a name of one
            yield from (
                (f"kvchat.{alias.name}" for alias in node.names) if node.module == "kvchat" else [node.module or ""]
            )


def kind_of(name: str) -> str:
    """The room or library an imported name belongs to."""
    top = name.split(".")[0]
    if top != "kvchat":
        return top
    if name in ("kvchat.load", "kvchat.Session"):
        return "engine"
    return room(name)


FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.relative_to(PACKAGE).as_posix())
def test_imports_go_down_only(path: Path) -> None:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    if path == PACKAGE / "__init__.py":
        return  # its `__getattr__` is the one door from above to the engine
    here = room(".".join(parts))
    wrong = {
        name
        for name in imports(ast.parse(path.read_text()))
        if (kind := kind_of(name)) in RESTRICTED and kind not in MAY[here]
    }
    assert not wrong, f"{here} may not import {sorted(wrong)}"


def loaded_by(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint(*{{name.split('.')[0] for name in sys.modules}})"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=600)
    return set(result.stdout.split())


@pytest.mark.parametrize(
    ("module", "never"),
    [
        ("kvchat", HEAVY | {"textual", "pydantic"}),
        ("kvchat.cli.main", HEAVY | {"textual", "tomlkit"}),
        ("kvchat.tui.app", HEAVY),
        ("kvchat.engine.worker", HEAVY | {"textual"}),
    ],
)
def test_starting_loads_nothing_heavy(module: str, never: set[str]) -> None:
    assert not loaded_by(f"import {module}") & never


def test_the_kv_store_knows_no_model_and_no_screen() -> None:
    modules = [".".join(p.relative_to(PACKAGE.parent).with_suffix("").parts) for p in (PACKAGE / "kv").rglob("*.py")]
    loaded = loaded_by("\n".join(f"import {module}" for module in modules))
    assert "torch" in loaded
    assert not loaded & {"textual", "transformers", "tokenizers"}


def test_every_forbidden_import_would_be_seen() -> None:
    tree = ast.parse("def f():\n    from kvchat import load\nimport torch.nn as nn\nfrom kvchat.tui import app")
    assert sorted(kind_of(name) for name in imports(tree)) == ["engine", "torch", "tui"]
    assert [*imports(ast.parse("if TYPE_CHECKING:\n    import torch"))] == []
