"""The interpreter takes what the compiler does not: every kernel is compiled to machine code, without a GPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import kvchat
from kvchat.kv.ops import triton

LEAST_SHARED = 99 * 1024  # bytes a program gets from compute capability 8.0 on
OF_WIDTH = ("_attend_part", "_move_pages", "_move_tokens", "_move_shared", "_page_scores")


@pytest.mark.slow("Triton compiles every kernel")
@pytest.mark.parametrize(("capability", "dtype", "d"), [(80, "float16", 80), (90, "bfloat16", 128)])
def test_every_kernel_compiles(capability, dtype, d, pytestconfig, tmp_path):
    script = Path(__file__).parents[3] / "support" / "compile_kernels.py"
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = str(Path(kvchat.__file__).parents[1])
    cache = getattr(pytestconfig, "cache", None)  # pytest can run without one
    env["TRITON_CACHE_DIR"] = str(cache.mkdir("triton") if cache else tmp_path)
    command = [sys.executable, "-W", "error::UserWarning", script, str(capability), dtype, str(d)]
    ran = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    found = json.loads(ran.stdout)
    assert set(found) == kernels_of_the_package()
    for name, variants in found.items():
        for shared, wide_loads in variants:
            assert shared <= LEAST_SHARED, f"{name} takes {shared} bytes of shared memory"
            assert wide_loads > 0 or name not in OF_WIDTH, f"{name} loads less than 16 bytes at a time"


def kernels_of_the_package():
    """Names that a grid in brackets follows, and arguments follow that."""
    sources = [path.read_text() for path in Path(triton.__file__).parent.glob("*.py")]
    return {name for source in sources for name in re.findall(r"\b(_[a-z_]+)\[[^\]]+\]\(", source)}
