"""Every kernel is compiled to machine code without a GPU: the interpreter accepts what the compiler rejects."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.grids import WHOLE

import kvchat
from kvchat.kv.ops import triton
from kvchat.models.fuse import kernels

CELLS = [(80, "float16", 80)]
# A minute or more each. Compute capability 7.5 has no bfloat16, but a checkpoint's own dtype is used there too.
OTHER_CELLS = [
    *[(75, "float16", 128), (75, "bfloat16", 64), (75, "float16", 256), (80, "bfloat16", 128), (86, "bfloat16", 64)],
    *[(86, "float16", 96), (89, "bfloat16", 80), (89, "float16", 256), (90, "float16", 64), (90, "bfloat16", 128)],
    *[(100, "bfloat16", 256), (100, "float16", 64), (120, "bfloat16", 96), (120, "float16", 128)],
]
OF_WIDTH = [
    "_attend_part",
    "_move_pages",
    "_move_tokens",
    "_move_shared",
    "_page_scores",
    "_token_scores",
    "_unread_parts",
]


def least_shared(capability):
    """Bytes of shared memory that a program gets on every GPU of the generation."""
    return (64 if capability < 80 else 99) * 1024


@pytest.mark.slow("Triton compiles every kernel")
@pytest.mark.parametrize(("capability", "dtype", "d"), CELLS + OTHER_CELLS * WHOLE)
def test_every_kernel_compiles(capability, dtype, d, pytestconfig, tmp_path):
    """For one GPU; for those of every generation in the long form."""
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
        for shared, wide_loads, spilled in variants:
            assert shared <= least_shared(capability), f"{name} takes {shared} bytes of shared memory"
            assert wide_loads > 0 or name not in OF_WIDTH, f"{name} loads less than 16 bytes at a time"
            assert spilled == 0, f"{name} spills {spilled} bytes"


def kernels_of_the_package():
    """Names followed by a grid in brackets and by arguments."""
    modules = [*Path(triton.__file__).parent.glob("*.py"), Path(kernels.__file__)]
    sources = [path.read_text() for path in modules]
    return {name for source in sources for name in re.findall(r"\b(_[a-z_]+)\[.+?\]\(", source)}
