"""Cache the packed weights of GGUF files, so that the next load maps them instead of packing again.

A cache file is in safetensors' format. Its name is a digest of everything its content depends on: the GGUF file, the
quantization, kvchat's code and the processor. A GGUF file is identified by path, inode, size and two times. A digest of
5 GB would take seconds, and whoever resets the time of a changed file still changes ``st_ctime``, which cannot be set.
The header has the sum of each tensor's bits; loading verifies them as fast as memory is read.

A low-priority thread writes the file once the model is ready, under a temporary name until it is complete. All cache
files together may take a tenth of the disk's free space; the least recently used are deleted first.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import struct
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from kvchat import files, paths
from kvchat.kv.ops import cpu_ops
from kvchat.models.quantize import int4_rows, int8_rows, packing
from kvchat.models.quantize.rows import PIECE, all_rows, attach

SUFFIX, UNFINISHED = ".safetensors", ".unfinished"
SHARE = 10  # the cache may take 1 / SHARE of the disk's free space
OLD_S = 3600.0  # an older unfinished file was abandoned
CHUNK = 2**24  # bytes per write
LOOK_S = 0.2
LOWEST = 19  # priority
DATA = "data"
WORD = 8
KINDS: dict[str, Any] = {int4_rows.METHOD: int4_rows.Int4Rows, int8_rows.METHOD: int8_rows.Int8Rows}
DTYPES = {torch.uint8: "U8", torch.int8: "I8", torch.float16: "F16", torch.float32: "F32", torch.bfloat16: "BF16"}
Kept = dict[str, dict[str, Tensor]]  # by weight name: the data, and the constants under the name of the packing


def place(weights: Iterable[Path], quantize: str, *how: object) -> Path:
    """Return the cache file for ``weights`` files packed by ``quantize``; ``how`` is what else the result depends on.

    Versions for the same files and quantization have names with the same prefix.
    """
    stats = [(os.path.realpath(file), os.stat(file)) for file in weights]
    versions = [(path, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for path, stat in stats]
    # torch's layout depends on the capability. Without compiled loops, groups of 32 have no scale of their own.
    layout = torch.backends.cpu.get_cpu_capability(), cpu_ops.imported(cpu_ops.BASE) is not None
    digests = (
        blake2b(repr(parts).encode(), digest_size=12).hexdigest()
        for parts in ((quantize, [path for path, _ in stats]), (versions, how, layout))
    )
    return paths.packed_dir() / f"{'-'.join(digests)}{SUFFIX}"


def read(file: Path) -> Kept:
    """Map the weights in ``file``; return none if it does not exist or is damaged. A damaged file is deleted."""
    try:
        with safe_open(file, "pt") as opened:
            found = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - not a mapping
            sums = json.loads(opened.metadata()["sums"])
        if sums != {name: sum_of_bits(tensor) for name, tensor in found.items()}:
            raise ValueError("its bits are not those that were written")
        os.utime(file)
    except FileNotFoundError:
        return {}
    except (OSError, SafetensorError, ValueError, LookupError, TypeError):
        with suppress(OSError):
            file.unlink()
        return {}
    kept: Kept = defaultdict(dict)
    for name, tensor in found.items():
        weight, _, part = name.rpartition("/")
        kept[weight][part] = tensor
    return dict(kept)


def install(model: Any, kept: Kept) -> None:
    for name, parts in kept.items():
        path, _, own = name.rpartition(".")
        module, data = model.get_submodule(path), parts.pop(DATA)
        if data.nbytes > PIECE or data.data_ptr() % int8_rows.ALIGNED:
            data = data.clone()  # ``defragment`` moves the others into huge pages and aligns them
        ((method, constants),) = parts.items()
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(data, requires_grad=False)
            attach(module, KINDS[method](module.weight, constants.clone(), module.bias))
        else:
            packing.attach_stack(module, own, KINDS[method](data, constants.clone()))


class Keeping:
    """A thread that writes the packed weights of ``model`` to ``file``; ``ended`` is set when it ends."""

    def __init__(self, model: Any, file: Path) -> None:
        self.ended = threading.Event()
        self._stopped = False
        self._file, self._weights = file, dict(_tensors(model))
        threading.Thread(target=self._run, daemon=True).start()

    def stop(self) -> None:
        """Stop writing and release the weights; the next load of the GGUF file packs them again."""
        self._stopped = True
        self.ended.wait()

    def _run(self) -> None:
        try:
            if sys.platform == "linux":
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST)
            with suppress(OSError):  # the disk is full
                self._write()
        finally:
            self._weights = {}
            self.ended.set()

    def _write(self) -> None:
        files.make_folder(self._file.parent)
        if not _make_room(self._file, sum(tensor.nbytes for tensor in self._weights.values())):
            return
        unfinished = self._file.with_name(f"{self._file.name}.{os.getpid()}{UNFINISHED}")
        try:
            with open(unfinished, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
                file.write(_header(self._weights))
                for tensor in self._weights.values():
                    for part in torch.split(_bytes(tensor), CHUNK):
                        if self._stopped:
                            return
                        file.write(part.numpy().data)
            os.replace(unfinished, self._file)  # after a machine crash, the sums reveal missing data
        finally:
            unfinished.unlink(missing_ok=True)


def begin(model: Any, file: Path) -> None:
    """Start writing the packed weights of ``model`` to ``file``."""
    global _current
    _current = Keeping(model, file)


def stop() -> None:
    if _current:
        _current.stop()


def finish(progress: Callable[[str], None]) -> None:
    """Wait until the weights are written, and report that to ``progress``."""
    while _current and not _current.ended.wait(LOOK_S):
        progress("Saving the packed weights for the next start")


_current: Keeping | None = None
atexit.register(stop)  # Python ends threads inside torch by aborting the process


def kept_files() -> list[Path]:
    """Return all cache files, the least recently used first."""
    return sorted(paths.packed_dir().glob(f"*{SUFFIX}"), key=lambda file: file.stat().st_mtime)


def _make_room(new: Path, nbytes: int) -> bool:
    """Delete files that ``new`` replaces or that leave no room for it; return False if it is too large by itself."""
    for left in new.parent.glob(f"*{UNFINISHED}"):  # left by killed processes
        if time.time() - left.stat().st_mtime > OLD_S:
            left.unlink(missing_ok=True)
    of_weights = new.name.partition("-")[0]
    sizes = {file: file.stat().st_size for file in kept_files()}
    limit = (shutil.disk_usage(new.parent).free + sum(sizes.values())) // SHARE
    for file in sorted(sizes, key=lambda file: not file.name.startswith(of_weights)):
        if file.name.startswith(of_weights) or sum(sizes.values()) + nbytes > limit:
            file.unlink(missing_ok=True)
            del sizes[file]
    return nbytes <= limit


def _tensors(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of the packed rows of ``model``, named by weight and part; the matrices first."""
    modules = dict(model.named_modules())
    named = [(f"{name}.weight" if name in modules else name, rows) for name, rows in all_rows(model)]
    method = {kind: name for name, kind in KINDS.items()}
    yield from ((f"{name}/{DATA}", rows.data.detach()) for name, rows in named)
    yield from ((f"{name}/{method[type(rows)]}", rows.scales) for name, rows in named)


def _header(weights: dict[str, Tensor]) -> bytes:
    """Return the header of a file with these ``weights``, padded so that the first is aligned if the file is mapped."""
    sums = {name: sum_of_bits(tensor) for name, tensor in weights.items()}
    header: dict[str, Any] = {"__metadata__": {"sums": json.dumps(sums)}}
    end = 0
    for name, tensor in weights.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": [*tensor.shape], "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % int8_rows.ALIGNED)
    return struct.pack("<Q", len(text)) + text


def sum_of_bits(tensor: Tensor) -> int:
    """Return the sum of the 64-bit words of a tensor's memory, plus that of the remaining bytes."""
    stored = _bytes(tensor)
    whole = stored.numel() // WORD * WORD
    words, rest = stored[:whole].view(torch.int64), stored[whole:]
    return int(words.sum()) + int(rest.sum())


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
