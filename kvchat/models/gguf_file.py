"""Read a GGUF file's metadata, vocabulary and tensor table from a memory map.

The plan, the list of models, the tokenizer and the weights all use it.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from kvchat import files
from kvchat.errors import ModelError

MAGIC, SUFFIX = b"GGUF", ".gguf"
VERSIONS = (2, 3)  # version 1 had 32-bit lengths
LAYER = "blk."  # prefix of a layer's tensors; outside layers there are embeddings, head and last norm
EMBEDDINGS, HEAD = "token_embd.weight", "output.weight"
ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")  # tokens that end an answer
# ggml's types by number: name, and elements and bytes per block.
TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 40), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18),
}  # fmt: skip
UNKNOWN_BITS = 32
# Types of weights that the gguf package unpacks; most of the others are for intermediate results or indices.
UNPACKED = {name for name, *_ in TYPES.values()} - {"Q8_1", "Q8_K", "I8", "I16", "I32", "I64", "F64", "Q1_0"}
# struct's letters for values of fixed size, by type; 8 is a string, 9 a list.
FORMS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
TEXT, LIST = 8, 9
ALIGNMENT, ALIGNED = "general.alignment", 32  # key of the first tensor's alignment, and the default
SPLIT = re.compile(r"-(\d{5})-of-(\d{5})(?=\.gguf$|$)", re.IGNORECASE)
NO_MODEL = {
    "adapter": "It is an adapter (LoRA) for another model.",
    "mmproj": "It is the image or audio part (projector) of a multimodal model.",
    "imatrix": "It is an importance matrix, used to quantize a model.",
    "embedder": "It is an embedding or ranking model; it generates no text.",
    "vocabulary": "It has a vocabulary but no weights.",
    "control vector": "It is a control vector for another model.",
}
ARCHITECTURES_OF = {"clip": "mmproj", "controlvector": "control vector"}
EMBEDDERS = re.compile(r".*bert.*|t5encoder|gemma-embedding|llama-embed|.*-embed(ding)?s?")


class Tensor(NamedTuple):
    """A tensor in the file ``path``: ``nbytes`` (0 if the type is unknown) from byte ``start`` on.

    ``kind`` is the number of its type in ggml; ``shape`` is in torch's order.
    """

    name: str
    kind: int
    shape: tuple[int, ...]
    path: Path
    start: int
    nbytes: int


@dataclass(frozen=True)
class GgufFile:
    """The contents of the file ``path``: metadata by key, and its tensors with those of its other parts.

    Lists of strings are tuples of bytes; other lists are tuples of numbers. ``paths`` are all parts of a split model.
    """

    path: Path
    values: dict[str, Any]
    tensors: tuple[Tensor, ...]
    paths: tuple[Path, ...]

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the architecture; "" if the file does not say."""
        return self.text("general.architecture")

    def of_architecture(self, key: str, default: Any = None) -> Any:
        return self.values.get(f"{self.architecture}.{key}", default)

    def text(self, key: str) -> str:
        value = self.values.get(key)
        return value if isinstance(value, str) else ""

    def number(self, key: str) -> int | None:
        """Return a nonnegative integer, such as a token's id; None if there is none."""
        value = self.values.get(key)
        return value if type(value) is int and value >= 0 else None

    @property
    def layer_bits(self) -> float:
        """Average bits per element of the layers' matrices; 0 if there are none."""
        matrices = [one for one in self.tensors if len(one.shape) > 1 and one.name.startswith(LAYER)]
        elements = [math.prod(one.shape) for one in matrices]
        stored = sum(number * type_of(one.kind)[1] for number, one in zip(elements, matrices, strict=True))
        return stored / max(1, sum(elements))

    @property
    def no_model(self) -> str:
        """A sentence saying what the file is if it is not a language model; else ""."""
        return NO_MODEL.get(self._kind, "")

    @property
    def _kind(self) -> str:
        architecture, named = self.architecture, self.text("general.type")
        if "adapter.type" in self.values or named == "adapter":
            return "adapter"
        if architecture in ARCHITECTURES_OF:
            return ARCHITECTURES_OF[architecture]
        if named in ("mmproj", "imatrix") or "imatrix.datasets" in self.values:
            return "mmproj" if named == "mmproj" else "imatrix"
        reads_only = self.of_architecture("pooling_type", 0) or self.of_architecture("attention.causal", True) is False
        if reads_only or EMBEDDERS.fullmatch(architecture):
            return "embedder"
        return "" if self.tensors else "vocabulary"


def is_gguf(path: Path) -> bool:
    """Return True if ``path`` begins like a GGUF file, regardless of its name."""
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except (OSError, ValueError):
        return False


def type_of(kind: int) -> tuple[str, float]:
    """Return a tensor type's name and bits per element; ``UNKNOWN_BITS`` for an unknown type."""
    name, elements, nbytes = TYPES.get(kind, (f"type {kind}", 8, UNKNOWN_BITS))
    return name, 8 * nbytes / elements


def read(path: Path) -> GgufFile:
    """Read the header of a GGUF file, and those of the other parts of a split model; the last result is cached.

    Raises:
        ValueError: it is not a GGUF file, incomplete, or a length leads past its end; the message says what.
        OSError: it cannot be read.
    """
    found = path.stat()
    return _read(path, found.st_size, found.st_mtime_ns)


def read_model(path: Path) -> GgufFile:
    """Read the header of a language model.

    Raises:
        ModelError: it is damaged or incomplete, not a language model, or has weights that cannot be unpacked.
    """
    try:
        found = read(path)
    except OSError as error:
        raise files.unreadable(str(path), error, ModelError) from error
    except ValueError as error:
        raise ModelError(
            f"{path} is damaged or incomplete.",
            f"The GGUF file cannot be read: {error}."[:400],
            "Download the model again.",
        ) from error
    if found.no_model:
        raise ModelError(f"{path} is not a chat model.", found.no_model, "Choose a chat model.")
    if packed := {type_of(one.kind)[0] for one in found.tensors} - UNPACKED:
        why = f"It has weights in {', '.join(sorted(packed))}, which kvchat cannot unpack."
        raise ModelError(f"{path} cannot be loaded.", why, "Choose another quantization of the model.")
    return found


def models_in(folder: Path) -> list[Path]:
    """Return a folder's GGUF files, split models by their first part; if there are several, only language models."""
    found = sorted(one for one in folder.iterdir() if one.suffix.lower() == SUFFIX and part(one) < 2)
    return [one for one in found if _is_language_model(one)] if len(found) > 1 else found


def _is_language_model(file: Path) -> bool:
    try:
        return not read(file).no_model
    except (OSError, ValueError):
        return True  # the error is raised when the file is loaded


def part(path: Path) -> int:
    """Return the part number, from 1, of a split model's file according to its name; 0 for a whole model."""
    found = SPLIT.search(path.name)
    return int(found[1]) if found and int(found[2]) > 1 else 0


@lru_cache(maxsize=1)
def _read(path: Path, size: int, written: int) -> GgufFile:
    first = _read_part(path)
    if (parts := first.number("split.count") or 1) > 1:
        paths = _parts(path, parts)
        read_parts = [first if one == path else _read_part(one) for one in paths]
        first = GgufFile(path, read_parts[0].values, tuple(each for one in read_parts for each in one.tensors), paths)
        expected = first.number("split.tensors.count")
        if expected not in (None, len(first.tensors)):
            raise ValueError(f"its {parts} parts have {len(first.tensors):,} of {expected:,} tensors")
    for one in first.paths:
        end = max((tensor.start + tensor.nbytes for tensor in first.tensors if tensor.path == one), default=0)
        if (absent := end - one.stat().st_size) > 0:
            raise ValueError(f"bytes missing at its end: {absent:,}")
    return first


def _parts(path: Path, parts: int) -> tuple[Path, ...]:
    found = SPLIT.search(path.name)
    if not found or int(found[2]) != parts:
        raise ValueError(f"it is one of {parts:,} parts, but its name does not say which")
    before, after = path.name[: found.start()], path.name[found.end() :]
    names = [f"{before}-{one:05}-of-{parts:05}{after}" for one in range(1, parts + 1)]
    missing = [name for name in names if not (path.parent / name).is_file()]
    if missing:
        raise ValueError(f"it lacks {len(missing)} of its {parts} parts, such as {missing[0]}")
    return tuple(path.parent / name for name in names)


def _read_part(path: Path) -> GgufFile:
    with path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise ValueError("it does not begin with GGUF")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            try:
                return _Walk(path, mapped).file()
            except (struct.error, IndexError) as error:
                raise ValueError("it ends in the middle of a table") from error


class _Walk:
    """Reads the header of a ``mapped`` file, one value after another."""

    def __init__(self, path: Path, mapped: mmap.mmap) -> None:
        self._path, self._mapped, self._size = path, mapped, len(mapped)
        self._at = len(MAGIC)

    def file(self) -> GgufFile:
        (version,) = self._numbers("I")
        if version not in VERSIONS:
            reversed_ = int.from_bytes(version.to_bytes(4, "little"), "big")
            of = "in the other byte order" if reversed_ in VERSIONS else f"of version {version:,}"
            raise ValueError(f"it is {of}, which kvchat cannot read")
        tensors, count = self._numbers("QQ")
        values = dict(self._value() for _ in range(count))
        entries = [self._tensor() for _ in range(tensors)]
        aligned = values.get(ALIGNMENT)
        aligned = aligned if type(aligned) is int and aligned > 0 else ALIGNED
        begin = -(-self._at // aligned) * aligned
        found = tuple(one._replace(start=begin + one.start) for one in entries)
        return GgufFile(self._path, values, found, (self._path,))

    def _tensor(self) -> Tensor:
        """Read a tensor, whose ``start`` is relative to the first tensor."""
        name = self._text().decode(errors="replace")
        (dimensions,) = self._numbers("I")
        *shape, kind, offset = self._numbers(f"{dimensions}QIQ")
        nbytes = 0
        if kind in TYPES:
            _, elements, block = TYPES[kind]
            nbytes = math.prod(shape) // elements * block
        return Tensor(name, kind, tuple(reversed(shape)), self._path, offset, nbytes)

    def _value(self) -> tuple[str, Any]:
        key = self._text().decode(errors="replace")
        (kind,) = self._numbers("I")
        if kind == LIST:
            kind, length = self._numbers("IQ")
            if kind == TEXT:
                return key, self._texts(length)
            return key, self._numbers(f"{length}{self._form(kind)}")
        if kind == TEXT:
            return key, self._text().decode(errors="replace")
        return key, self._numbers(self._form(kind))[0]

    def _form(self, kind: int) -> str:
        if kind not in FORMS:  # also for a list of lists, which the format allows but nobody writes
            raise ValueError(f"a value has the type {kind:,}")
        return FORMS[kind]

    def _texts(self, count: int) -> tuple[bytes, ...]:
        """Read the next ``count`` strings; a vocabulary has up to a million, so each takes few steps."""
        mapped, at, size, length_at, found = self._mapped, self._at, self._size, struct.Struct("<Q").unpack_from, []
        for _ in range(count):
            begin = at + 8
            at = begin + length_at(mapped, at)[0]
            if at > size:
                raise ValueError("a string runs past its end")
            found.append(mapped[begin:at])
        self._at = at
        return tuple(found)

    def _text(self) -> bytes:
        return self._texts(1)[0]

    def _numbers(self, form: str) -> tuple[Any, ...]:
        found = struct.unpack_from(f"<{form}", self._mapped, self._at)
        self._at += struct.calcsize(f"<{form}")
        return found
