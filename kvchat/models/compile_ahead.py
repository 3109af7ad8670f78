"""Compile the loops once per machine, in other processes, while models already load and answer without them.

numba alone would compile one loop after another on one core, which takes half a minute to two minutes. Here several
low-priority processes share the work and leave the results in numba's cache, next to the source files or in the user's
cache folder. As soon as a module of loops is compiled it is imported, and the next step uses it instead of torch. Only
loops for packed weights, which torch cannot replace, are waited for.
"""

from __future__ import annotations

import hashlib
import os
import platform
import queue
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Collection, Iterable
from contextlib import suppress
from importlib import import_module, metadata, util
from pathlib import Path

import torch
from platformdirs import user_cache_path

from kvchat import paths, process
from kvchat.kv.ops import cpu_ops
from kvchat.models.hub import Progress
from kvchat.models.quantize import kept
from kvchat.models.quantize.rows import BLOCKS_OF_WEIGHTS, PRODUCTS

OF_PACKED = PRODUCTS, BLOCKS_OF_WEIGHTS  # needed to load packed weights
# In the order of compiling: first those that every answer uses, then the slowest to compile.
MODULES = (cpu_ops.PAGES, cpu_ops.TOKENS, cpu_ops.IN_A_ROW, cpu_ops.ROWS, cpu_ops.FREEZE, cpu_ops.EIGHT_BIT, *OF_PACKED)
MOST = 4  # processes; each imports torch and takes some 300 MB
LOOK_S = 0.2
LOWEST = 19  # priority
IN_BFLOAT16 = "bfloat16"
NOTE = "Answers get faster in about a minute: code is compiled once per machine."


def begin(dtype: torch.dtype, first: Collection[str] = ()) -> None:
    """Start compiling all loops for K/V of ``dtype``, the modules ``first`` before others, unless that is already done.

    If compiling fails, torch stays in use. If no cache folder is writable, each loop is compiled on first use.
    """
    global _current
    if _current and _current.dtype == dtype and not _current.ended.is_set():
        return
    folders = _folders()
    stamp = f"kvchat-{_key(dtype)}" if dtype in cpu_ops.KNOWN else ""
    if not stamp or any((folder / stamp).exists() for folder in folders):
        return
    folder = next(filter(_can_be_written, folders), None)
    # Import it in this thread: it starts numba's threads, and then restores torch's number of threads.
    if folder is None or cpu_ops.imported(cpu_ops.BASE) is None:
        return
    if _current:
        _current.stop()
    stamps = {folder / f"kvchat-{_key(each)}" for each in (dtype, torch.float32)}  # compiling for bfloat16 covers both
    _current = Compiling(dtype, sorted(MODULES, key=lambda name: name not in first), first, stamps)


def wait(progress: Progress, names: Collection[str]) -> None:
    """Wait for those of the modules ``names`` that are being compiled; report the seconds so far to ``progress``."""
    _wait(progress, filter(None, map(cpu_ops.awaited.get, names)))


def finish(progress: Progress) -> None:
    """Wait for all modules that are being compiled, and for packed weights that are being saved."""
    _wait(progress, [_current.ended] if _current else [])
    kept.finish(progress)


def _wait(progress: Progress, events: Iterable[threading.Event]) -> None:
    began = time.monotonic()
    for event in events:
        while not event.is_set():
            progress(f"Compiling for this processor (once only), {time.monotonic() - began:.0f} s so far")
            event.wait(LOOK_S)


def is_running() -> bool:
    return _current is not None and not _current.ended.is_set()


class Compiling:
    """Processes that compile the modules ``names`` for K/V of ``dtype``, those in ``needed`` at normal priority.

    ``ended`` is set when the last process ends. If all modules were compiled, the files ``stamps`` are created.
    """

    def __init__(self, dtype: torch.dtype, names: Collection[str], needed: Collection[str], stamps: set[Path]) -> None:
        self.dtype, self.ended = dtype, threading.Event()
        self._left, self._needed, self._stamps = deque(names), needed, stamps
        self._awaited = {name: threading.Event() for name in names}
        cpu_ops.awaited.update(self._awaited)
        self._imported: set[str] = set()
        self._running = min(os.cpu_count() or 1, MOST)
        self._changing = threading.Lock()
        for _ in range(self._running):
            threading.Thread(target=self._run, daemon=True).start()

    def stop(self) -> None:
        """Compile no further modules; those in progress are finished."""
        self._left.clear()

    def _run(self) -> None:
        """Have one process compile the remaining modules, and wait for it."""
        try:
            with _start(self.dtype) as child:
                assert child.stdin
                assert child.stdout
                while self._left:
                    name = self._left.popleft()
                    try:
                        if name not in self._needed:
                            os.setpriority(os.PRIO_PROCESS, child.pid, LOWEST)
                        child.stdin.write(f"{name}\n".encode())
                        child.stdin.flush()
                        if not child.stdout.readline():
                            return  # compiling failed, or the process was killed
                        self._import(name)
                    finally:
                        self._awaited[name].set()
        except (OSError, IndexError):  # no memory for a process, it died, or another thread took the last module
            pass
        finally:
            self._end()

    def _import(self, name: str) -> None:
        """Import a compiled module from the cache before it is used."""
        if cpu_ops.imported(name) and self.dtype == torch.bfloat16:
            from kvchat.kv.ops.numba.loops import compile_for_bfloat16

            compile_for_bfloat16(name)
        self._imported.add(name)
        if cpu_ops.awaited.get(name) is self._awaited[name]:  # else it is now being compiled for another dtype
            del cpu_ops.awaited[name]

    def _end(self) -> None:
        with self._changing:
            self._running -= 1
            if self._running:
                return
        for event in self._awaited.values():
            event.set()
        if self._imported == self._awaited.keys():
            with suppress(OSError):  # the disk is full
                for stamp in self._stamps:
                    stamp.touch()
        self.ended.set()


_current: Compiling | None = None


def _can_be_written(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)


def _start(dtype: torch.dtype) -> subprocess.Popen[bytes]:
    command = process.python("-m", __name__, str(dtype).removeprefix("torch."))
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)


def _key(dtype: torch.dtype) -> str:
    """Return a digest of everything that numba's cache depends on."""
    sources = [Path(util.find_spec(name).origin) for name in MODULES]  # type: ignore[union-attr, arg-type]
    stamps = [(str(file), file.stat().st_mtime_ns) for file in sources]
    machine = platform.node(), platform.machine(), torch.backends.cpu.get_cpu_capability(), sys.version
    parts = str(dtype), stamps, machine, metadata.version("numba")
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _folders() -> list[Path]:
    """Return the folders that numba may cache in: the user's choice, or the first writable one of two."""
    if chosen := os.environ.get("NUMBA_CACHE_DIR"):
        return [Path(chosen)]
    return [paths.PACKAGE / "kv" / "ops" / "numba" / "__pycache__", user_cache_path("numba", appauthor=False)]


def main(dtype: str) -> None:
    """Compile the modules of loops that stdin names, one per line, and print each name when it is done.

    The process ends with its parent.
    """
    process.die_with_parent()
    process.postpone_full_collections()
    commands, done = process.claim_stdio()
    named: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        for line in commands:
            named.put(line.decode().strip())
        os._exit(0)  # even while compiling: the parent died, or nothing is left to compile

    threading.Thread(target=read, daemon=True).start()
    from kvchat.kv.ops.numba.loops import compile_for_bfloat16

    while True:
        import_module(name := named.get())
        if dtype == IN_BFLOAT16:
            compile_for_bfloat16(name)
        done.write(f"{name}\n".encode())
        done.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
