"""The weights in a GGUF file by transformers' names, each unpacked from a memory map when it is asked for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvchat import gguf_file
from kvchat.engine.model.gguf_config import fed
from kvchat.engine.model.packed_rows import block_loops
from kvchat.gguf_file import GgufFile

CHUNK = 2**15  # elements that numpy unpacks at once: they stay in a processor's cache
LOOPED = {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"}  # types that compiled loops unpack
Array = np.ndarray[Any, Any]
PLAIN = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}
# Of the scaling of positions, which the configuration has.
IGNORED = ("rope_freqs.", "rope_factors_")


@dataclass(frozen=True, eq=False)
class Unpacked:
    """A weight that takes ``nbytes`` in its file, and is made when transformers takes all of it."""

    nbytes: int
    make: Callable[[], Tensor]

    def __getitem__(self, _: object) -> Tensor:
        return self.make()


def weights(file: GgufFile, model: Any) -> dict[str, Unpacked]:
    """The weights for ``model``, which needs no memory, by its names of them.

    Tensors that have no place in it keep their own names.
    """
    try:
        from transformers.integrations.gguf import GGUF_ARCHS
    except ImportError:  # before 5.23
        GGUF_ARCHS = {}
    tensors = [one for one in file.tensors if not one.name.startswith(IGNORED)]
    if file.architecture in GGUF_ARCHS:
        return _converted(tensors, GGUF_ARCHS[file.architecture](model.config))
    return _processed(tensors, file, model)


def values(tensor: gguf_file.Tensor) -> Tensor:
    """The values of a tensor in float32, or those of a plain one as they lie in the file."""
    stored = np.memmap(tensor.path, np.uint8, "c", tensor.start, (tensor.nbytes,))  # "c": numba refuses read-only
    if tensor.kind in PLAIN:
        return torch.from_numpy(stored.copy()).view(PLAIN[tensor.kind]).view(tensor.shape)
    name, elements, nbytes = gguf_file.TYPES[tensor.kind]
    blocks = stored.reshape(-1, nbytes)
    found = torch.empty(len(blocks), elements)
    loops = block_loops() if name in LOOPED else None
    if loops:
        loops.in_threads(len(blocks), lambda part: _unpack(loops, name, blocks[part], found[part].numpy()))
    else:
        unpack_by_package(tensor.kind, blocks, found.numpy())
    return found.view(tensor.shape)


def unpack_by_package(kind: int, blocks: Array, found: Array) -> None:
    """Write the values of ``blocks [n, bytes]`` of a type into ``found [n, elements]``, by the gguf package."""
    import gguf

    step = max(1, CHUNK // found.shape[1])
    for at in range(0, len(blocks), step):
        values = gguf.dequantize(blocks[at : at + step].reshape(1, -1), gguf.GGMLQuantizationType(kind))
        found[at : at + step] = values.reshape(-1, found.shape[1])


def _unpack(loops: Any, name: str, blocks: Array, found: Array) -> None:
    """As ``unpack_by_package``, by compiled ``loops``."""
    blocks = np.ascontiguousarray(blocks)

    def halves(at: int) -> Array:
        return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32).ravel()

    if name in ("Q4_0", "Q5_0"):
        none = np.zeros(len(blocks), np.float32)
        loop, middle = (loops.four_bits, 8) if name == "Q4_0" else (loops.five_bits, 16)
        loop(blocks, halves(0), none, 2, middle, found)
    elif name in ("Q4_1", "Q5_1"):
        loop = loops.four_bits if name == "Q4_1" else loops.five_bits
        loop(blocks, halves(0), halves(2), 4, 0, found)
    elif name == "Q8_0":
        loops.eight_bits(blocks, halves(0), found)
    elif name == "Q6_K":
        loops.six_k(blocks, halves(208), found)
    else:
        loops.four_or_five_k(blocks, halves(0), halves(2), name == "Q5_K", found)


def _processed(tensors: Sequence[gguf_file.Tensor], file: GgufFile, model: Any) -> dict[str, Unpacked]:
    """What transformers' processors make of the tensors: most one weight of one, experts one of two."""
    from transformers import modeling_gguf_pytorch_utils as theirs

    processor = theirs.TENSOR_PROCESSORS.get(file.architecture, theirs.TensorProcessor)(config=model.config.to_dict())
    with fed(file):
        names = theirs.get_gguf_hf_weights_map(model, processor)
    sources = defaultdict(list)
    for one in tensors:
        short = one.name.removesuffix(".weight")
        sources[names.get(one.name) or names.get(short) or one.name].append(one)

    def make(target: str) -> Tensor:
        made: dict[str, Any] = {"tensors": {}}
        for one in sources[target]:
            found = values(one)
            plain = found.float() if found.dtype == torch.bfloat16 else found  # numpy has no such type
            done = processor.process(
                weights=plain.numpy(), name=one.name, tensor_key_mapping=names, parsed_parameters=made
            )
            if done.name is not None:
                made["tensors"][target] = torch.from_numpy(done.weights)
        weight: Tensor = made["tensors"][target]
        return weight

    return {target: Unpacked(_nbytes(found), partial(make, target)) for target, found in sources.items()}


def _converted(tensors: Sequence[gguf_file.Tensor], transforms: Sequence[Any]) -> dict[str, Unpacked]:
    """What transformers' conversions make of the tensors."""
    from transformers import core_model_loading as loading

    renamings = [one for one in transforms if isinstance(one, loading.WeightRenaming)]
    converters = [one for one in transforms if isinstance(one, loading.WeightConverter)]
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    sources, converter_of = defaultdict(list), {}
    for one in tensors:
        target, pattern = loading.rename_source_key(one.name, renamings, converters)
        sources[target].append((pattern, one))
        converter_of[target] = by_pattern.get(pattern)

    def make(target: str) -> Tensor:
        converter = converter_of[target]
        made: dict[str, Any] = {pattern or target: values(one) for pattern, one in sources[target]}
        if converter is not None:
            named = [pattern for pattern in converter.source_patterns if pattern in made]
            for operation in converter.operations:
                order = [name for name in named if name in made] or list(made)
                made = operation.convert(
                    {name: made[name] for name in order}, source_patterns=order, target_patterns=[target]
                )
        (found,) = made.values()
        weight: Tensor = found[0] if isinstance(found, list) else found
        return weight

    return {
        target: Unpacked(_nbytes([one for _, one in found]), partial(make, target)) for target, found in sources.items()
    }


def _nbytes(tensors: Sequence[gguf_file.Tensor]) -> int:
    return sum(one.nbytes for one in tensors)
