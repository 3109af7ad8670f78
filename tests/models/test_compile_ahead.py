"""Loops are compiled once, in other processes, while torch does their work."""

import errno
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch
from support.patience import PATIENCE_S, wait_until
from support.progress import silent

from kvchat.kv.ops import cpu_ops
from kvchat.models import compile_ahead as ahead
from kvchat.models.compile_ahead import begin  # the suite patches it to wait until all are compiled

QUICK = "kvchat.models.quantize.block_loops"
# Compiles nothing: writes down each name with the priority of the process, once there is no file "held".
FAKE_COMPILER = """
import os, sys, time
from pathlib import Path
folder = Path(sys.argv[1])
for name in map(str.strip, sys.stdin):
    while (folder / "held").exists():
        time.sleep(0.01)
    with (folder / "compiled").open("a") as file:
        file.write(f"{name} {os.getpriority(os.PRIO_PROCESS, 0)}\\n")
    print(name, flush=True)
"""
IN_COLD_CACHE = """
import kvchat
from kvchat.kv.ops import cpu_ops
from kvchat.models import compile_ahead
from kvchat.protocol.messages import Sampling

children, start, compile_ahead.MOST = [], compile_ahead._start, 1
def started(dtype):
    children.append(start(dtype))
    return children[-1]
compile_ahead._start = started

session = kvchat.load("bundled", device="cpu")
text = "".join(session.chat("Tell me a story.", Sampling(max_new_tokens=4)))
print(bool(text), compile_ahead.is_running(), len(cpu_ops.awaited) > 0, session.info.notes)
print(*(child.pid for child in children), flush=True)
input()
"""


@pytest.fixture(autouse=True)
def fresh_state(monkeypatch):
    """No compilation is in progress before the test, and none is awaited after it."""
    monkeypatch.setattr(ahead, "_current", None)
    monkeypatch.setattr(cpu_ops, "awaited", {})


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """An empty numba cache; only the loops that compile fastest are compiled."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(ahead, "MODULES", (QUICK,))
    monkeypatch.setattr(ahead.os, "cpu_count", lambda: 1)
    return tmp_path


@pytest.fixture
def fake_compilers(cache, monkeypatch, tmp_path):
    """Processes that only pretend to compile three modules."""
    monkeypatch.setattr(ahead, "MODULES", ("one", "two", "three"))
    monkeypatch.setattr(ahead, "_key", str)
    started = []

    def start(dtype):
        command = [sys.executable, "-c", FAKE_COMPILER, str(tmp_path)]
        started.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        return started[-1]

    monkeypatch.setattr(ahead, "_start", start)
    return started


def stamps(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.glob("kvchat-*"))


@pytest.mark.slow("a process compiles")
def test_torch_is_used_until_loops_are_compiled(cache):
    stages: list[str] = []
    begin(torch.float32)
    assert cpu_ops.compiled_loops(QUICK) is None
    assert ahead.is_running()
    ahead.finish(stages.append)
    assert stages
    assert [*cache.rglob("block_loops.*.nbc")]
    assert cpu_ops.compiled_loops(QUICK) is sys.modules[QUICK]
    assert len(stamps(cache)) == 1
    begin(torch.float32)
    assert not ahead.is_running()


@pytest.mark.slow("a process compiles while a model is loaded and answers")
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_first_answer_waits_for_no_loop_and_compilers_end(tmp_path):
    environ = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", IN_COLD_CACHE]
    with subprocess.Popen(command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as engine:
        answered, children = engine.stdout.readline(), engine.stdout.readline().split()
        engine.kill()
    assert answered == f"True True True {(ahead.NOTE,)}\n"
    assert children
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children))
    assert stamps(tmp_path) == []


def test_changed_sources_are_compiled_again(cache, monkeypatch, tmp_path):
    before = ahead._key(torch.float32)
    assert ahead._key(torch.bfloat16) != before
    other = tmp_path / "other.py"
    other.touch()
    os.utime(other, (1, 1))
    monkeypatch.setattr(ahead, "MODULES", (QUICK, "other"))
    monkeypatch.syspath_prepend(str(tmp_path))
    added = ahead._key(torch.float32)
    assert added != before
    os.utime(other, (2, 2))
    assert ahead._key(torch.float32) != added


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_dtypes_that_no_loop_reads_are_not_compiled(dtype, monkeypatch):
    monkeypatch.setattr(ahead, "_start", lambda *_: pytest.fail("it compiles"))
    begin(dtype)
    assert cpu_ops.awaited == {}


def test_after_a_failed_process_only_needed_loops_are_compiled(cache, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    begin(torch.float32)
    ahead.finish(silent)
    assert cpu_ops.compiled_loops(QUICK) is None
    assert cpu_ops.needed_loops(QUICK) is sys.modules[QUICK]
    assert stamps(cache) == []


def test_other_processes_finish_the_work_of_a_killed_one(fake_compilers, cache, monkeypatch):
    monkeypatch.setattr(ahead.os, "cpu_count", lambda: 2)
    (cache / "held").touch()
    begin(torch.float32)
    wait_until(lambda: len(ahead._current._left) == 1)  # each has begun one module
    fake_compilers[0].kill()
    (cache / "held").unlink()
    ahead.finish(silent)
    assert len(cpu_ops.awaited) == 1
    assert all(event.is_set() for event in cpu_ops.awaited.values())
    assert stamps(cache) == []


def test_torch_is_used_without_memory_for_a_process(cache, monkeypatch):
    def fail(dtype):
        raise OSError(errno.ENOMEM, "no memory")

    monkeypatch.setattr(ahead, "_start", fail)
    begin(torch.float32)
    ahead.finish(silent)
    ahead.wait(silent, [QUICK])
    assert cpu_ops.compiled_loops(QUICK) is None


def test_nothing_is_compiled_ahead_without_a_cache_folder(monkeypatch):
    monkeypatch.setenv("NUMBA_CACHE_DIR", "/dev/null/no-folder")
    monkeypatch.setattr(ahead, "_start", lambda *_: pytest.fail("it compiles"))
    begin(torch.float32)
    assert cpu_ops.awaited == {}


@pytest.mark.parametrize("processors", [1, 2, 64])
def test_each_module_is_compiled_by_one_process(processors, fake_compilers, cache, monkeypatch):
    monkeypatch.setattr(ahead.os, "cpu_count", lambda: processors)
    begin(torch.float32)
    ahead.finish(silent)
    assert sorted(line.split()[0] for line in (cache / "compiled").read_text().splitlines()) == ["one", "three", "two"]
    assert len(fake_compilers) == min(processors, ahead.MOST)
    assert all(child.poll() is not None for child in fake_compilers)
    assert stamps(cache) == ["kvchat-torch.float32"]


def test_awaited_modules_come_first_and_others_at_low_priority(fake_compilers, cache):
    begin(torch.float32, ["three"])
    ahead.finish(silent)
    own_priority = os.getpriority(os.PRIO_PROCESS, 0)
    compiled = [line.split() for line in (cache / "compiled").read_text().splitlines()]
    assert compiled == [["three", str(own_priority)], ["one", "19"], ["two", "19"]]


def test_compiling_for_another_dtype_replaces_the_first(fake_compilers, cache):
    (cache / "held").touch()
    begin(torch.float32)
    before = ahead._current
    begin(torch.bfloat16)
    assert set(cpu_ops.awaited) == {"one", "two", "three"}
    (cache / "held").unlink()
    before.ended.wait(PATIENCE_S)
    ahead.finish(silent)
    assert cpu_ops.awaited == {}
    assert stamps(cache) == ["kvchat-torch.bfloat16", "kvchat-torch.float32"]
    begin(torch.float32)
    assert not ahead.is_running(), "bfloat16 includes the loops of float32"


def test_waiting_can_be_interrupted(fake_compilers, cache):
    def stop(stage):
        raise KeyboardInterrupt

    (cache / "held").touch()
    begin(torch.float32)
    with pytest.raises(KeyboardInterrupt):
        ahead.wait(stop, ["one"])
    assert ahead.is_running()
    (cache / "held").unlink()
    ahead.finish(silent)


def test_every_module_with_loops_is_listed():
    files = [
        *(ahead.paths.PACKAGE / "kv/ops/numba").glob("*.py"),
        *(ahead.paths.PACKAGE / "models").rglob("*_loops.py"),
    ]
    found = {
        ".".join(file.relative_to(ahead.paths.PACKAGE.parent).with_suffix("").parts)
        for file in files
        if "@compiled(" in file.read_text()
    }
    assert found == set(ahead.MODULES)
    for name in ahead.MODULES:
        import_module(name)


# ---- Imports for a model


LOADS = """
import sys
from kvchat.models.load import load_model
from kvchat.protocol.messages import Load
from kvchat.models.support import COMPILER
load_model(Load(sys.argv[1], "cpu"), lambda stage: None)
heavy = ("sympy", "torchao", "torch._inductor", "torch.distributed.tensor", "torch._dynamo.convert_frame")
print([name for name in heavy if name in sys.modules])
print(type(sys.modules["transformers.models"]).__name__)
import transformers
from transformers import GPT2Config
from transformers.models import bert
print(type(transformers.models.bert.BertConfig()).__module__, GPT2Config is transformers.GPT2Config)
print(type(sys.modules["transformers"]).__name__, transformers.__version__ == sys.modules["transformers"].__version__)
print(transformers.tokenization_utils_fast.PreTrainedTokenizerFast is transformers.PreTrainedTokenizerFast)
from transformers.masking_utils import TransformGetItemToIndex
with TransformGetItemToIndex():
    pass
import torch
print(torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2)).tolist())
print([name for name in COMPILER if type(sys.modules.get(name)).__name__ == "Later"])
from transformers.utils import is_torchao_available
print(is_torchao_available())
"""


@pytest.mark.slow("a process imports torch's compiler")
def test_loading_does_not_import_torchs_compiler():
    done = subprocess.run([sys.executable, "-c", LOADS, "bundled"], capture_output=True, text=True, check=True)
    imported, listed, bert, package, old, compiled, in_place, has_torchao = done.stdout.splitlines()
    assert imported == "[]"
    assert (listed, bert) == ("Later", "transformers.models.bert.configuration_bert True")
    assert package == "_LazyModule True"
    assert old == "True"
    assert compiled == "[2.0, 2.0]"
    assert in_place == "[]"
    pytest.importorskip("torchao")
    assert has_torchao == "True"
