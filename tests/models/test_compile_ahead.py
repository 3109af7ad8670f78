"""Loops are compiled once, by processes of their own, before they are asked for."""

from __future__ import annotations

import errno
import os
import sys
from importlib import import_module
from itertools import chain

import pytest
import torch

from kvchat.models import compile_ahead as ahead

QUICK = "kvchat.models.quantize.block_loops"


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """numba's cache, empty; of the loops only those that take least are compiled."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(ahead, "LONGEST", QUICK)
    monkeypatch.setattr(ahead, "OTHERS", [])
    monkeypatch.setattr(ahead.os, "cpu_count", lambda: 1)
    return tmp_path


@pytest.mark.slow("a process compiles")
def test_they_are_compiled_once_and_the_seconds_are_told(cache):
    told: list[str] = []
    ahead.compile_ahead(torch.float32, told.append)
    assert told
    assert [*cache.rglob("block_loops.*.nbc")]
    told.clear()
    ahead.compile_ahead(torch.float32, told.append)
    assert told == []


def test_other_sources_are_compiled_again(cache, monkeypatch, tmp_path):
    before = ahead._key(torch.float32)
    assert ahead._key(torch.bfloat16) != before
    other = tmp_path / "other.py"
    other.touch()
    os.utime(other, (1, 1))
    monkeypatch.setattr(ahead, "OTHERS", ["other"])
    monkeypatch.syspath_prepend(str(tmp_path))
    added = ahead._key(torch.float32)
    assert added != before
    os.utime(other, (2, 2))
    assert ahead._key(torch.float32) != added


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_what_no_loop_reads_is_not_compiled_for(dtype, monkeypatch):
    monkeypatch.setattr(ahead, "_compile", lambda *_: pytest.fail("it compiles"))
    ahead.compile_ahead(dtype, print)


def test_a_process_that_fails_costs_nothing_but_that_it_is_tried_again(cache, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    ahead.compile_ahead(torch.float32, lambda stage: None)
    assert [*cache.iterdir()] == []


def test_without_memory_for_a_process_a_loop_is_compiled_when_it_is_asked_for(cache, monkeypatch):
    def fail(modules, dtype):
        raise OSError(errno.ENOMEM, "no memory")

    monkeypatch.setattr(ahead, "_compile", fail)
    ahead.compile_ahead(torch.float32, lambda stage: None)


def test_what_could_not_be_kept_is_not_compiled_ahead(monkeypatch):
    monkeypatch.setenv("NUMBA_CACHE_DIR", "/dev/null/no-folder")
    monkeypatch.setattr(ahead, "_compile", lambda *_: pytest.fail("it compiles"))
    ahead.compile_ahead(torch.float32, lambda stage: None)


def test_what_ends_the_loading_ends_the_processes(cache, monkeypatch):
    begun = []

    def compile_(modules, dtype):
        begun.append(ahead.subprocess.Popen(["sleep", "60"]))
        return begun[0]

    def stop(stage):
        raise KeyboardInterrupt

    monkeypatch.setattr(ahead, "_compile", compile_)
    with pytest.raises(KeyboardInterrupt):
        ahead.compile_ahead(torch.float32, stop)
    assert begun[0].poll() is not None


@pytest.mark.parametrize("processors", [1, 2, 3, 4, 64])
def test_each_module_is_compiled_by_one_process(processors):
    parts = ahead._parts(processors)
    assert sorted(chain.from_iterable(parts)) == sorted([ahead.LONGEST, *ahead.OTHERS])
    assert len(parts) == min(processors, ahead.MOST)


def test_every_module_of_loops_is_named():
    named = {ahead.LONGEST, *ahead.OTHERS}
    files = [
        *(ahead.paths.PACKAGE / "kv/ops/numba").glob("*.py"),
        *(ahead.paths.PACKAGE / "models").rglob("*_loops.py"),
    ]
    found = {
        ".".join(file.relative_to(ahead.paths.PACKAGE.parent).with_suffix("").parts)
        for file in files
        if "@compiled(" in file.read_text()
    }
    assert found == named
    for name in named:
        import_module(name)
