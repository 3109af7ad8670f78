"""Read from the headers of weight files how many elements there are, and of which type; no tensor is read.

safetensors files begin with a JSON object, GGUF files with a table of values and one of tensors.
"""

from __future__ import annotations

import math
import stat
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvchat import gguf_file, stored_tensors
from kvchat.catalog.tensor_kinds import EXPERTS, Elements, count, is_loaded
from kvchat.errors import ModelError

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
PACKED = "packed"
GGUF_MLP = "blk.0.ffn_up.weight"
SAFETENSORS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I8": "int8", "U8": "uint8"}


@dataclass(frozen=True)
class Weights:
    """The weights of a model on disk: elements that are loaded, bytes of the files, the type of most elements.

    Of a checkpoint that is quantized already ``elements`` are those of its weights once they are unpacked, of which
    ``packed_elements`` take ``packed_bytes`` in the files, with their constants; ``packed_experts`` of them are a
    mixture's. ``plain`` tells the others apart; ``mlp`` are the elements of the MLP's first matrix, 0 where that is not
    known. ``layer_bits`` are those that an element of the layers' matrices takes in a GGUF file, in other files an
    element of the packed weights.
    """

    elements: int
    nbytes: int
    dtype: str
    packed_elements: int = 0
    packed_bytes: int = 0
    packed_experts: int = 0
    plain: Elements = field(default_factory=Elements)
    mlp: int = 0
    layer_bits: float = 0.0


def read_safetensors(
    files: Iterable[Path], quantization: Mapping[str, Any] | None = None, is_multimodal: bool = False
) -> Weights:
    """The weights in one or several safetensors files; ``quantization`` is the configuration's section of that name.

    Of a multimodal model these are its text's.

    Raises:
        ModelError: one of them is no such file.
    """
    elements: Counter[str] = Counter()
    nbytes = 0
    tensors = []
    for path in files:
        nbytes += _regular(path)
        try:
            tensors += stored_tensors.tensors(path)
        except (OSError, ValueError) as error:
            raise _damaged(path) from error
    if not tensors:
        raise ModelError("The weights are damaged.", "There are no tensors.", "Download the model again.")
    tensors = [tensor for tensor in tensors if is_loaded(tensor.name, is_multimodal)]
    packed = stored_tensors.packed(tensors, quantization) if quantization else {}
    plain = [tensor for tensor in tensors if stored_tensors.owner(tensor.name) not in packed]
    for tensor in plain:
        elements[SAFETENSORS.get(tensor.dtype, tensor.dtype)] += tensor.elements
    elements[PACKED] = sum(one.elements for one in packed.values())
    return replace(
        _weights(nbytes, elements),
        packed_elements=elements[PACKED],
        packed_bytes=sum(one.nbytes for one in packed.values()),
        packed_experts=sum(one.elements for name, one in packed.items() if EXPERTS.search(name)),
        plain=count(((tensor.name, tensor.elements) for tensor in plain), packed),
        layer_bits=stored_tensors.bits(packed.values()),
    )


def read_gguf(path: Path) -> Weights:
    """The weights in a GGUF file.

    Raises:
        ModelError: it is no such file, or no language model.
    """
    _regular(path)
    elements: Counter[str] = Counter()
    sizes: dict[str, int] = {}
    try:
        found = gguf_file.read(path)
        if found.no_model:
            raise ModelError(f"{path.name} is not a chat model.", found.no_model, "Choose a chat model.")
        nbytes = sum(one.stat().st_size for one in found.paths)
        for one in found.tensors:
            sizes[one.name] = math.prod(one.shape)
            elements[gguf_file.type_of(one.kind)[0]] += sizes[one.name]
        return replace(
            _weights(nbytes, elements),
            plain=count(sizes.items()),
            mlp=sizes.get(GGUF_MLP, 0),
            layer_bits=found.layer_bits,
        )
    except (OSError, ValueError) as error:
        said = f"{error}."[:200]
        raise _damaged(path, said[0].upper() + said[1:]) from error


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


def _weights(nbytes: int, elements: dict[str, int]) -> Weights:
    return Weights(sum(elements.values()), nbytes, max(elements, key=lambda kind: elements[kind]))


def _damaged(path: Path, why: str = "Its header cannot be read.") -> ModelError:
    return ModelError(f"{path.name} is damaged.", why, "Download the model again.")
