"""No package downloads compiled code and runs it, wherever ``kernels`` is installed."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from kvchat.libraries import BITSANDBYTES_LOG, TRANSFORMERS, import_bitsandbytes, refuse_in_transformers

KERNELS = """
from pathlib import Path
from unittest.mock import MagicMock
def get_kernel(*args, **kwargs):
    Path(__file__).with_name("was_asked").touch()
    raise FileNotFoundError
def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return MagicMock()
"""
IMPORTING = """
import kvchat.engine
from transformers.integrations import hub_kernels
for name in hub_kernels._HUB_KERNEL_MAPPING:
    hub_kernels.lazy_load_kernel(name)
from kvchat.libraries import import_bitsandbytes
try:
    import_bitsandbytes()
except ImportError:
    pass
"""


@pytest.mark.parametrize("there", [None, ModuleType("kernels")], ids=["absent", "imported before"])
def test_bitsandbytes_finds_no_kernels_and_what_was_there_is_there_again(monkeypatch, caplog, there):
    monkeypatch.delitem(sys.modules, "kernels", raising=False)
    if there:
        monkeypatch.setitem(sys.modules, "kernels", there)

    def load(name: str) -> str:
        with pytest.raises(ImportError):
            importlib.import_module("kernels")
        logging.getLogger(BITSANDBYTES_LOG).warning("cannot load a kernel")
        return name

    assert import_bitsandbytes(load) == "bitsandbytes"
    assert sys.modules.get("kernels") is there
    assert not caplog.text
    assert logging.getLogger(BITSANDBYTES_LOG).isEnabledFor(logging.WARNING)


def test_a_bitsandbytes_that_fails_leaves_all_as_it_was():
    def load(name: str) -> None:
        raise ImportError(name)

    with pytest.raises(ImportError, match="bitsandbytes"):
        import_bitsandbytes(load)
    assert sys.modules.get("kernels", "absent") == "absent"


@pytest.mark.parametrize(("given", "left"), [(None, "NO"), ("YES", "YES")])
def test_what_the_environment_says_of_transformers_holds(monkeypatch, given, left):
    monkeypatch.delenv(TRANSFORMERS, raising=False)
    if given:
        monkeypatch.setenv(TRANSFORMERS, given)
    refuse_in_transformers()
    assert os.environ[TRANSFORMERS] == left


def test_no_kernel_is_asked_for_by_the_engines_libraries(tmp_path):
    folder = tmp_path / "kernels"
    folder.mkdir()
    (folder / "__init__.py").write_text(KERNELS)
    metadata = tmp_path / "kernels-0.18.5.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: kernels\nVersion: 0.18.5\n")
    root = Path(importlib.util.find_spec("kvchat").origin).parents[1]
    path = os.pathsep.join((str(tmp_path), str(root)))
    environment = {name: value for name, value in os.environ.items() if name != TRANSFORMERS}
    subprocess.run([sys.executable, "-c", IMPORTING], env={**environment, "PYTHONPATH": path}, check=True, timeout=120)
    assert not (folder / "was_asked").exists()
