"""Describe a model before its weights are read: location, configuration, device, dtype and quantization.

On a CPU, dtype "auto" is the faster one for a token's largest product. Decoding takes as long as reading the weights,
and bfloat16 halves that if they come from memory. A small model would gain little and stays in float32.
"""

from __future__ import annotations

import contextlib
import math
import time
import warnings
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import cache, cached_property, partial
from logging import CRITICAL, getLogger
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvchat.errors import ModelError, UsageError, check_known
from kvchat.models import attention_hook, support, weights
from kvchat.models import gguf as ggufs
from kvchat.models.catalog import BFLOAT16_FROM
from kvchat.models.checkpoint import ModelLocation, locate, read_headers
from kvchat.models.gguf_file import GgufFile, read_model
from kvchat.models.hub import Progress
from kvchat.models.quantize import quantization
from kvchat.models.quantize.rows import linear as one_product
from kvchat.models.quantize.rows import without_onednn
from kvchat.models.stored_tensors import StoredTensor, has_bitsandbytes_flag, read_json
from kvchat.models.weights import Place, Weights
from kvchat.units import count, figure

LOUD = (
    "bitsandbytes",
    "torchao",
    "torch.utils._pytree",
)  # packages that log missing kernels and deprecations
BFLOAT16_CAPABILITY = (8, 0)  # Turing and older GPUs compute in float16 and emulate bfloat16 slowly
OVERFLOWING = "gemma3"  # prefix of the types of models that overflow float16 according to their makers
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
CPU = torch.device("cpu")
# A matrix below BFLOAT16_FROM may fit a cache and gain nothing; 17 MB gain a factor of 1.8 (AMD EPYC, AVX-512 BF16).
ROUNDS = 5
# bfloat16 must be clearly faster, so that the choice is stable: a saved conversation with K/V in the other dtype must
# be processed again.
CLEARLY = 0.85


@dataclass(frozen=True, eq=False)
class ModelDescription:
    """A model that kvchat can run, with transformers' class for its text, its device and its dtype.

    ``config`` belongs to the whole checkpoint; ``text_config`` is the one to build the class with. ``others`` are
    further GPUs that may hold layers.
    """

    location: ModelLocation
    config: Any
    model_class: Any
    text_config: Any
    device: torch.device
    dtype: torch.dtype
    others: tuple[torch.device, ...] = ()

    @cached_property
    def shapes(self) -> Any:
        """The model on the meta device, without memory for its weights."""
        return without_memory(self.model_class, self.text_config, self.dtype)

    @cached_property
    def gguf(self) -> GgufFile:
        return read_model(self.location.folder / self.location.gguf)

    @cached_property
    def gguf_weights(self) -> dict[str, ggufs.Unpacked]:
        """The weights of a model that is a GGUF file, by transformers' names."""
        return ggufs.weights(self.gguf, self.shapes)

    def check_tensors(self) -> None:
        """Compare the names of a GGUF file's tensors with the model's, in 0.05 s; or types of tensors with config.json.

        Raises:
            ModelError: the file lacks some, the model has no place for some, or none is packed as config.json says.
        """
        if self.location.gguf:
            found = ggufs.loading_info(self.gguf_weights, self.shapes)
            support.check_tensors(self.shapes, self.location.folder / self.location.gguf, found)
        elif has_bitsandbytes_flag(quantization.own_section(self.config)) and not self.weights.layer_bits:
            raise ModelError(  # unsloth and others left the section in merged models
                f"The weights of {self.location.name} are not quantized.",
                "But its config.json says that bitsandbytes packed them.",
                'Remove "quantization_config" from its config.json. --quantize nf4 packs the weights while loading.',
            )

    @cached_property
    def stored(self) -> list[StoredTensor]:
        """The tensors in safetensors files, from headers on the hub if the weights are not downloaded."""
        return read_headers(self.location)

    @cached_property
    def weights(self) -> Weights:
        """The weights, from the headers of their files."""
        if self.location.gguf:
            return weights.of_gguf(self.gguf)
        return weights.of_checkpoint(read_json(self.location.folder / "config.json"), self.stored)

    @property
    def dtype_name(self) -> str:
        """The dtype as in the settings."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def weakest(self) -> torch.device:
        """The device with the lowest compute capability."""
        return min((self.device, *self.others), key=_capability)

    @property
    def place(self) -> Place:
        """The device with its capability."""
        if self.device.type == "cpu":
            return Place("cpu")
        return Place("cuda", torch.cuda.get_device_capability(self.weakest))

    def loaded_bytes(self, quantize: str) -> int:
        """Return the bytes of the loaded weights."""
        return self.weights.loaded_bytes(quantize, self.dtype_name, self.place)

    def by_quantization(self) -> dict[str, int]:
        """Return the bytes of the loaded weights by quantization; a checkpoint that stays packed has only its own.

        Raises:
            ModelError: a file is missing or damaged.
        """
        return self.weights.by_quantization(self.dtype_name, self.place)

    def activations(self, tokens: int) -> int:
        """Return the bytes of the outputs of one layer's Linears for this number of tokens."""
        layers: int = self.shapes.config.get_text_config(decoder=True).num_hidden_layers
        modules = self.shapes.get_decoder().modules()
        widths = sum(module.out_features for module in modules if type(module) is nn.Linear) // layers
        return tokens * widths * self.dtype.itemsize


def without_memory(model_class: Any, config: Any, dtype: torch.dtype) -> Any:
    """Build the model on torch's meta device, where tensors have shapes but no memory."""
    attention_hook.register()
    own = deepcopy(config)  # transformers writes the experts' implementation into it and reads that on loading
    with torch.device("meta"), support.WithoutMemory():
        # The only one of transformers' implementations of experts that reads no tensor values.
        return (
            model_class._from_config(
                own, dtype=dtype, attn_implementation=attention_hook.NAME, experts_implementation="batched_mm"
            )
            .to("meta")
            .eval()
        )


def describe(name: str, device: str, dtype: str, progress: Progress, gpus: int = 1) -> ModelDescription:
    """Locate the model ``name`` and read its configuration, without downloading weights.

    Raises:
        ModelError: it cannot be found or read, or kvchat cannot run it.
        UsageError: there is no such device or dtype, or there are fewer than ``gpus`` GPUs.
    """
    on = resolve_device(device)
    others = resolve_others(on, gpus)
    location = locate(name, progress)
    support.import_transformers()
    with support.refuse_unreadable(location.name, "its configuration"):
        config = _read_config(location)
        _complete_yarn(config, is_extended=bool(location.gguf))
        support.check_quantization(config, location.name)
        model_class, text_config = support.model_class(config)
        resolved = resolve_dtype(dtype, config, min((on, *others), key=_capability))
    return ModelDescription(location, config, model_class, text_config, on, resolved, others)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' logs and progress bars in this block, because the application draws the screen."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    loggers = [getLogger(name) for name in LOUD]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(CRITICAL)
    bars = logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
        for logger, before in zip(loggers, levels, strict=True):
            logger.setLevel(before)
        if bars:
            logging.enable_progress_bar()


def _read_config(location: ModelLocation) -> Any:
    from transformers.models.auto.configuration_auto import AutoConfig

    if location.gguf:
        return ggufs.of_file(location.folder / location.gguf, location.name)
    read_json(location.folder / "config.json")  # gives a better message if the file is damaged
    with support.refuse_unreadable(location.name, "its config.json"):
        return AutoConfig.from_pretrained(location.folder, local_files_only=True, trust_remote_code=False)


def _complete_yarn(config: Any, is_extended: bool) -> None:
    """Apply the parts of YaRN's scaling that transformers ignores, as vLLM does.

    ``attn_factor`` multiplies YaRN's own attention factor: it is 0.878 for DeepSeek-R1-0528-Qwen3-8B, which makes the
    attention scale 1. The context becomes the original one times the factor, because Qwen's model cards say to add the
    scaling, but not to change the context. A GGUF file's context already ``is_extended``.
    """
    text = config.get_text_config(decoder=True)
    rope = getattr(text, "rope_parameters", None) or {}
    if rope.get("rope_type") != "yarn":
        return
    if attention := rope.pop("attn_factor", None):
        rope.setdefault("attention_factor", attention * (0.1 * math.log(rope["factor"]) + 1))
    if not is_extended and rope["factor"]:
        extended = int(rope["factor"] * rope["original_max_position_embeddings"])
        text.max_position_embeddings = max(text.max_position_embeddings, extended)


def resolve_device(device: str) -> torch.device:
    """Return the torch device for a setting; "auto" is CUDA if there is a GPU.

    Raises:
        UsageError: there is no such device.
    """
    name = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    try:
        resolved = torch.device(name)
    except (RuntimeError, TypeError):
        raise UsageError(f'There is no device "{device}".', "", "Use auto, cpu, cuda or cuda:0.") from None
    if resolved.type not in ("cpu", "cuda"):
        raise UsageError(f'kvchat does not run on "{device}".', "", "Use auto, cpu, cuda or cuda:0.")
    if resolved.type == "cpu":
        return torch.device("cpu")
    index, there = resolved.index or 0, torch.cuda.device_count()
    if index < there:
        return torch.device("cuda", index)
    if torch.cuda.is_available():
        why, hint = f"This machine has {count(there, 'GPU')}.", "Use one of these, or auto."
    else:
        why = f"{'torch was built without CUDA' if torch.version.cuda is None else 'torch finds no CUDA GPU'}."
        hint = "Use auto or cpu."
    raise UsageError(f'There is no device "{device}".', why, hint)


def resolve_others(first: torch.device, gpus: int) -> tuple[torch.device, ...]:
    """Return the GPUs besides ``first`` that may hold layers, in CUDA's order; ``gpus`` includes ``first``.

    Raises:
        UsageError: there are fewer.
    """
    if gpus == 1:
        return ()
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if first.type == "cpu" or gpus > there:
        why = "The model runs on the CPU." if there and first.type == "cpu" else f"torch sees {count(there, 'GPU')}."
        most = f"Use --gpus {there} or fewer" if there > 1 else "Omit --gpus"
        raise UsageError(f"{gpus} GPUs are not available.", why, f"{most}; kvchat doctor lists them.")
    numbers = [number for number in range(there) if number != first.index]
    return tuple(torch.device("cuda", number) for number in numbers[: gpus - 1])


def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def overflows(name: str) -> UsageError:
    """Return the error for float16 with a model whose activations overflow it."""
    return UsageError(
        f"{name} does not run in float16.",
        "Its activations exceed 65,504, the largest number in float16.",
        "Use --dtype bfloat16, float32 or auto.",
    )


def resolve_dtype(dtype: str, config: Any, device: torch.device) -> torch.dtype:
    """Return the torch dtype for a setting; "auto" is the faster one on a CPU, and that of ``config`` on CUDA.

    On a GPU without bfloat16 arithmetic, "auto" is float16 instead of bfloat16.

    Raises:
        UsageError: there is no such dtype, or the model's numbers are too large for it.
    """
    if dtype == "float16" and _overflows(config):
        raise overflows(config.model_type)
    if dtype in DTYPES:
        return DTYPES[dtype]
    check_known(dtype, ["auto", *DTYPES], "dtype")
    own = config.get_text_config(decoder=True).dtype or config.dtype
    if device.type == "cpu":
        return auto_dtype(own, config)
    if own == torch.bfloat16 and torch.cuda.get_device_capability(device) < BFLOAT16_CAPABILITY:
        own = torch.float16
    if own == torch.float16 and _overflows(config):
        return torch.float32
    return own if own in DTYPES.values() else torch.float32


def _overflows(config: Any) -> bool:
    return str(config.get_text_config(decoder=True).model_type).startswith(OVERFLOWING)


def auto_dtype(own: torch.dtype | None, config: Any) -> torch.dtype:
    """Return float32, or the checkpoint's ``own`` dtype if that is bfloat16 and clearly faster, measured once per size.

    Weights that stay packed need no measurement: some can be multiplied only in ``own``, others run in float32.
    """
    rows, columns = _largest(config)
    if only := quantization.own_dtype(config, CPU):
        return only
    packed = quantization.own_method(config) and not quantization.is_unpacked(config, CPU)
    if packed or own != torch.bfloat16 or 4 * rows * columns < BFLOAT16_FROM:
        return torch.float32
    exact, half = milliseconds(rows, columns)
    return torch.bfloat16 if half < CLEARLY * exact else torch.float32


def note(dtype: str, chosen: torch.dtype, config: Any, packs: bool = False) -> str:
    """Describe the dtype that "auto" chose; return "" for other settings and for float32.

    ``packs``: loading packs the weights, so the measured products do not apply.
    """
    if dtype != "auto" or chosen != torch.bfloat16 or quantization.own_dtype(config, CPU):
        return ""
    if packs:
        return "It runs in bfloat16, where K/V take half the memory of float32 (override: model.dtype = float32)."
    exact, half = milliseconds(*_largest(config))
    return (
        f"It runs in bfloat16: its largest matrix takes {figure(half, 'ms', 1)} per token here, in float32 "
        f"{figure(exact, 'ms', 1)} (override: model.dtype = float32)."
    )


@cache
def milliseconds(rows: int, columns: int) -> tuple[float, float]:
    """Return the shortest time of one token through a matrix ``[rows, columns]``, in float32 and in bfloat16."""
    weight, x = torch.ones(rows, columns), torch.ones(1, columns)
    half, half_x = weight.to(torch.bfloat16), x.to(torch.bfloat16)
    with torch.inference_mode(), without_onednn(torch.bfloat16, CPU):
        times = [
            (_timed(partial(one_product, x, weight)), _timed(partial(F.linear, half_x, half))) for _ in range(ROUNDS)
        ]
    return min(exact for exact, _ in times), min(half for _, half in times)


def _timed(product: Callable[[], Tensor]) -> float:
    began = time.perf_counter()
    product()
    return 1000 * (time.perf_counter() - began)


def _largest(config: Any) -> tuple[int, int]:
    """Return rows and columns of the MLP's first matrix; 0 if the configuration does not say."""
    text = config.get_text_config(decoder=True)
    return getattr(text, "intermediate_size", None) or 0, getattr(text, "hidden_size", None) or 0
