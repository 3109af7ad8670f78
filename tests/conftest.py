"""The environment of every test: its own directories, one thread, no network."""

from __future__ import annotations

import errno
import gc
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# Before torch is imported: the workers of `pytest -n auto` would otherwise compete for the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # each of the hundreds of processes started would compile kvchat
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# Python's default, a collection after 700 objects, takes a sixth of the time of imports and the application's tests.
gc.set_threshold(50_000, 20, 100)
# Device files of the NVIDIA driver on Linux and in WSL.
if not any(map(os.path.exists, ("/dev/nvidiactl", "/dev/dxg"))):
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined

# No randomness and no deadline: a busy machine or an unlucky example must fail no test. The long form seeks new ones.
settings.register_profile(
    "kvchat",
    deadline=None,
    derandomize="KVCHAT_TEST_FRAMES" not in os.environ,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture],
)
settings.load_profile("kvchat")


# After the environment is set, and before tests have their own directories.
from support import real_models, tested_models  # noqa: E402

MANY = 300  # modules, of which transformers imports two thousand with the first model
seen_modules = [0]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fake-cuda", action="store_true", help="run tests marked cuda on a fake CUDA device")
    parser.addoption("--update-snapshots", action="store_true", help="accept the current screens as correct")


COMPILE = """
import torch
from kvchat.models import compile_ahead
compile_ahead.begin(torch.bfloat16)
compile_ahead.finish(lambda stage: None)
"""


def pytest_configure(config: pytest.Config) -> None:
    on_a_gpu = config.getoption("markexpr") == "cuda"  # where minutes are expensive, and few tests need the loops
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput") and not on_a_gpu:
        subprocess.run([sys.executable, "-c", COMPILE])  # or each worker would compile the same loops at once
    if config.getoption("--fake-cuda"):
        from support import fake_cuda

        fake_cuda.install()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start with the tests that take minutes, so that no worker ends up alone with them.

    Raises:
        UsageError: a slow test gives no reason.
    """
    unexplained = [item.nodeid for item in items for mark in item.iter_markers("slow") if not mark.args]
    if unexplained:
        raise pytest.UsageError(f"Slow tests need a reason, as in slow('a wheel is built'): {', '.join(unexplained)}")
    items.sort(key=lambda item: "fake_cuda" not in item.path.parts)
    for item in items:
        item.runtest = partial(with_room, item.runtest)


def with_room(run: Callable[[], None]) -> None:
    run()


# Python maps memory for frames in pieces of 16 KiB, and a loop at the end of one maps and unmaps the next at each call.
# The frame of ``with_room`` needs a piece of 1 MiB, in which those of a test have room.
with_room.__code__ = with_room.__code__.replace(co_stacksize=2**16)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """One more than the number of processors: tests wait for processes, pauses and the disk."""
    from xdist.plugin import pytest_xdist_auto_num_workers as processors

    return int(processors(config)) + 1


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give each worker the same number of tests, and an idle one some of another's."""
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log)


@pytest.fixture
def count(record_property: Callable[[str, object], None]) -> Iterator[Counter[str]]:
    """Counts, by kind, how often a test did what may break the program; written to ``--junitxml``."""
    counted: Counter[str] = Counter()
    yield counted
    for kind, number in counted.items():
        record_property(kind, number)


def compile_all(ahead: ModuleType, begin: Callable[..., None], dtype: Any) -> None:
    """Compile all loops before a model is loaded, unless ``pytest_configure`` has."""
    begin(dtype)
    ahead.finish(lambda stage: None)


@pytest.fixture(autouse=True)
def own_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the user's settings, logs and history out of the tests."""
    for name in [name for name in os.environ if name.startswith("KVCHAT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("KVCHAT_CONFIG", str(tmp_path / "config" / "config.toml"))
    monkeypatch.setenv("KVCHAT_DATA_DIR", str(tmp_path / "data"))
    if loads := sys.modules.get("kvchat.models.load"):
        tested_models.share(loads, monkeypatch)
    if ahead := sys.modules.get("kvchat.models.compile_ahead"):
        # Loops compiled in the middle of a test would make two of its runs differ.
        monkeypatch.setattr(ahead, "begin", lambda dtype, first=(), begin=ahead.begin: compile_all(ahead, begin, dtype))


@pytest.fixture
def untested(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget which checks models passed in other tests."""
    monkeypatch.setattr(tested_models, "passed", tested_models.Forgetful())


def pytest_runtest_setup(item: pytest.Item) -> None:
    if len(sys.modules) - seen_modules[-1] > MANY:
        # Modules are never freed: each collection, for example when a session closes, would scan them again.
        seen_modules.append(len(sys.modules))
        gc.collect()
        gc.freeze()
    if "triton.runtime.interpreter" in sys.modules:
        from support import quick_interpreter

        quick_interpreter.install()
    if item.config.getoption("--fake-cuda"):
        from support.fake_cuda.device import gpu

        gpu.chance.seed(item.nodeid)
    if item.get_closest_marker("terminal") and not shutil.which("tmux"):
        pytest.skip("no tmux")
    if item.get_closest_marker("fake_cuda") and not item.config.getoption("--fake-cuda"):
        pytest.skip("only on the fake CUDA device: --fake-cuda")
    real = item.get_closest_marker("real_model")
    if real and real.args[0] not in real_models.FILES:
        pytest.skip(f"no {real.args[0]}: .ci/models.py {real.args[0]} fetches it")
    if item.get_closest_marker("cuda") and not _has_cuda():
        pytest.skip("no CUDA GPU")


def pytest_runtest_teardown(item: pytest.Item) -> None:
    if item.config.getoption("--fake-cuda"):
        from support.fake_cuda.device import gpu

        found, gpu.hazards = gpu.hazards, []
        assert not found, found


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full: ``fsync`` fails."""

    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fail)
