"""Loops are compiled, and said to be, where no cache holds them."""

import os
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from kvchat.kv.ops import cpu_ops

KEPT = f"{cpu_ops.FILE.stem}.{cpu_ops.LOOP}-7.py{sys.version_info.major}{sys.version_info.minor}"


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(cpu_ops, "compiled_loops", lambda: None)
    return []


def _keep(folder: Path, age: float, number: int = 1) -> None:
    (folder / "ops_1").mkdir(exist_ok=True)
    kept = folder / "ops_1" / f"{KEPT}.{number}.nbc"
    kept.touch()
    written = cpu_ops.FILE.stat().st_mtime
    os.utime(kept, (written - age, written - age))


def test_the_first_time_it_is_said(told: list[str]) -> None:
    cpu_ops.compile_loops(torch.float32, lambda: told.append("compiling"))
    assert told == ["compiling"]


def test_what_a_cache_holds_is_neither_said_nor_imported(told: list[str], tmp_path: Path) -> None:
    _keep(tmp_path, age=0)
    cpu_ops.compile_loops(torch.float32, lambda: told.append("compiling"))
    assert told == []


@pytest.mark.parametrize(("age", "said"), [(0, []), (10, ["compiling"])])
def test_bfloat16_asks_for_loops_of_its_own(age: float, said: list[str], told: list[str], tmp_path: Path) -> None:
    _keep(tmp_path, age=0)
    _keep(tmp_path, age, number=2)
    cpu_ops.compile_loops(torch.bfloat16, lambda: told.append("compiling"))
    assert told == said


def test_what_was_compiled_of_an_older_file_does_not_count(told: list[str], tmp_path: Path) -> None:
    _keep(tmp_path, age=10)
    cpu_ops.compile_loops(torch.float32, lambda: told.append("compiling"))
    assert told == ["compiling"]


def test_of_a_file_that_was_only_touched_it_is_said_once(told, monkeypatch, tmp_path: Path) -> None:
    _keep(tmp_path, age=10)
    monkeypatch.setattr(cpu_ops, "compiled_loops", lambda: True)
    monkeypatch.setitem(sys.modules, "kvchat.kv.ops.numba.freeze", ModuleType("compiled"))
    for _ in range(2):
        cpu_ops.compile_loops(torch.float32, lambda: told.append("compiling"))
    assert told == ["compiling"]


def test_the_loop_that_is_looked_for_is_the_last_of_its_file() -> None:
    last = [line for line in cpu_ops.FILE.read_text().splitlines() if line.startswith("def ")][-1]
    assert last.startswith(f"def {cpu_ops.LOOP}(")
