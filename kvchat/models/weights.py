"""Compute the memory of a model's loaded weights from the headers of its files.

The list of models, the plan and the check before loading use it; it needs neither torch nor a model's class. Tensors
that are in no file, such as rotary frequencies, are not counted: they take a few hundred bytes.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvchat.errors import ModelError
from kvchat.models import gguf_file
from kvchat.models.gguf_file import GgufFile
from kvchat.models.stored_tensors import GGUF, StoredTensor, is_unpacked, kind_of, method_of, owner

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
SAFETENSORS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I8": "int8", "U8": "uint8"}
PLAIN = ("F64", "F32", "F16", "BF16")  # a module with other dtypes is packed
LINEAR, EXPERT, EMBEDDING, HEAD, UNPACKABLE, REST = "linear", "expert", "embedding", "head", "unpackable", ""
IN_FILE = "in the file"  # the packing of weights that stay as they are in the file
# Patterns of tensor names, checked with 99 multimodal classes of transformers 5.23.
DRAFTING = re.compile(r"(?:^|\.)mtp\.")  # layers that draft further tokens
MASKS = re.compile(r"(?:^|\.)(?:attn|attention)\.(?:masked_)?bias$")  # causal ones, stored by GPT-2 and relatives
ENCODERS = re.compile(  # and modules that connect them to the text
    r"(?:^|[._])(?:vision|visual|image|img|video|audio|speech|sound|vqmodel|\w*projector|aligner|connector|resampler"
    r"|merger|qformer|mlp1|talker|token2wav|code2wav)(?:[._]|$)"
)
EMBEDDINGS = re.compile(r"(?:^|\.)(?:embed_tokens|word_embeddings|embed_in|wte|token_embd)$")
HEADS = re.compile(r"(?:^|\.)(?:lm_head|embed_out|output)$")
TABLES = re.compile(r"(?<!un)emb|(?:^|\.)w[tp]e$")  # also of positions and layers; never packed
EXPERTS = re.compile(r"\.experts(?:\.|$)|_exps$|\.block_sparse_moe\.\w+_linear$")  # stacks, not Linears, once loaded
EXPERT_NUMBER = re.compile(r"\.experts\.(\d+)\.")
PARTS = {"text_config", "vision_config", "audio_config"}  # sections of a multimodal model's configuration
WITHOUT_LINEARS = {"gpt2", "openai-gpt"}  # their matrices are Conv1Ds, which are never packed
OWN_EXPERTS = {"dbrx", "jetmoe", "llama4", "llama4_text", "longcat_flash"}  # computed differently, and never packed
GGUF_MLP = "blk.0.ffn_up.weight"
PACKED_BITS = 4  # of compressed-tensors' packed weights if the configuration does not say

# Quantizations in order of preference: on a CPU int4 needs no package, on a GPU nf4 is more accurate.
CHOICES = {"cpu": ("none", "int8", "int4", "nf4"), "cuda": ("none", "int8", "nf4", "int4")}
OF_UNPACKED = ("none", "int8", "int4")  # kvchat packs no nf4 from weights that were unpacked
# The default quantization for weights that loading unpacks, with the most bits per element that the layers may have in
# the files: int4 for Q4_K_M, int8 for Q8_0.
AT_MOST = {"int4": 5.0, "int8": 9.0}
MOSTLY = 0.5  # of the layers' weights: packing fewer would lose precision and save hardly any memory
NF4_BYTES = 0.5 + 4 / 64  # per weight, with bitsandbytes' scale per 64
# On a CPU, 32 weights of a row share constants; an int8 row that cannot be divided into groups has one scale.
GROUP, INT8_GROUP_BYTES, INT8_ROW_BYTES, INT4_GROUP_BYTES = 32, 2, 4, 4
INT4_ROWS, STACKED = 16, 64  # required multiples: of rows for int4, of an expert's elements in a stack for int8
# On a GPU, int8 has a scale per row; torchao's int4 has a scale and a zero point per 128 weights, and is padded.
GPU_ROW_BYTES, GPU_GROUP, GPU_GROUP_BYTES, GPU_PADDED = 4, 128, 4, (8, 1024)
INT4_CAPABILITY = (8, 0)  # GPUs whose tensor cores have bfloat16


class Place(NamedTuple):
    """The device that multiplies the weights: "cpu" or "cuda", and a GPU's compute capability if known."""

    device: str
    capability: tuple[int, int] | None = None


class Part(NamedTuple):
    """A matrix ``[rows, columns]`` of a model; a tensor of another shape counts as one column.

    ``kind`` is ``LINEAR`` to ``REST``. ``packed`` is the size in the files, in bytes with constants, if it is packed
    there. If the format is unknown, ``rows`` and ``columns`` are 0.
    """

    kind: str
    rows: int
    columns: int
    packed: int = 0


@dataclass(frozen=True)
class Weights:
    """The weights of the text part of a model.

    Attributes:
        nbytes: size of the files.
        dtype: of most elements; in a quantized checkpoint that of the arithmetic.
        parts: number of parts of each kind.
        method: transformers' name of the quantization; "gguf" for a GGUF file.
        quantization: kvchat's name of it, or else transformers'; "" for a GGUF file.
        mlp: elements of the MLP's first matrix; 0 if unknown.
        layer_bits: bits per element of the layers' matrices in a GGUF file, or of a checkpoint's packed weights.
        packs_experts: False if the experts of this architecture cannot be packed.
    """

    nbytes: int
    dtype: str
    parts: Mapping[Part, int]
    method: str = ""
    quantization: str = ""
    mlp: int = 0
    layer_bits: float = 0.0
    packs_experts: bool = True

    @property
    def type(self) -> str:
        """The quantization or dtype to show to the user."""
        return self.quantization or self.dtype

    def is_unpacked(self, place: Place) -> bool:
        """Return True if loading unpacks the weights, because ``place`` cannot multiply them as stored."""
        return is_unpacked(self.method, place.capability)

    def stays_packed(self, place: Place) -> bool:
        """Return True if ``place`` multiplies the weights as stored."""
        return bool(self.method) and not self.is_unpacked(place)

    def loaded_bytes(self, quantize: str, dtype: str, place: Place) -> int:
        """Return the loaded bytes: unpacked parts in ``dtype``, parts that stay packed as in the files."""
        item, total = ITEM_BYTES[dtype], 0
        for part, count in self.parts.items():
            total += count * _bytes(part, self._packing(part, quantize, place), item, place)
        return total

    def by_quantization(self, dtype: str, place: Place) -> dict[str, int]:
        """Return the loaded bytes by possible quantization; weights that stay packed have only their own."""
        if self.stays_packed(place):
            return {self.method: self.loaded_bytes("none", dtype, place)}
        possible = [name for name in CHOICES[place.device] if name != "int4" or _multiplies_int4(dtype, place)]
        if self.is_unpacked(place):
            possible = [name for name in possible if name in OF_UNPACKED]
        return {name: self.loaded_bytes(name, dtype, place) for name in possible}

    def by_default(self, dtype: str, place: Place) -> str:
        """Return the quantization that keeps weights about as small as their files; "none" unless loading unpacks them.

        Also "none" if most weights cannot be packed, such as a mixture's experts on a GPU.
        """
        if not self.is_unpacked(place):
            return "none"
        possible = self.by_quantization(dtype, place)
        small = (name for name, most in AT_MOST.items() if 0 < self.layer_bits <= most and name in possible)
        return next((name for name in small if self.unpackable_share(name, place) < MOSTLY), "none")

    def unpackable_share(self, quantize: str, place: Place) -> float:
        """Return the share of the layers' weights that ``quantize`` cannot pack."""
        packed = total = 0
        for part, count in self.parts.items():
            if part.kind in (LINEAR, EXPERT, UNPACKABLE):
                elements = count * part.rows * part.columns
                total += elements
                packed += elements if self._packing(part, quantize, place) != "none" else 0
        return 1 - packed / max(1, total)

    def read_bytes(self, quantize: str, dtype: str, place: Place) -> int | None:
        """Return the bytes that one token reads; None for a mixture of experts, where it reads only some."""
        if self._of(EXPERT):
            return None
        tables = self._of(EMBEDDING) if self._of(HEAD) else []  # a token reads only one row
        item = ITEM_BYTES[dtype]
        return self.loaded_bytes(quantize, dtype, place) - sum(_bytes(table, "none", item, place) for table in tables)

    def _of(self, kind: str) -> list[Part]:
        return [part for part in self.parts if part.kind == kind]

    def _packing(self, part: Part, quantize: str, place: Place) -> str:
        """Return the quantization of a loaded part; ``IN_FILE`` if it stays as it is in the file."""
        stays = self.stays_packed(place)
        if stays and part.packed:
            return IN_FILE
        if part.kind == HEAD or (part.kind == EMBEDDING and not self._of(HEAD)):
            in_8_bits = self.quantization == "int8" if stays else quantize in ("int8", "int4")  # as the layers are
            return "int8" if in_8_bits and place.device == "cpu" else "none"
        is_packed = part.kind == LINEAR or (
            part.kind == EXPERT and self.packs_experts and place.device == "cpu" and quantize != "nf4"
        )
        return quantize if is_packed and not stays and _fits(part, quantize, place) else "none"


def _fits(part: Part, quantize: str, place: Place) -> bool:
    if quantize == "int4":
        on_cpu = part.rows % INT4_ROWS == part.columns % GROUP == 0
        return on_cpu if place.device == "cpu" else part.columns % GPU_GROUP == 0
    return part.kind == LINEAR or part.rows * part.columns % STACKED == 0


def _multiplies_int4(dtype: str, place: Place) -> bool:
    return place.device == "cpu" or (dtype == "bfloat16" and (place.capability or INT4_CAPABILITY) >= INT4_CAPABILITY)


def _bytes(part: Part, packing: str, item: int, place: Place) -> int:
    """Return the bytes of a part in ``packing``; an unpacked element has ``item`` bytes."""
    rows, columns = part.rows, part.columns
    if packing == IN_FILE:
        return part.packed
    if packing == "none":
        return rows * columns * item
    if packing == "nf4":
        return int(rows * columns * NF4_BYTES)
    if place.device == "cpu":
        groups = columns // GROUP
        if packing == "int4":
            return rows * (columns // 2 + groups * INT4_GROUP_BYTES)
        return rows * (columns + (INT8_ROW_BYTES if columns % GROUP else groups * INT8_GROUP_BYTES))
    if packing == "int8":
        return rows * (columns + GPU_ROW_BYTES)
    rows, columns = (-(-size // to) * to for size, to in zip((rows, columns), GPU_PADDED, strict=True))
    return rows * (columns // 2 + columns // GPU_GROUP * GPU_GROUP_BYTES)


def of_checkpoint(config: Mapping[str, Any], stored: Iterable[StoredTensor]) -> Weights:
    """Return the weights of a safetensors model, from the ``config`` in its config.json and all ``stored`` tensors.

    Raises:
        ModelError: there are no tensors.
    """
    stored = list(stored)
    text = _text(config)
    section = config.get("quantization_config")
    section = section if isinstance(section, dict) else {}
    owned: defaultdict[str, list[StoredTensor]] = defaultdict(list)
    for tensor in stored:
        if _is_of_text(tensor.name, config):
            owned[owner(tensor.name)].append(tensor)
    bits = _bits(section)
    parts: Counter[Part] = Counter()
    dtypes: Counter[str] = Counter()
    for module, tensors in owned.items():
        if section and any(tensor.dtype not in PLAIN for tensor in tensors):
            parts.update(_packed(module, tensors, bits))
            continue
        for tensor in tensors:
            parts.update(_plain(tensor.name, tensor.shape))
            dtypes[SAFETENSORS.get(tensor.dtype, tensor.dtype)] += tensor.elements
    if not parts:
        raise ModelError("The weights are damaged.", "There are no tensors.", "Download the model again.")
    if config.get("model_type") in WITHOUT_LINEARS:
        parts = Counter({p._replace(kind=UNPACKABLE) if p.kind == LINEAR else p: n for p, n in parts.items()})
    packed = [(part, count) for part, count in parts.items() if part.packed]
    elements = sum(count * part.rows * part.columns for part, count in packed)
    return Weights(
        nbytes=sum(tensor.nbytes for tensor in stored),
        dtype=_own_dtype(config) if section else max(dtypes, key=dtypes.__getitem__),
        parts=parts,
        method=method_of(section),
        quantization=kind_of(section),
        mlp=_count(text, "intermediate_size") * _count(text, "hidden_size"),
        layer_bits=8 * sum(count * part.packed for part, count in packed) / elements if elements else 0.0,
        packs_experts=config.get("model_type") not in OWN_EXPERTS,
    )


def of_gguf(file: GgufFile) -> Weights:
    parts: Counter[Part] = Counter()
    types: Counter[str] = Counter()
    for tensor in file.tensors:
        parts.update(_plain(tensor.name, tensor.shape))
        types[gguf_file.type_of(tensor.kind)[0]] += math.prod(tensor.shape)
    return Weights(
        nbytes=sum(path.stat().st_size for path in file.paths),
        dtype=max(types, key=types.__getitem__),
        parts=parts,
        method=GGUF,
        mlp=sum(math.prod(tensor.shape) for tensor in file.tensors if tensor.name == GGUF_MLP),
        layer_bits=file.layer_bits,
    )


def is_loaded(name: str, is_multimodal: bool) -> bool:
    """Return True if a tensor is a weight of the text part of a model."""
    return not (DRAFTING.search(name) or MASKS.search(name) or (is_multimodal and ENCODERS.search(name)))


def _is_of_text(name: str, config: Mapping[str, Any]) -> bool:
    """Return True if a tensor of a checkpoint with this ``config`` is loaded; a tied head is not."""
    if not is_loaded(name, is_multimodal=not PARTS.isdisjoint(config)):
        return False
    text = _text(config)
    if HEADS.search(owner(name)):
        return not any(section.get("tie_word_embeddings") is True for section in (config, text))
    number = EXPERT_NUMBER.search(name)
    if number and isinstance(text.get("moe_intermediate_size"), list):  # ERNIE 4.5 VL numbers vision experts last
        experts = text.get("moe_num_experts")
        return int(number[1]) < (experts[0] if isinstance(experts, list) else _count(text, "moe_num_experts"))
    return True


def _plain(name: str, shape: tuple[int, ...]) -> dict[Part, int]:
    kind = _kind(owner(name), name, shape)
    if kind == REST:
        return {Part(REST, math.prod(shape), 1): 1}
    if kind == UNPACKABLE:
        return {Part(UNPACKABLE, shape[0], math.prod(shape[1:])): 1}
    return {Part(kind, *shape[-2:]): math.prod(shape[:-2])}


def _packed(module: str, tensors: list[StoredTensor], bits: int) -> dict[Part, int]:
    """Return the parts of a module that is packed in the files; a stack of experts has several."""
    nbytes = sum(tensor.nbytes for tensor in tensors)
    kind = EXPERT if EXPERTS.search(module) else HEAD if HEADS.search(module) else LINEAR
    stacked, rows, columns = next(filter(None, (_unpacked_shape(tensor, bits) for tensor in tensors)), (1, 0, 0))
    return {Part(kind, rows, columns, nbytes // max(1, stacked)): stacked}


def _kind(module: str, name: str, shape: tuple[int, ...]) -> str:
    if len(shape) < 2 or name.endswith("bias"):
        return REST
    if EMBEDDINGS.search(module):
        return EMBEDDING
    if HEADS.search(module):
        return HEAD
    if EXPERTS.search(module):
        return EXPERT
    if TABLES.search(module):
        return REST
    return LINEAR if name.endswith(".weight") and len(shape) == 2 else UNPACKABLE


def _unpacked_shape(tensor: StoredTensor, bits: int) -> tuple[int, int, int] | None:
    """Return the number, rows and columns of the matrices in a tensor of a packed module; None for constants."""
    *stacked, rows, columns = (1, 1, *tensor.shape)
    if tensor.name.endswith("_blocks"):  # of mxfp4: [experts, rows, groups, 16 bytes]
        *stacked, rows, groups, columns = (1, 1, *tensor.shape)
        columns *= 2 * groups
    elif tensor.name.endswith(".weight_packed"):
        columns = 8 * tensor.nbytes // bits // max(1, rows * math.prod(stacked))
    elif not tensor.name.endswith(".weight"):
        return None
    return math.prod(stacked), rows, columns


def _bits(config: Mapping[str, Any]) -> int:
    """Return the bits of a packed weight; the fewest if there are several kinds, so that no size is understated."""
    try:
        found = [group["weights"]["num_bits"] for group in config["config_groups"].values()]
        return min((bits for bits in found if isinstance(bits, int) and bits > 0), default=PACKED_BITS)
    except (AttributeError, KeyError, TypeError):
        return PACKED_BITS


def _own_dtype(config: Mapping[str, Any]) -> str:
    """Return the dtype in which a quantized checkpoint or a multimodal one's text part computes, as in the engine."""
    named = (section.get(key) for section in (_text(config), config) for key in ("dtype", "torch_dtype"))
    return next((name for name in named if isinstance(name, str) and name in ITEM_BYTES), "float32")


def _count(config: Mapping[str, Any], key: str) -> int:
    found = config.get(key)
    return found if isinstance(found, int) else 0


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the text section of a multimodal model's configuration; else the configuration itself."""
    section = config.get("text_config")
    return section if isinstance(section, dict) else config
