"""Packed weights of GGUF files are cached, and loaded instead of packing again."""

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from support import tiny_models
from support.full_disk import full_disk
from support.gguf_files import write_tiny
from support.progress import silent

from kvchat import paths
from kvchat.models import compile_ahead
from kvchat.models import load as loading
from kvchat.models.fuse.modules import sample_logits
from kvchat.models.load import KEPT_DAMAGED, load_model
from kvchat.models.quantize import int4_rows, int8_rows, kept
from kvchat.protocol.messages import Load


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    sizes = {"vocab_size": 8192, "hidden_size": 128, "intermediate_size": 256}
    write_tiny(path, tiny_models.fresh("llama", **sizes), "llama", layers="Q8_0")
    return path


@pytest.fixture
def file(source, tmp_path):
    return shutil.copy(source, tmp_path / "model.gguf")


@pytest.fixture
def packed(monkeypatch):
    """An entry for each matrix packed during the test."""
    counted = []
    for rows in (int8_rows, int4_rows):
        quantize = rows._quantize
        monkeypatch.setattr(
            rows, "_quantize", lambda weight, *rest, own=quantize: counted.append(1) or own(weight, *rest)
        )
    return counted


def load(file, quantize="auto"):
    loaded = load_model(Load(str(file), "cpu", quantize=quantize), silent)
    kept.finish(silent)
    return loaded


def kept_bytes():
    return sum(file.stat().st_size for file in kept.kept_files())


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_a_second_load_packs_nothing_and_computes_equal_logits(file, packed, quantize):
    first = load(file, quantize)
    assert packed
    packed.clear()
    second = load(file, quantize)
    assert not packed
    assert torch.equal(sample_logits(second.model), sample_logits(first.model))
    facts = [(each.fingerprint, each.weights, each.weight_bytes, each.fused, each.notes) for each in (first, second)]
    assert facts[0] == facts[1]


def test_cached_files_do_not_stay_mapped(file):
    load(file)
    second = load(file)
    (kept_file,) = kept.kept_files()
    assert second.weights == "int8"
    assert kept_file.name not in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("change", ["content", "time", "other"])
def test_a_changed_file_is_packed_again(file, packed, change):
    load(file)
    stat = os.stat(file)
    packed.clear()
    if change == "time":
        os.utime(file)
    elif change == "other":
        os.replace(shutil.copy2(file, file.with_name("new")), file)
    else:
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    load(file)
    assert packed
    assert len(kept.kept_files()) == 1, "it replaces the old one"


def test_changed_code_or_another_processor_packs_again(file, packed, monkeypatch):
    monkeypatch.setattr(compile_ahead, "begin", lambda dtype, first=(): None)  # not again for the other processor
    for where, name, value in ((loading, "_code", []), (torch.backends.cpu, "get_cpu_capability", "AVX9")):
        load(file)
        packed.clear()
        with monkeypatch.context() as patch:
            patch.setattr(where, name, lambda value=value: value)
            load(file)
        assert packed


@pytest.mark.parametrize(
    "damage",
    [
        lambda it: it[:9999] + bytes([it[9999] ^ 4]) + it[10_000:],
        lambda it: bytes(64) + it[64:],
        lambda it: it[:-100],
        lambda it: b"",
    ],
    ids=["a bit", "the header", "the end", "everything"],
)
def test_a_damaged_cache_file_is_replaced_and_noted(file, packed, damage):
    first = load(file)
    (kept_file,) = kept.kept_files()
    whole = kept_file.read_bytes()
    kept_file.write_bytes(damage(whole))
    packed.clear()
    second = load(file)
    assert packed
    assert (KEPT_DAMAGED in second.notes, second.fingerprint) == (True, first.fingerprint)
    assert kept_file.read_bytes() == whole
    assert KEPT_DAMAGED not in load(file).notes


def test_loading_on_a_full_disk_caches_nothing(file):
    with full_disk(2**20):
        assert load(file).weights == "int8"
    assert list(paths.packed_dir().iterdir()) == []


def test_the_cache_is_limited_and_evicts_the_oldest(source, tmp_path, monkeypatch):
    models = [shutil.copy(source, tmp_path / f"{name}.gguf") for name in "abc"]
    load(models[0])
    size = kept_bytes()

    def limit_disk(nbytes):
        usage = shutil.disk_usage(tmp_path)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=nbytes - kept_bytes()))

    limit_disk(25 * size)
    load(models[1])
    first, second = kept.kept_files()
    os.utime(second, ns=(0, 0))
    load(models[0])  # most recently used
    load(models[2])
    assert first in kept.kept_files()
    assert second not in kept.kept_files()
    assert kept_bytes() <= 2.5 * size
    limit_disk(9 * size)
    load(models[1])
    assert kept_bytes() == 0, "a file that does not fit is not cached"


def test_old_unfinished_files_are_removed(file):
    paths.packed_dir().mkdir(parents=True)
    old, new = (paths.packed_dir() / f"{name}{kept.UNFINISHED}" for name in ("old", "new"))
    old.touch()
    new.touch()
    os.utime(old, (0, 0))
    load(file)
    assert (old.exists(), new.exists()) == (False, True)


def test_stopping_discards_a_file_being_written(file, monkeypatch):
    began, resume = threading.Event(), threading.Event()
    header = kept._header

    def slow(weights):
        began.set()
        resume.wait(60)
        return header(weights)

    monkeypatch.setattr(kept, "_header", slow)
    load_model(Load(str(file), "cpu"), silent)
    began.wait(60)
    threading.Timer(0.1, resume.set).start()
    kept.stop()
    assert list(paths.packed_dir().iterdir()) == []


LOADS = """
import sys
from kvchat.models.load import load_model
from kvchat.protocol.messages import Load
print(load_model(Load(sys.argv[1], "cpu"), lambda stage: None).fingerprint)
"""


@pytest.mark.slow("a process loads a model")
def test_two_processes_can_cache_the_same_file_at_once(file, packed):
    command = [sys.executable, "-c", LOADS, str(file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as other:
        fingerprint = load(file).fingerprint
        assert other.communicate() == (f"{fingerprint}\n", "")
    assert {each.suffix for each in paths.packed_dir().iterdir()} <= {kept.SUFFIX}  # it may have removed ours
    for _ in range(2):
        packed.clear()
        assert load(file).fingerprint == fingerprint
    assert not packed
    assert [each.suffix for each in paths.packed_dir().iterdir()] == [kept.SUFFIX]
