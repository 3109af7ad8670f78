"""Compiles the loops once on a machine, before an answer that asks for them would stand still.

numba compiles one loop after the other on one core, all of them in 15 to 60 s. Here several processes do it at once;
from then on its cache holds them, beside their files or in the user's cache folder.
"""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys
import time
from importlib import import_module, metadata, util
from pathlib import Path

import torch
from platformdirs import user_cache_path

from kvchat import paths, process, units
from kvchat.kv.ops.cpu_ops import KNOWN
from kvchat.models.hub import Progress

# The modules of loops, what takes longest first: as long as all others together.
LONGEST, *OTHERS = (
    "kvchat.kv.ops.numba.tokens",
    "kvchat.models.quantize.product_loops",
    "kvchat.kv.ops.numba.eight_bit",
    "kvchat.kv.ops.numba.freeze",
    "kvchat.kv.ops.numba.pages",
    "kvchat.kv.ops.numba.in_a_row",
    "kvchat.kv.ops.numba.scattered",
    "kvchat.models.quantize.block_loops",
)
MOST = 4  # processes: each imports torch, and takes some 300 MB
LOOK_S = 0.2
IN_BFLOAT16 = "bfloat16"


def compile_ahead(dtype: torch.dtype, progress: Progress) -> None:
    """Compile all loops for K/V of ``dtype``, unless that was done; ``progress`` is told the seconds it takes.

    Where it fails, or what is compiled cannot be kept, a loop is compiled when it is asked for.
    """
    folders = _folders()
    stamp = f"kvchat-{_key(dtype)}" if dtype in KNOWN else ""
    if not stamp or any((folder / stamp).exists() for folder in folders):
        return
    kept_in = next(filter(_can_be_written, folders), None)
    if kept_in is None or _has_no_numba():
        return
    began, processes = time.monotonic(), []
    try:
        for modules in _parts(os.cpu_count() or 1):
            processes.append(_compile(modules, dtype))
        while any(one.poll() is None for one in processes):
            took = units.seconds(int(time.monotonic() - began))
            progress(f"Compiling loops for this processor, once on this machine · {took}")
            time.sleep(LOOK_S)
        if not any(one.returncode for one in processes):
            (kept_in / stamp).touch()
    except OSError:  # no memory for a process, or a full disk
        return
    finally:
        for one in processes:
            one.kill()
            one.wait()


def _has_no_numba() -> bool:
    """True if numba does not run here: numpy or Python is unknown to it, or it is not installed."""
    try:
        import_module("numba")
    except (ImportError, OSError, MemoryError):
        return True
    return False


def _can_be_written(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)


def _parts(processors: int) -> list[list[str]]:
    """The modules that each process compiles."""
    if processors == 1:
        return [[LONGEST, *OTHERS]]
    others = min(processors, MOST) - 1
    return [[LONGEST], *(OTHERS[first::others] for first in range(others))]


def _compile(modules: list[str], dtype: torch.dtype) -> subprocess.Popen[bytes]:
    quiet = subprocess.DEVNULL
    command = process.python("-m", __name__, str(dtype).removeprefix("torch."), *modules)
    return subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet)


def _key(dtype: torch.dtype) -> str:
    """A digest of all that numba's cache depends on."""
    sources = [Path(util.find_spec(name).origin) for name in (LONGEST, *OTHERS)]  # type: ignore[union-attr, arg-type]
    stamps = [(str(file), file.stat().st_mtime_ns) for file in sources]
    machine = platform.node(), platform.machine(), torch.backends.cpu.get_cpu_capability(), sys.version
    told = str(dtype), stamps, machine, metadata.version("numba")
    return hashlib.sha256(repr(told).encode()).hexdigest()[:16]


def _folders() -> list[Path]:
    """Where numba keeps what it compiles: where it is told, or the first of these that may be written."""
    if chosen := os.environ.get("NUMBA_CACHE_DIR"):
        return [Path(chosen)]
    return [paths.PACKAGE / "kv" / "ops" / "numba" / "__pycache__", user_cache_path("numba", appauthor=False)]


def main(dtype: str, *modules: str) -> None:
    """Compile the loops of ``modules``, in a process that ends with the one that asked."""
    from kvchat.kv.ops.numba.loops import compile_for_bfloat16

    process.die_with_parent()
    for module in modules:
        import_module(module)
        if dtype == IN_BFLOAT16:
            compile_for_bfloat16()


if __name__ == "__main__":
    main(*sys.argv[1:])
