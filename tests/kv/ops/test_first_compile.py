"""Loops are compiled, and said to be, where no cache holds them."""

import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

from kvchat.kv.ops import first_compile

INDEX = f"{first_compile.FILE.stem}.{first_compile.LOOP}-7.py{sys.version_info.major}{sys.version_info.minor}.nbi"


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(first_compile, "compiled_loops", lambda: None)
    return []


def _index(folder: Path, age: float) -> None:
    (folder / "ops_1").mkdir()
    index = folder / "ops_1" / INDEX
    index.touch()
    written = first_compile.FILE.stat().st_mtime
    os.utime(index, (written - age, written - age))


def test_the_first_time_it_is_said(told: list[str]) -> None:
    first_compile.compile_loops(lambda: told.append("compiling"))
    assert told == ["compiling"]


def test_what_a_cache_holds_is_neither_said_nor_imported(told: list[str], tmp_path: Path) -> None:
    _index(tmp_path, age=0)
    first_compile.compile_loops(lambda: told.append("compiling"))
    assert told == []


def test_what_was_compiled_of_an_older_file_does_not_count(told: list[str], tmp_path: Path) -> None:
    _index(tmp_path, age=10)
    first_compile.compile_loops(lambda: told.append("compiling"))
    assert told == ["compiling"]


def test_of_a_file_that_was_only_touched_it_is_said_once(told, monkeypatch, tmp_path: Path) -> None:
    _index(tmp_path, age=10)
    monkeypatch.setattr(first_compile, "compiled_loops", lambda: True)
    monkeypatch.setitem(sys.modules, "kvchat.kv.ops.compiled_freeze", ModuleType("compiled"))
    for _ in range(2):
        first_compile.compile_loops(lambda: told.append("compiling"))
    assert told == ["compiling"]


def test_the_loop_that_is_looked_for_is_the_last_of_its_file() -> None:
    last = [line for line in first_compile.FILE.read_text().splitlines() if line.startswith("def ")][-1]
    assert last.startswith(f"def {first_compile.LOOP}(")
