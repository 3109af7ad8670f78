"""Translate a GGUF file for transformers: configuration, position scaling, weights and their names.

A weight is unpacked from a memory map when transformers asks for it. transformers ignores a file's position scaling and
would rotate without it.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvchat.errors import ModelError
from kvchat.models import gguf_file
from kvchat.models.gguf_file import EMBEDDINGS, ENDS, HEAD, GgufFile, read_model
from kvchat.models.quantize.rows import block_loops
from kvchat.models.support import refuse_unreadable

# Number of layers of the models that do not scale scores by the head size; llama.cpp recognizes them in the same way.
GEMMA_27B = {"gemma2": 46, "gemma3_text": 62}
LISTS = "tokenizer.ggml."  # keys whose lists are hidden from transformers, which would convert each entry
# Tensors that divide frequencies, and are not weights; LONG is for texts beyond the original context, SHORT within it.
DIVISORS, LONG, SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
# Parameters of Llama 3.1, 3.2 and 3.3 from which llama.cpp's converter computes the divisors, together with a factor.
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
CHUNK = 2**15  # elements that numpy unpacks at a time, so that they stay in a processor's cache
# Types that compiled loops can unpack.
LOOPED = {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "MXFP4", "IQ4_NL"}
Array = np.ndarray[Any, Any]
PLAIN = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}
# Tensors that scale positions; the configuration does that here.
IGNORED = ("rope_freqs.", "rope_factors_")
# Architectures that transformers runs but does not read from GGUF files, and its names for them or for what reads text
# in them. llama.cpp's logits are the same.
ALSO_READ = {
    "arcee": "arcee",
    "cohere2": "cohere2",
    "command-r": "cohere",
    "ernie4_5": "ernie4_5",
    "exaone4": "exaone4",
    "glm4": "glm4",
    "granite": "granite",
    "hunyuan-dense": "hunyuan_v1_dense",
    "lfm2moe": "lfm2_moe",
    "mistral3": "mistral",
    "olmo2": "olmo2",
    "olmoe": "olmoe",
    "qwen2vl": "qwen2",
    "qwen3vl": "qwen3",
    "qwen3vlmoe": "qwen3_moe",
    "seed_oss": "seed_oss",
    "smollm3": "smollm3",
}
# Those whose tensors change like those of one that transformers reads; Llama's queries and keys are in pairs.
CHANGED_LIKE = {**dict.fromkeys(("arcee", "granite", "mistral3", "smollm3"), "llama"), "lfm2moe": "lfm2"}
# Keys by the names in transformers' configurations: those of ALSO_READ, and those that transformers' tables of most
# architectures lack. It would use its defaults, which belong to another model.
OF_ALSO_READ = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "norm_eps": "attention.layer_norm_rms_epsilon",
    "layer_norm_eps": "attention.layer_norm_epsilon",
    "conv_L_cache": "shortconv.l_cache",
    "num_dense_layers": "leading_dense_block_count",
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
    "logit_scale": "logit_scale",
}
LEFT_OUT = {
    "max_position_embeddings": "context_length",
    "head_dim": "attention.key_length",
    "sliding_window": "attention.sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
}
TOKENS = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "pad_token_id": "padding_token_id"}
EXPERTS = re.compile(r"blk\.(?P<layer>\d+)\.ffn_(?P<part>gate|up|down)_exps\.(?P<kind>weight|bias)")
SHARED_GATE = ".ffn_gate_inp_shexp.weight"  # a row, in newer files a matrix of one; transformers makes the row a matrix
BIASES = {"attention_bias": ".attn_output.bias", "mlp_bias": ".ffn_down.bias"}  # only some Llamas have them


def of_file(path: Path, name: str) -> Any:
    """Read the configuration of the model ``name`` from the file ``path``.

    Raises:
        ModelError: it is damaged, not a language model, or of an architecture that transformers does not read.
    """
    file = read_model(path)
    with refuse_unreadable(name, "the GGUF file"):
        found = _also_read(file) if file.architecture in ALSO_READ else _by_transformers(file)
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        if rows := [one.shape[0] for one in file.tensors if one.name == EMBEDDINGS]:
            found["vocab_size"] = rows[0]
        if file.architecture == "llama" and file.of_architecture("expert_count"):
            found["model_type"] = "mixtral"
        kind = CONFIG_MAPPING[found["model_type"]]
        found |= _left_out(file, kind)
        ends = [id for key in ENDS if (id := file.number(f"tokenizer.ggml.{key}")) is not None]
        if len(set(ends)) > 1 and not isinstance(found.get("eos_token_id"), list):
            found["eos_token_id"] = list(dict.fromkeys(ends))
        config = kind.from_dict(found)
    config.dtype = config.dtype or torch.bfloat16  # the dtype of unpacked weights; the file's blocks have none
    if hasattr(config, "query_pre_attn_scalar"):  # transformers always uses 256, the value of most models
        config.query_pre_attn_scalar = _gemma_scalar(config)
    apply(read(file), config, name)
    return config


@contextlib.contextmanager
def fed(file: GgufFile) -> Iterator[None]:
    """Pass the parsed ``file`` to transformers in this block, and have it build the table of tensor names only once."""
    import gguf

    own = gguf.GGUFReader, gguf.get_tensor_name_map
    gguf.GGUFReader, gguf.get_tensor_name_map = lambda path: _reader(file), lru_cache(own[1])
    try:
        yield
    finally:
        gguf.GGUFReader, gguf.get_tensor_name_map = own


@contextlib.contextmanager
def under_their_names() -> Iterator[None]:
    """Keep transformers from renaming weights in this block: they have its names, and collecting rules takes 0.1 s."""
    from transformers import conversion_mapping

    own = conversion_mapping.get_checkpoint_conversion_mapping
    conversion_mapping.get_checkpoint_conversion_mapping = lambda _: []
    try:
        yield
    finally:
        conversion_mapping.get_checkpoint_conversion_mapping = own


def _by_transformers(file: GgufFile) -> dict[str, Any]:
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    try:
        from transformers.integrations.gguf import GGUF_CONFIG_ARCHS, get_gguf_config
    except ImportError:  # before 5.23
        GGUF_CONFIG_ARCHS = {}
    if file.architecture in GGUF_CONFIG_ARCHS:
        lists = {key: value for key, value in file.values.items() if isinstance(value, tuple)}
        texts = {key: len(value) for key, value in lists.items() if value and isinstance(value[0], bytes)}
        numbers = {key: list(value) for key, value in lists.items()}
        return dict(get_gguf_config({**file.values, **numbers, **texts}, tuple(one.name for one in file.tensors)))
    with fed(file):
        return dict(load_gguf_checkpoint(str(file.path), return_tensors=False)["config"])


def _also_read(file: GgufFile) -> dict[str, Any]:
    """Return what the file says beside its architecture's numbers, which ``_left_out`` adds."""
    found: dict[str, Any] = {name: file.number(f"tokenizer.ggml.{key}") for name, key in TOKENS.items()}
    found |= {"model_type": ALSO_READ[file.architecture], "sliding_window": None}  # several classes have a default
    found["tie_word_embeddings"] = all(one.name != HEAD for one in file.tensors)
    if file.architecture == "qwen3vlmoe":  # no key says so
        found["norm_topk_prob"] = True
    slides = file.of_architecture("attention.sliding_window_pattern")
    if slides and file.architecture == "olmo2":
        found["model_type"] = "olmo3"
    elif file.architecture == "exaone4" and not file.of_architecture("attention.sliding_window"):
        slides = [False] * file.of_architecture("block_count")  # its class fails without both
    if isinstance(heads := file.of_architecture("attention.head_count_kv"), tuple):  # the others are convolutions
        found["layer_types"] = ["full_attention" if count else "conv" for count in heads]
        found["num_key_value_heads"] = max(heads)
    if slides:
        found["layer_types"] = ["sliding_attention" if each else "full_attention" for each in slides]
    if beta := file.of_architecture("attention.temperature_scale"):  # YaRN's other values are set by ``apply``
        multiplier = file.of_architecture("rope.scaling.yarn_log_multiplier", 0.0)
        rope = {"rope_type": "yarn", "factor": 1.0, "mscale": 1.0, "mscale_all_dim": multiplier}
        found |= {"model_type": "ministral3", "rope_parameters": {**rope, "llama_4_scaling_beta": beta}}
    return found


def _left_out(file: GgufFile, kind: Any) -> dict[str, Any]:
    """Return the file's values that transformers ignores, by their names in its configurations of this ``kind``."""
    from transformers.modeling_gguf_pytorch_utils import GGUF_TO_TRANSFORMERS_MAPPING

    theirs = GGUF_TO_TRANSFORMERS_MAPPING["config"].get(file.architecture, {})
    keys = LEFT_OUT | (OF_ALSO_READ if file.architecture in ALSO_READ else {})
    said = {name: file.of_architecture(key) for name, key in keys.items() if not hasattr(kind, str(theirs.get(key)))}
    if file.architecture in ALSO_READ and not said["head_dim"]:  # the class's default belongs to another model
        said["head_dim"] = said["hidden_size"] // said["num_attention_heads"]
    said |= {name: any(one.name.endswith(end) for one in file.tensors) for name, end in BIASES.items()}
    known = {name for name in said if hasattr(kind, name) or name in kind.attribute_map}
    return {name: value for name, value in said.items() if value and name in known and not isinstance(value, tuple)}


class _Field(NamedTuple):
    """A value as the gguf package gives it."""

    parts: list[Any]
    types: list[int]

    @property
    def data(self) -> range:
        return range(len(self.parts))


def _reader(file: GgufFile) -> SimpleNamespace:
    """Return the part of the gguf package's reader that transformers uses.

    Omits values that slow transformers down or mislead it, such as the name of a Llama that is called mistral.
    """
    fields = {
        key: _field(value)
        for key, value in file.values.items()
        if not (key.startswith(LISTS) and isinstance(value, tuple))
        and key != "general.name"
        and ".rope.scaling." not in key  # ``apply`` sets the scaling
    }
    return SimpleNamespace(fields=fields, tensors=[SimpleNamespace(name=one.name) for one in file.tensors])


def _field(value: Any) -> _Field:
    if isinstance(value, tuple):
        fields = [_field(one) for one in value]
        return _Field([field.parts[0] for field in fields], [gguf_file.LIST, *(fields[0].types if fields else [4])])
    if isinstance(value, str | bytes):
        encoded = value.encode() if isinstance(value, str) else value
        return _Field([np.frombuffer(encoded, np.uint8)], [gguf_file.TEXT])
    kind = {bool: 7, int: 11, float: 12}[type(value)]
    return _Field([np.array([value])], [kind])


def _gemma_scalar(config: Any) -> int:
    """Return the number whose square root divides a Gemma's scores."""
    if GEMMA_27B.get(config.model_type) == config.num_hidden_layers:
        return int(config.hidden_size // config.num_attention_heads)
    return int(config.head_dim)


class Scaling(NamedTuple):
    """How a file scales positions; missing numbers are 0.

    Attributes:
        kind: llama.cpp's name, with its ``factor``.
        original: context before scaling.
        divisors: divide the frequencies.
        long, short: divide the frequencies beyond the original context, and within it.
        base, sliding_base: base of the unscaled frequencies, the second for sliding layers.
        dimensions: rotated dimensions of a head, from the first on.
        attention: factor of queries and keys; multiplies YaRN's own factor.
    """

    kind: str
    factor: float
    original: int
    divisors: tuple[float, ...]
    long: tuple[float, ...]
    short: tuple[float, ...]
    base: float
    sliding_base: float
    dimensions: int
    attention: float


def read(file: GgufFile) -> Scaling:
    values = {name.partition(".rope.")[2]: value for name, value in file.values.items() if ".rope." in name}
    kind = values.get("scaling.type", "linear")
    factor = values.get("scaling.factor") or values.get("scale_linear") or 1
    tensors = {one.name: one for one in file.tensors}
    divisors, long, short = (_floats(tensors[name]) if name in tensors else () for name in (DIVISORS, LONG, SHORT))
    original = values.get("scaling.original_context_length", 0)
    base, sliding_base = float(values.get("freq_base", 1e4)), float(values.get("freq_base_swa", 0))
    dimensions = int(values.get("dimension_count", 0))
    attention = float(values.get("scaling.attn_factor", 1))
    divided = divisors, long, short
    return Scaling(str(kind), float(factor), int(original), *divided, base, sliding_base, dimensions, attention)


def apply(scaling: Scaling, config: Any, name: str) -> None:
    """Apply the scaling of the file ``name`` to transformers' ``config``, except in Gemma's sliding layers.

    Raises:
        ModelError: transformers has no such scaling for GGUF files.
    """
    every = getattr(config, "rope_parameters", None) or {}
    rope = every.get("full_attention", every)
    if rope.get("rope_type") not in ("default", "yarn"):
        return
    rope["rope_theta"] = scaling.base or rope["rope_theta"]
    if "sliding_attention" in every:
        every["sliding_attention"]["rope_theta"] = scaling.sliding_base or every["sliding_attention"]["rope_theta"]
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if (share := (scaling.dimensions or head) / head) != rope.get("partial_rotary_factor", 1):
        rope["partial_rotary_factor"] = share
    original = scaling.original or config.max_position_embeddings
    if (factor := round(max(scaling.divisors, default=1), 3)) > 1:
        rope |= {"rope_type": "llama3", "factor": factor, **LLAMA3}
        if not _divides(config, scaling.divisors):
            raise _refusal(name, "by divisors that are not Llama 3's")
    elif scaling.long:
        rope |= {"rope_type": "longrope", "long_factor": list(scaling.long), "short_factor": list(scaling.short)}
        rope |= {"original_max_position_embeddings": original, "attention_factor": scaling.attention}
        config.original_max_position_embeddings = original  # where Phi-3's code looks for it
    elif scaling.kind == "longrope":
        raise _refusal(name, "by longrope without its divisors")
    elif scaling.kind == "linear" and scaling.factor != 1:
        rope |= {"rope_type": "linear", "factor": scaling.factor}
    elif scaling.kind == "yarn" and scaling.factor != 1:
        rope |= {"rope_type": "yarn", "factor": scaling.factor, "original_max_position_embeddings": original}
        rope |= {"attn_factor": scaling.attention} if scaling.attention != 1 else {}


def _floats(tensor: gguf_file.Tensor) -> tuple[float, ...]:
    """Return the values of a tensor that is stored in float32."""
    if tensor.kind != 0:
        raise ValueError(f"{tensor.name} is not float32")
    return tuple(np.fromfile(tensor.path, "<f4", math.prod(tensor.shape), offset=tensor.start).tolist())


def _divides(config: Any, divisors: tuple[float, ...]) -> bool:
    """Return True if transformers divides the frequencies of ``config`` by these ``divisors``."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = config.rope_parameters["rope_theta"] ** (-torch.arange(len(frequencies)) / len(frequencies))
    return len(divisors) == len(plain) and torch.allclose(plain / frequencies, torch.tensor(divisors), rtol=1e-3)


def _refusal(name: str, how: str) -> ModelError:
    return ModelError(
        f"{name} cannot be loaded.",
        f"It scales its positions {how}, which transformers cannot read from a GGUF file.",
        "Use the model's safetensors.",
    )


@dataclass(frozen=True, eq=False)
class Unpacked:
    """A weight of ``nbytes`` in its file; ``make`` unpacks it when transformers asks for it."""

    nbytes: int
    make: Callable[[], Tensor]

    def __getitem__(self, _: object) -> Tensor:
        return self.make()


def weights(file: GgufFile, model: Any) -> dict[str, Unpacked]:
    """Return the weights for ``model``, which may be on the meta device, by their names in it.

    Tensors that the model lacks keep the file's names.
    """
    try:
        from transformers.integrations.gguf import GGUF_ARCHS
    except ImportError:  # before 5.23
        GGUF_ARCHS = {}
    tensors = [one for one in file.tensors if not one.name.startswith(IGNORED)]
    if file.architecture in GGUF_ARCHS:
        return _converted(tensors, GGUF_ARCHS[file.architecture](model.config))
    return _processed(tensors, file, model)


def loading_info(weights: dict[str, Unpacked], model: Any) -> dict[str, Any]:
    """Return the loading information that transformers would return only after minutes of reading these ``weights``."""
    places = {name for name, _ in model.named_parameters()}
    return {
        "missing_keys": places - weights.keys(),
        "unexpected_keys": weights.keys() - places - model.state_dict().keys(),
    }


def values(tensor: gguf_file.Tensor) -> Tensor:
    """Read a tensor's values in float32, or in their own dtype if they are not quantized."""
    stored = np.memmap(tensor.path, np.uint8, "c", tensor.start, (tensor.nbytes,))  # numba refuses read-only arrays
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


def parts(tensor: gguf_file.Tensor, elements: int) -> Iterator[Tensor]:
    """Yield the values of a matrix in runs of rows with about ``elements`` elements each."""
    rows, columns = tensor.shape
    step, row_bytes = max(1, elements // columns), tensor.nbytes // rows
    for at in range(0, rows, step):
        count = min(step, rows - at)
        start, nbytes = tensor.start + at * row_bytes, count * row_bytes
        yield values(tensor._replace(shape=(count, columns), start=start, nbytes=nbytes))


def unpack_by_package(kind: int, blocks: Array, found: Array) -> None:
    """Unpack ``blocks [n, bytes]`` of a type into ``found [n, elements]`` with the gguf package."""
    import gguf

    step = max(1, CHUNK // found.shape[1])
    for at in range(0, len(blocks), step):
        values = gguf.dequantize(blocks[at : at + step].reshape(1, -1), gguf.GGMLQuantizationType(kind))
        found[at : at + step] = values.reshape(-1, found.shape[1])


def _unpack(loops: Any, name: str, blocks: Array, found: Array) -> None:
    """Unpack like ``unpack_by_package``, with compiled ``loops``."""
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
    elif name in ("MXFP4", "IQ4_NL"):
        from gguf import quants

        kind, at = (quants.MXFP4, 1) if name == "MXFP4" else (quants.IQ4_NL, 2)
        scales = kind.e8m0_to_fp32_half(blocks[:, 0]) if name == "MXFP4" else halves(0)
        loops.of_table(blocks, scales, np.float32(kind.kvalues), at, found)
    elif name == "Q8_0":
        loops.eight_bits(blocks, halves(0), found)
    elif name == "Q6_K":
        loops.six_k(blocks, halves(208), found)
    else:
        loops.four_or_five_k(blocks, halves(0), halves(2), name == "Q5_K", found)


def _processed(tensors: Sequence[gguf_file.Tensor], file: GgufFile, model: Any) -> dict[str, Unpacked]:
    """Return the weights that transformers' processors make, each from one tensor; experts are stacked here."""
    from transformers import modeling_gguf_pytorch_utils as theirs

    architecture = CHANGED_LIKE.get(file.architecture, file.architecture)
    processor = theirs.TENSOR_PROCESSORS.get(architecture, theirs.TensorProcessor)(config=model.config.to_dict())
    with fed(file):
        names = theirs.get_gguf_hf_weights_map(model, processor, file.architecture)

    def make(one: gguf_file.Tensor) -> Tensor:
        found = values(one)
        if one.name.endswith(SHARED_GATE):
            found = found.flatten()
        plain = found.float() if found.dtype == torch.bfloat16 else found  # numpy has no bfloat16
        done = processor.process(weights=plain.numpy(), name=one.name, parsed_parameters={"tensors": {}})
        return torch.from_numpy(done.weights)

    made, of_experts = {}, defaultdict(list)
    modules = {name.split(".")[2]: (name, each) for name, each in model.named_modules() if name.endswith(".experts")}
    for one in tensors:
        experts = EXPERTS.fullmatch(one.name)
        if experts and experts["layer"] in modules:
            projection = "down_proj" if experts["part"] == "down" else "gate_up_proj"
            of_experts[experts["layer"], projection + ("_bias" if experts["kind"] == "bias" else "")].append(one)
        else:
            short = one.name.removesuffix(".weight").removesuffix(".bias")
            made[names.get(one.name) or names.get(short) or one.name] = Unpacked(one.nbytes, partial(make, one))
    for (layer, name), found in of_experts.items():
        path, module = modules[layer]
        made[f"{path}.{name}"] = Unpacked(_nbytes(found), partial(_stack, sorted(found), module))
    return made


def _stack(tensors: Sequence[gguf_file.Tensor], experts: Any) -> Tensor:
    """Stack the matrices or biases of a layer's ``experts`` as transformers does, with gate and up in one."""
    (count, rows, *columns), kinds = tensors[0].shape, len(tensors)
    whole = torch.empty(count, kinds * rows, *columns)
    places = whole.chunk(kinds, 1) if experts.is_concatenated else [whole[:, at::kinds] for at in range(kinds)]
    for place, one in zip(places, tensors, strict=True):
        for expert, found in zip(place, parts(one._replace(shape=(count, math.prod(one.shape[1:]))), 1), strict=True):
            expert.copy_(found.view_as(expert))  # one at a time, because all of them would take another gigabyte
    return whole.transpose(1, 2) if columns and experts.is_transposed else whole


def _converted(tensors: Sequence[gguf_file.Tensor], transforms: Sequence[Any]) -> dict[str, Unpacked]:
    """Return the weights that transformers' conversions make from the tensors."""
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
