"""The tensors in weight files, told by their headers: how many elements, of which type, and which are packed.

safetensors files begin with a JSON object, GGUF files with a table of values and one of tensors. No tensor is read, and
neither torch nor transformers is needed: what lists models and what plans one count by the same rules.
"""

from __future__ import annotations

import json
import math
import re
import stat
import struct
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from kvchat.errors import ModelError
from kvchat.models import gguf_file

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
PLAIN = ("F64", "F32", "F16", "BF16")
COMPRESSED, TORCHAO = "compressed-tensors", "torchao"
FP8_CAPABILITY = (8, 9)  # of a GPU: tensor cores with float8
MXFP4_CAPABILITY = (7, 5)  # of a GPU: that of its kernels
PACKED_BITS = 4  # of compressed-tensors' packed weights where the configuration names none
MAX_DIMENSIONS, MOST = 16, 2**50  # of a tensor, its elements and bytes
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
PACKED = "packed"
GGUF_MLP = "blk.0.ffn_up.weight"
SAFETENSORS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I8": "int8", "U8": "uint8"}
DRAFTING = re.compile(r"(?:^|\.)mtp\.")  # layers that draft further tokens
MASKS = re.compile(r"(?:^|\.)(?:attn|attention)\.(?:masked_)?bias$")  # causal ones, which GPT-2 and its kin once stored
# Towers and what leads from them to the text. The names of 99 multimodal classes of transformers 5.23 were looked at.
TOWERS = re.compile(
    r"(?:^|[._])(?:vision|visual|image|img|video|audio|speech|sound|vqmodel|\w*projector|aligner|connector|resampler"
    r"|merger|qformer|mlp1|talker|token2wav|code2wav)(?:[._]|$)"
)
EMBEDDING = re.compile(r"(?:^|\.)(?:embed_tokens|word_embeddings|embed_in|wte|token_embd)$")
HEAD = re.compile(r"(?:^|\.)(?:lm_head|embed_out|output)$")
TABLES = re.compile(r"emb|(?:^|\.)w[tp]e$")  # also of positions and layers, which nothing packs
EXPERTS = re.compile(r"\.experts(?:\.|$)|_exps$|\.block_sparse_moe\.\w+_linear$")  # no Linears once they are loaded


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


@dataclass(frozen=True)
class Elements:
    """Elements of the weights that are not packed in the files.

    ``linear``: of the Linears but the head; ``embedding``: of the tokens' table; ``head``: None where that is it;
    ``experts``: of a mixture's.
    """

    linear: int = 0
    embedding: int = 0
    head: int | None = None
    experts: int = 0


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
    found: list[StoredTensor] = []
    for path in files:
        nbytes += _regular(path)
        try:
            found += tensors(path)
        except (OSError, ValueError) as error:
            raise _damaged(path) from error
    if not found:
        raise ModelError("The weights are damaged.", "There are no tensors.", "Download the model again.")
    loaded = [tensor for tensor in found if is_loaded(tensor.name, is_multimodal)]
    stays = packed(loaded, quantization) if quantization else {}
    plain = [tensor for tensor in loaded if owner(tensor.name) not in stays]
    for tensor in plain:
        elements[SAFETENSORS.get(tensor.dtype, tensor.dtype)] += tensor.elements
    elements[PACKED] = sum(one.elements for one in stays.values())
    return replace(
        _weights(nbytes, elements),
        packed_elements=elements[PACKED],
        packed_bytes=sum(one.nbytes for one in stays.values()),
        packed_experts=sum(one.elements for name, one in stays.items() if EXPERTS.search(name)),
        plain=count(((tensor.name, tensor.elements) for tensor in plain), stays),
        layer_bits=bits(stays.values()),
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


def is_loaded(name: str, is_multimodal: bool) -> bool:
    """True if a tensor is a weight of the text part of a model."""
    return not (DRAFTING.search(name) or MASKS.search(name) or (is_multimodal and TOWERS.search(name)))


def count(tensors: Iterable[tuple[str, int]], packed: Iterable[str] = ()) -> Elements:
    """The elements of ``tensors``, names and elements; ``packed`` are the modules of weights packed already."""
    linear = embedding = experts = 0
    head = 0 if any(map(HEAD.search, packed)) else None
    for name, elements in tensors:
        module = owner(name)
        if EMBEDDING.search(module):
            embedding += elements
        elif HEAD.search(module):
            head = (head or 0) + elements
        elif EXPERTS.search(module):
            experts += 0 if name.endswith("bias") else elements
        elif name.endswith(".weight") and not TABLES.search(module):
            linear += elements
    return Elements(linear, embedding, head, experts)
