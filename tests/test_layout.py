"""Tests mirror the code: ``kvchat/a/b.py`` is tested in ``tests/a/test_b.py`` or ``tests/a/test_b_<aspect>.py``."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE, TESTS = ROOT / "kvchat", ROOT / "tests"
FILES = sorted(TESTS.rglob("*.py"))
TEST_FILES = [path for path in FILES if path.name.startswith("test_")]

# What has no file of its own to mirror, and why.
EXCEPTIONS = {
    "test_dependencies": "what pyproject.toml asks for",
    "test_gpu_script": ".ci/gpu",
    "test_long_chat_script": ".ci/long_chat.py",
    "test_imports": "the layers of the whole package",
    "test_layout": "the tests themselves",
    "test_plugin_mode": "a KV mode of another package",
    "test_readme": "the README",
    "test_style": "lint, format and types",
    "test_sweeps_script": ".ci/sweeps",
    "test_wheel": "the built package",
    "test_words": "the words of the whole package",
    "engine/model/test_architectures": "every supported architecture, through the whole model package",
    "engine/test_cuda": "graphs and streams on a GPU",
    "engine/test_walks": "the files from the session down to what is copied",
    "fake_cuda/test_fake_cuda": "tests/support/fake_cuda",
    "fake_cuda/test_modes_on_fake_cuda": "tests marked cuda, on the fake CUDA device",
    "fake_cuda/test_races": "tests/support/fake_cuda/races.py",
    "fake_cuda/test_tape": "tests/support/fake_cuda/tape.py",
    "kv/modes/test_every_mode": "all modes against the reference",
    "kv/ops/triton/test_compile": "all kernels, compiled for GPUs",
    "kv/test_properties": "all modes over random conversations",
    "kv/test_readback": "no step of any mode waits for the device",
}


def name_of(path: Path) -> str:
    return path.relative_to(TESTS).with_suffix("").as_posix()


def mirrored(path: Path) -> Path | None:
    """The file or package that a test file mirrors; None if there is none."""
    words = path.stem.removeprefix("test_").split("_")
    folder = PACKAGE / path.relative_to(TESTS).parent
    candidates = [folder / "_".join(words[:n]) for n in range(len(words), 0, -1)]
    return next((file for file in candidates if file.with_suffix(".py").exists()), None)


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


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_no_file_imports_a_test_file(path: Path) -> None:
    assert not imported_tests(ast.parse(path.read_text()))


@pytest.mark.parametrize("path", TEST_FILES, ids=name_of)
def test_a_test_file_mirrors_a_file_of_the_package(path: Path) -> None:
    assert (mirrored(path) is None) == (name_of(path) in EXCEPTIONS)


def test_exceptions_exist() -> None:
    assert set(map(name_of, TEST_FILES)) >= set(EXCEPTIONS)


def test_a_forbidden_import_is_found() -> None:
    code = (
        "from kv.modes.test_every_mode import ROWS\nimport engine.test_cuda\nfrom kv import test_manager\nimport json"
    )
    assert len(imported_tests(ast.parse(code))) == 3
