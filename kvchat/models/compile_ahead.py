"""Compiles the loops once on a machine, in processes of their own, while models are loaded and answer without them.

numba compiles one loop after the other on one core, all of them in half a minute to two. Here several processes of the
lowest priority do it at once; from then on its cache holds them, beside their files or in the user's cache folder. A
module of loops is imported as soon as it is there, so that the next step takes its loops in place of torch. Only those
of packed weights, which nothing replaces, are waited for.
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

OF_PACKED = PRODUCTS, BLOCKS_OF_WEIGHTS  # without which packed weights are not read
# In the order in which they are compiled: those that every answer asks for, and those that take longest.
MODULES = (cpu_ops.PAGES, cpu_ops.TOKENS, cpu_ops.IN_A_ROW, cpu_ops.ROWS, cpu_ops.FREEZE, cpu_ops.EIGHT_BIT, *OF_PACKED)
MOST = 4  # processes: each imports torch, and takes some 300 MB
LOOK_S = 0.2
LOWEST = 19  # priority
IN_BFLOAT16 = "bfloat16"
NOTE = "Answers get faster in about a minute: code is compiled once per machine."


def begin(dtype: torch.dtype, first: Collection[str] = ()) -> None:
    """Begin to compile all loops for K/V of ``dtype``, the modules ``first`` before others, unless that was done.

    Where it fails torch goes on in their place; where what is compiled cannot be kept, a loop is compiled when it is
    asked for.
    """
    global _current
    if _current and _current.dtype == dtype and not _current.ended.is_set():
        return
    folders = _folders()
    stamp = f"kvchat-{_key(dtype)}" if dtype in cpu_ops.KNOWN else ""
    if not stamp or any((folder / stamp).exists() for folder in folders):
        return
    kept_in = next(filter(_can_be_written, folders), None)
    # Imported by this thread, whose number of threads numba would change.
    if kept_in is None or cpu_ops.imported(cpu_ops.BASE) is None:
        return
    if _current:
        _current.stop()
    _current = Compiling(dtype, sorted(MODULES, key=lambda name: name not in first), first, kept_in / stamp)


def wait(progress: Progress, names: Collection[str]) -> None:
    """Wait until the modules ``names`` are compiled, if they are being; ``progress`` is told the seconds it takes."""
    _wait(progress, filter(None, map(cpu_ops.awaited.get, names)))


def finish(progress: Progress) -> None:
    """``wait`` for all that is being compiled, and for packed weights that are being written."""
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
    """Processes that compile the modules ``names`` for K/V of ``dtype``, those ``needed`` at full priority.

    ``ended`` tells that none runs any more; ``stamp`` is written if all were compiled.
    """

    def __init__(self, dtype: torch.dtype, names: Collection[str], needed: Collection[str], stamp: Path) -> None:
        self.dtype, self.ended = dtype, threading.Event()
        self._left, self._needed, self._stamp = deque(names), needed, stamp
        self._awaited = {name: threading.Event() for name in names}
        cpu_ops.awaited.update(self._awaited)
        self._taken: set[str] = set()
        self._running = min(os.cpu_count() or 1, MOST)
        self._changing = threading.Lock()
        for _ in range(self._running):
            threading.Thread(target=self._run, daemon=True).start()

    def stop(self) -> None:
        """Begin no further module; those in hand are finished."""
        self._left.clear()

    def _run(self) -> None:
        """Let one process compile what is left; it ends with this thread, which waits for it."""
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
                            return  # it failed, or somebody ended it
                        self._take(name)
                    finally:
                        self._awaited[name].set()
        except (OSError, IndexError):  # no memory for a process, or it is gone; another one took the last module
            pass
        finally:
            self._end()

    def _take(self, name: str) -> None:
        """Import a module, from the cache, before it is used."""
        if cpu_ops.imported(name) and self.dtype == torch.bfloat16:
            from kvchat.kv.ops.numba.loops import compile_for_bfloat16

            compile_for_bfloat16(name)
        self._taken.add(name)
        if cpu_ops.awaited.get(name) is self._awaited[name]:  # nothing else is compiled since for another dtype
            del cpu_ops.awaited[name]

    def _end(self) -> None:
        with self._changing:
            self._running -= 1
            if self._running:
                return
        for event in self._awaited.values():
            event.set()
        if self._taken == self._awaited.keys():
            with suppress(OSError):  # a full disk
                self._stamp.touch()
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
    """A digest of all that numba's cache depends on."""
    sources = [Path(util.find_spec(name).origin) for name in MODULES]  # type: ignore[union-attr, arg-type]
    stamps = [(str(file), file.stat().st_mtime_ns) for file in sources]
    machine = platform.node(), platform.machine(), torch.backends.cpu.get_cpu_capability(), sys.version
    told = str(dtype), stamps, machine, metadata.version("numba")
    return hashlib.sha256(repr(told).encode()).hexdigest()[:16]


def _folders() -> list[Path]:
    """Where numba keeps what it compiles: where it is told, or the first of these that may be written."""
    if chosen := os.environ.get("NUMBA_CACHE_DIR"):
        return [Path(chosen)]
    return [paths.PACKAGE / "kv" / "ops" / "numba" / "__pycache__", user_cache_path("numba", appauthor=False)]


def main(dtype: str) -> None:
    """Compile the modules of loops that stdin names, one a line, and name each on stdout when it is done.

    The process ends with the one that asked.
    """
    process.die_with_parent()
    commands, done = process.claim_stdio()
    named: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        for line in commands:
            named.put(line.decode().strip())
        os._exit(0)  # whatever is in hand: the other process is gone, or nothing is left

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
