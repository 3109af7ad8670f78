"""List the tensors in a model's safetensors files and tell from its configuration how they are packed.

Only the JSON object at the beginning of each file is read, without torch or transformers.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from kvchat import files
from kvchat.errors import ModelError
from kvchat.models import gguf_file
from kvchat.paths import INDEX

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
COMPRESSED, TORCHAO, GGUF = "compressed-tensors", "torchao", "gguf"
FP8_CAPABILITY = (8, 9)  # GPUs whose tensor cores have float8
MXFP4_CAPABILITY = (7, 5)  # GPUs that its kernels support
WHOLE = "model.safetensors"  # the weights of a model with a single weight file
# Objects in the index of several weight files, and what to do if one is missing.
INDEXED = {
    "weight_map": "Download the model again.",
    "metadata": 'Download the model again, or add "metadata": {} to the file.',
}


class StoredTensor(NamedTuple):
    """A tensor in a file: its name, safetensors' name of its dtype, its shape and bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


def read_headers(folder: Path, where: str) -> list[StoredTensor]:
    """Return the tensors of the model in ``folder``, which messages call ``where``.

    Raises:
        ModelError: a file is missing, damaged or incomplete.
    """
    return [tensor for file in weight_files(folder, where) for tensor in tensors(file)]


def weight_files(folder: Path, where: str) -> tuple[Path, ...]:
    """Return the safetensors files of the model in ``folder``, as transformers chooses them.

    They are the single file, if there is one, even beside the index of an earlier save in several files; else all that
    the index names.

    Raises:
        ModelError: some are missing, or outside the folder.
    """
    index = folder / INDEX
    if (folder / WHOLE).is_file():
        return (folder / WHOLE,)
    if not index.is_file():
        is_split = any(folder.glob("model-*.safetensors"))
        of_index = "Copy it from the model's repository: it lists which file has which tensor."
        hint = of_index if is_split else format_hint(folder)
        raise ModelError(f"{where} has no weights.", f"There is no {INDEX if is_split else WHOLE}.", hint)
    shards = sorted({str(shard) for shard in _weight_map(index).values()})
    if outside := [shard for shard in shards if Path(shard).name != shard]:
        raise ModelError(
            f"{where} refers to weights outside its folder.",
            f"{outside[0]!r}."[:200],
            "Choose another model: this one reads files that are not its own.",
        )
    missing = [shard for shard in shards if not (folder / shard).is_file()]
    if missing:
        raise ModelError(
            f"{where} is incomplete.",
            f"It lacks {len(missing)} of its {len(shards)} weight files, such as {missing[0]}.",
            "Download the model again.",
        )
    return tuple(folder / shard for shard in shards)


def _weight_map(index: Path) -> dict[str, Any]:
    """Return the file of each tensor of a sharded model, by tensor name."""
    content = read_json(index)
    for key, hint in INDEXED.items():
        if not isinstance(content.get(key), dict):
            raise ModelError(f"{INDEX} is damaged.", f'{index} has no object "{key}", which transformers reads.', hint)
    weight_map: dict[str, Any] = content["weight_map"]
    return weight_map


def read_json(file: Path) -> dict[str, Any]:
    """Read the object in a JSON file.

    Raises:
        ModelError: it cannot be read or is not a JSON object.
    """
    try:
        content = json.loads(files.read(file))
    except OSError as error:
        raise files.unreadable(str(file), error, ModelError) from error
    except ValueError as error:
        raise ModelError(f"{file.name} cannot be read.", f"{file}: {error}.", "Download the model again.") from error
    if not isinstance(content, dict):
        raise ModelError(
            f"{file.name} cannot be read.", f"{file} does not contain a JSON object.", "Download the model again."
        )
    return content


def is_packed_by_mlx(config: Mapping[str, Any]) -> bool:
    """Return True if the weights are quantized by a method that the ``config`` does not name, as MLX's are."""
    section = config.get("quantization_config") or config.get("quantization")
    if not section or not isinstance(section, dict):
        return False
    return not (section.get("quant_method") or has_bitsandbytes_flag(section))


def format_hint(folder: Path) -> str:
    """Return a hint about a folder without safetensors."""
    if gguf_file.models_in(folder):
        return "It has several GGUF files: name one of them."
    if (folder / "adapter_config.json").is_file():
        return f"{gguf_file.NO_MODEL['adapter']} Merge it into that model, and load the merged one."
    return "kvchat reads safetensors and GGUF, not .bin files." if any(folder.glob("*.bin")) else ""


def tensors(file: Path) -> list[StoredTensor]:
    """Return the tensors of a safetensors file.

    Raises:
        ModelError: it cannot be read, is damaged, or ends before its last tensor.
    """
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > MAX_HEADER_BYTES:  # as in a Git LFS pointer, which begins with text
                raise ValueError("it is not a safetensors file")
            header = json.loads(stream.read(length))
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        end = 8 + length + max(entry["data_offsets"][1] for entry in entries.values())
        if (absent := end - file.stat().st_size) > 0:
            raise ValueError(f"bytes missing at its end: {absent:,}")
        return [_tensor(name, **entry) for name, entry in entries.items()]
    except OSError as error:
        raise files.unreadable(str(file), error, ModelError) from error
    except (ValueError, struct.error, LookupError, TypeError, AttributeError) as error:
        raise ModelError(f"{file.name} is damaged.", f"{file}: {error}."[:400], "Download the model again.") from error


def _tensor(name: str, dtype: str, shape: list[int], data_offsets: list[int]) -> StoredTensor:
    begin, end = data_offsets
    return StoredTensor(name, dtype, tuple(shape), end - begin)


def is_unpacked(method: str, capability: tuple[int, int] | None) -> bool:
    """Return True if transformers unpacks a checkpoint's weights while reading, because nothing multiplies them packed.

    ``method`` is transformers' name of the quantization, ``capability`` the GPU's, None for a CPU.
    """
    if method == "fp8":
        return capability is None or capability < FP8_CAPABILITY
    if method == "mxfp4":
        return capability is None or capability < MXFP4_CAPABILITY or find_spec("kernels") is None
    return method in (COMPRESSED, GGUF)


def method_of(config: Mapping[str, Any]) -> str:
    """Return transformers' name of the quantization method in a checkpoint's ``quantization_config``."""
    method = config.get("quant_method", "")
    return str(getattr(method, "value", method))


def has_bitsandbytes_flag(config: Mapping[str, Any]) -> bool:
    """Return True if a ``quantization_config`` has a flag of bitsandbytes, whose early checkpoints name no method."""
    return bool(config.get("load_in_4bit") or config.get("load_in_8bit"))


def kind_of(config: Mapping[str, Any]) -> str:
    """Return the quantization in a ``quantization_config``: kvchat's name, such as "int8", else transformers'.

    Returns "" if the checkpoint is not quantized.
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


def owner(name: str) -> str:
    """Return the name of the module that a tensor belongs to; a bias, which is never packed, is its own.

    bitsandbytes names constants ``MODULE.weight.CONSTANT``; tensors in mxfp4 are ``NAME_blocks`` and ``NAME_scales``.
    """
    if name.endswith(".bias"):
        return name
    if name.endswith(("_blocks", "_scales")):
        return name.rpartition("_")[0]
    return name.partition(".weight.")[0] if ".weight." in name else name.rpartition(".")[0]
