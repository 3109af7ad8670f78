"""Read from the headers of weight files how many elements there are, and of which type; no tensor is read.

safetensors files begin with a JSON object, GGUF files with a table of values and one of tensors.
"""

from __future__ import annotations

import json
import math
import stat
import struct
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from kvchat import gguf_tables
from kvchat.errors import ModelError

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
SAFETENSORS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I8": "int8", "U8": "uint8"}
# The numbers of ggml's types, in the order of its enumeration; None are those it has given up.
GGML = (
    "F32", "F16", "Q4_0", "Q4_1", None, None, "Q5_0", "Q5_1", "Q8_0", "Q8_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K",
    "Q8_K", "IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ1_S", "IQ4_NL", "IQ3_S", "IQ2_S", "IQ4_XS", "I8", "I16", "I32", "I64",
    "F64", "IQ1_M", "BF16",
)  # fmt: skip


@dataclass(frozen=True)
class Weights:
    """The weights of a model on disk: elements in all, bytes of the files, the type of most elements."""

    elements: int
    nbytes: int
    dtype: str


def read_safetensors(files: Iterable[Path]) -> Weights:
    """The weights in one or several safetensors files.

    Raises:
        ModelError: one of them is no such file.
    """
    elements: Counter[str] = Counter()
    nbytes = 0
    for path in files:
        nbytes += _regular(path)
        with path.open("rb") as file:
            for entry in _safetensors_header(file, path).values():
                elements[str(entry["dtype"])] += math.prod(entry["shape"])
    if not elements:
        raise ModelError("The weights are damaged.", "There are no tensors.", "Download the model again.")
    return _weights(nbytes, {SAFETENSORS.get(kind, kind): count for kind, count in elements.items()})


def read_gguf(path: Path) -> Weights:
    """The weights in a GGUF file.

    Raises:
        ModelError: it is no such file.
    """
    nbytes = _regular(path)
    elements: Counter[str] = Counter()
    try:
        for kind, shape in gguf_tables.tensors(path):
            elements[(GGML[kind] if kind < len(GGML) else None) or f"type {kind}"] += math.prod(shape)
        return _weights(nbytes, elements)
    except (OSError, ValueError) as error:
        raise _damaged(path) from error


def _regular(path: Path) -> int:
    """The size of a file that is one: a pipe would be waited for."""
    try:
        found = path.stat()
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{path.name} cannot be read.", f"{error}."[:200], "Check its permissions, or download the model again."
        ) from error
    if not stat.S_ISREG(found.st_mode):
        raise ModelError(f"{path.name} is no file.", "It is a pipe, a socket, a device or a folder.", "Give a file.")
    return found.st_size


def _safetensors_header(file: BinaryIO, path: Path) -> dict[str, dict[str, list[int]]]:
    try:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length) if length <= MAX_HEADER_BYTES else b"")
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        for entry in entries.values():
            math.prod(entry["shape"]), entry["dtype"]
    except (struct.error, ValueError, AttributeError, TypeError, KeyError, RecursionError) as error:
        raise _damaged(path) from error
    return entries


def _weights(nbytes: int, elements: dict[str, int]) -> Weights:
    return Weights(sum(elements.values()), nbytes, max(elements, key=lambda kind: elements[kind]))


def _damaged(path: Path) -> ModelError:
    return ModelError(f"{path.name} is damaged.", "Its header cannot be read.", "Download the model again.")
