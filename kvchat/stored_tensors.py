"""The tensors that safetensors files name in their headers, and of quantized checkpoints those that are packed.

Neither torch nor transformers is needed: what lists models and what plans one count by the same rules.
"""

from __future__ import annotations

import json
import math
import struct
from collections import defaultdict
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
PLAIN = ("F64", "F32", "F16", "BF16")
COMPRESSED, TORCHAO = "compressed-tensors", "torchao"
FP8_CAPABILITY = (8, 9)  # of a GPU: tensor cores with float8
MXFP4_CAPABILITY = (7, 5)  # of a GPU: that of its kernels
PACKED_BITS = 4  # of compressed-tensors' packed weights where the configuration names none


MAX_DIMENSIONS, MOST = 16, 2**50  # of a tensor, its elements and bytes


class StoredTensor(NamedTuple):
    """A tensor in a file: its name, safetensors' name of its dtype, its elements and bytes."""

    name: str
    dtype: str
    elements: int
    nbytes: int


class Packed(NamedTuple):
    """A packed weight: the bytes that it takes in the files with its constants, the elements once it is unpacked.

    The elements are counted for formats that transformers unpacks.
    """

    nbytes: int
    elements: int


def tensors(file: Path) -> list[StoredTensor]:
    """The tensors of a safetensors file, by its header.

    Raises:
        ValueError: the header is damaged; OSError: the file cannot be read.
    """
    with file.open("rb") as stream:
        try:
            (length,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(length) if length <= MAX_HEADER_BYTES else b"")
            return [_tensor(name, entry) for name, entry in header.items() if name != "__metadata__"]
        except (struct.error, AttributeError, TypeError, KeyError, OverflowError, RecursionError) as error:
            raise ValueError(f"the header of {file.name} cannot be read") from error


def is_unpacked(method: str, capability: tuple[int, int] | None) -> bool:
    """transformers unpacks a checkpoint's weights while it reads them: nothing multiplies them as they are stored.

    ``method`` is transformers' name of the quantization, ``capability`` the GPU's, None for a CPU.
    """
    if method == "fp8":
        return capability is None or capability < FP8_CAPABILITY
    if method == "mxfp4":
        return capability is None or capability < MXFP4_CAPABILITY or find_spec("kernels") is None
    return method == COMPRESSED


def method_of(config: Mapping[str, Any]) -> str:
    """transformers' name of the method by which a checkpoint with this ``quantization_config`` is quantized."""
    method = config.get("quant_method", "")
    return str(getattr(method, "value", method))


def kind_of(config: Mapping[str, Any]) -> str:
    """kvchat's choice, such as "int8", by which a checkpoint is quantized, or transformers' name of another method.

    ``config`` is the checkpoint's ``quantization_config``; "" where it has none.
    """
    method = method_of(config)
    if method == TORCHAO:
        kind = _torchao_kind(config).lower()
        return next((name for name in ("int8", "int4") if kind.startswith(f"{name}weightonly")), method)
    is_nf4 = config.get("load_in_4bit") and config.get("bnb_4bit_quant_type") == "nf4"
    return "nf4" if method == "bitsandbytes" and is_nf4 else method


def _torchao_kind(config: Mapping[str, Any]) -> str:
    try:
        chosen = config["quant_type"]["default"]
        return str(chosen["_type"] if isinstance(chosen, dict) else chosen)
    except (KeyError, TypeError):
        return ""


def packed(stored: Iterable[StoredTensor], config: Mapping[str, Any]) -> dict[str, Packed]:
    """The packed weights by the names of their modules; ``config`` is the checkpoint's ``quantization_config``."""
    bits = _bits(config)
    owned: defaultdict[str, list[StoredTensor]] = defaultdict(list)
    for tensor in stored:
        owned[owner(tensor.name)].append(tensor)
    return {
        name: Packed(sum(one.nbytes for one in parts), sum(_unpacked_elements(one, bits) for one in parts))
        for name, parts in owned.items()
        if any(one.dtype not in PLAIN for one in parts)
    }


def bits(weights: Iterable[Packed]) -> float:
    """Bits that a packed weight takes in the files, with its constants, in the mean; 0 where there are none."""
    weights = list(weights)
    return 8 * sum(one.nbytes for one in weights) / max(1, sum(one.elements for one in weights))


def owner(name: str) -> str:
    """The module of a tensor, or what stands for it: a bias, which is never packed, is alone, mxfp4 has no modules.

    bitsandbytes names constants ``MODULE.weight.CONSTANT``.
    """
    if name.endswith(".bias"):
        return name
    if name.endswith(("_blocks", "_scales")):
        return name.rpartition("_")[0]
    return name.partition(".weight.")[0] if ".weight." in name else name.rpartition(".")[0]


def _tensor(name: str, entry: dict[str, Any]) -> StoredTensor:
    begin, end = map(_number, entry["data_offsets"])
    shape = entry["shape"]
    if len(shape) > MAX_DIMENSIONS:
        raise ValueError(f"{name[:80]} has {len(shape):,} dimensions")
    return StoredTensor(name, str(entry["dtype"]), _number(math.prod(map(_number, shape))), end - begin)


def _number(value: Any) -> int:
    """A number of a header, which may be of any size in JSON."""
    number = int(value)
    if not 0 <= number < MOST:
        raise ValueError("a number is negative or too large")
    return number


def _unpacked_elements(tensor: StoredTensor, bits: int) -> int:
    """Weights that a tensor of a packed module holds, 0 for constants."""
    if tensor.name.endswith(".weight"):
        return tensor.elements
    if tensor.name.endswith(".weight_packed"):
        return 8 * tensor.nbytes // bits
    return 2 * tensor.nbytes if tensor.name.endswith("_blocks") else 0


def _bits(config: Mapping[str, Any]) -> int:
    """Bits of a packed weight; of several kinds the fewest, so that no size is understated."""
    try:
        found = [group["weights"]["num_bits"] for group in config["config_groups"].values()]
        return min((bits for bits in found if isinstance(bits, int) and bits > 0), default=PACKED_BITS)
    except (AttributeError, KeyError, TypeError):
        return PACKED_BITS
