"""Quantized weights: int8 and int4 by torchao on a GPU, nf4 by bitsandbytes, and checkpoints quantized by others.

transformers and its quantizers do the work; kvchat chooses their configuration and names missing packages. On a CPU,
int8 and int4 are kvchat's own (``int8_rows``, ``int4_rows``) and need no package.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from logging import ERROR, getLogger
from typing import Any, get_args

import torch
from torch import Tensor, nn

from kvchat import libraries
from kvchat.errors import ModelError, UsageError, check_known
from kvchat.libraries import import_bitsandbytes
from kvchat.models import stored_tensors
from kvchat.models.quantize import int4_rows, int8_rows
from kvchat.models.quantize.rows import ROWS, all_rows, body, packs_head
from kvchat.models.weights import INT4_CAPABILITY
from kvchat.protocol.messages import Quantize

PLAIN = (torch.float32, torch.float16, torch.bfloat16)
CHOICES: tuple[str, ...] = get_args(Quantize)
BITS = {"int8": 8, "int4": 4, "nf4": 4}
PACKAGES = {"int8": "torchao", "int4": "torchao", "nf4": "bitsandbytes"}
PACKED_HERE = ("int8", "int4")  # on a CPU
WARNS_AT_EVERY_PRODUCT = "bitsandbytes.autograd._functions"  # for 8 bits in dtypes other than float16
# Extras whose packages read checkpoints of a method.
EXTRA_OF_METHOD = {"bitsandbytes": "bnb", "torchao": "ao", "gptq": "gptq", "awq": "gptq"}


@dataclass(frozen=True)
class Quantization:
    """The quantization to load weights in: transformers' name of the method ("" for none) and its loading options."""

    method: str = ""
    options: dict[str, Any] = field(default_factory=dict)


def resolve(quantize: str, config: Any, dtype: torch.dtype, device: torch.device) -> Quantization:
    """Return the quantization for a choice (one of ``CHOICES``) and a checkpoint's ``config``, to compute in ``dtype``.

    "auto" means "none" here: ``repacking.choose`` has already decided about weights that transformers unpacks.

    Raises:
        UsageError: there is no such choice, or not for this device and dtype, or a package is not installed.
        ModelError: the checkpoint is already quantized.
    """
    check(quantize, config, device)
    if quantize in ("auto", "none"):
        _check_dtype(config, dtype, device)
        return Quantization(own_method(config))
    libraries.check(quantize, device.type)
    method = quantize if quantize in PACKED_HERE and device.type == "cpu" else PACKAGES[quantize]
    return Quantization(method, {"quantization_config": _chosen(quantize, dtype, device)})


def check(quantize: str, config: Any, device: torch.device) -> None:
    """Refuse an unknown choice, or one that a checkpoint with this ``config`` does not support on ``device``.

    Raises:
        UsageError: there is no such choice; ModelError: the checkpoint is already quantized.
    """
    check_known(quantize, CHOICES, "quantization")
    own = own_method(config)
    packs_again = quantize in ("int8", "int4") and (own == "gguf" or is_unpacked(config, device))
    if own and quantize not in ("auto", "none") and not packs_again:
        raise ModelError(
            f"The model is already quantized by {own}.",
            f"Its weights cannot be quantized to {quantize} again.",
            f"Omit --quantize, or use --quantize {quantize} with the unquantized model.",
        )


def import_package(quantized: Quantization) -> None:
    """Import the package for quantized weights, configured for kvchat, before transformers does."""
    if quantized.method == "bitsandbytes":
        getLogger(WARNS_AT_EVERY_PRODUCT).setLevel(ERROR)
        with suppress(ImportError):  # transformers' own error names the package
            import_bitsandbytes()


def missing(name: str, quantized: Quantization, error: ImportError) -> ModelError:
    """Return the error for a model that needs a package which is not installed, as transformers' message says."""
    message = " ".join(str(error).split())[:300]
    found = next((extra for method, extra in EXTRA_OF_METHOD.items() if method in quantized.method), "")
    named = libraries.EXTRAS[found] if found else _named_in(message)
    hint = f"Run: {libraries.command(*named)}" if named else "Install the package, then try again."
    return ModelError(f"{name} needs a package that is not installed.", f"transformers says: {message}", hint)


def _named_in(message: str) -> Sequence[str]:
    """Return the packages that transformers' ``message`` says to install."""
    command = re.search(r"pip install ([\w.,\[\]<>=~! -]+)", message.replace("`", "").replace("'", ""))
    options = ("-U", "--upgrade")
    return [word for word in (command[1] if command else "").rstrip(".").split() if word not in options]


def weight_bytes(model: Any) -> int:
    """Return the bytes of a model's weights on its device, including quantization constants."""
    return sum(tensor.nbytes for tensor in _tensors(model))


def weights(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the named tensors in memory that make up a model's weights, including quantization constants."""
    for name, parameter in model.named_parameters():
        state = getattr(parameter, "quant_state", None)  # bitsandbytes' constants
        constants = [value for value in vars(state).values() if isinstance(value, Tensor)] if state else []
        yield from ((name, tensor) for tensor in (*_parts(parameter.data), *constants))
    for name, rows in all_rows(model):
        yield name, rows.scales
    for name, module in model.named_modules():
        scales = getattr(getattr(module, "state", None), "SCB", None)  # bitsandbytes', of 8 bits
        yield from ((name, scales),) if isinstance(scales, Tensor) else ()


def _parts(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the tensors that make up a weight: torchao's wrap several and report the unpacked size."""
    if type(tensor) is Tensor or not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from _parts(getattr(tensor, name))


def is_packed(model: Any) -> bool:
    """Return True if some weights are in a form that only their quantizer can multiply."""
    return bool(own_method(model.config)) and any(tensor.dtype not in PLAIN for tensor in _tensors(model))


def notes(model: Any) -> list[str]:
    """Return notes for the user about a loaded model whose checkpoint was quantized."""
    method, dtype = own_method(model.config), str(model.dtype).removeprefix("torch.")
    unpacked = method not in ("", *PACKED_HERE) and not is_packed(model)
    return [f"The {method} weights were unpacked to {dtype}."] if unpacked else []


def describe(model: Any) -> str:
    """Return the name of a loaded model's quantization; "" if its weights are not packed."""
    return kind_of(model.config) if is_packed(model) else ""


def kind_of(config: Any) -> str:
    """Return the quantization of a checkpoint, by its name in ``CHOICES`` or else transformers'."""
    return stored_tensors.kind_of(own_section(config))


def own_method(config: Any) -> str:
    """Return transformers' name of a checkpoint's quantization method; "" if it is not quantized."""
    return stored_tensors.method_of(own_section(config))


def is_unpacked(config: Any, device: torch.device) -> bool:
    """Return True if transformers unpacks a checkpoint's weights while it reads them; see ``stored_tensors``."""
    if not (method := own_method(config)):
        return False
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    return stored_tensors.is_unpacked(method, capability)


def own_dtype(config: Any, device: torch.device) -> torch.dtype | None:
    """Return the only dtype in which a checkpoint's packed weights can be multiplied; None if others work too.

    torchao's weights need the dtype that they were packed from, except 8 bits on a CPU, which ``int8_rows`` multiplies.
    """
    if own_method(config) != "torchao" or (device.type == "cpu" and kind_of(config) == "int8"):
        return None
    dtype: torch.dtype | None = config.get_text_config(decoder=True).dtype or config.dtype
    return dtype


def unpack_while_reading(config: Any, device: torch.device) -> None:
    """Make transformers unpack weights while reading if ``device`` cannot multiply them packed.

    Otherwise it would unpack compressed-tensors later, in a hook that runs only in a forward with the head, and leave
    other formats packed even for the CPU if the machine has a GPU that can multiply them.
    """
    if is_unpacked(config, device):
        config.quantization_config["dequantize"] = True


def finish_loading(model: Any, config: Any, dtype: torch.dtype) -> None:
    """Convert unpacked weights of a quantized checkpoint to ``dtype``, and restore the quantization in its ``config``.

    transformers leaves such weights in the files' dtypes, unpacks fp8 always to bfloat16, and then drops the
    quantization from the configuration.
    """
    if not own_method(model.config):
        model.config.quantization_config = config.quantization_config
    exact = {*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ())}
    for where, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        packed = any(type(each) is not nn.Parameter or each.dtype not in PLAIN for each in own.values())
        for name, parameter in own.items():
            if not packed and exact.isdisjoint([*where.split("."), name]):
                parameter.data = parameter.data.to(dtype)


def multiply_on_cpu(model: Any) -> None:
    """Make ``int8_rows`` multiply int8 weights on a CPU, and pack the head if the layers are; nf4 keeps the dtype.

    bitsandbytes would round nf4 to bfloat16 on CPUs that multiply it, and fail if rows are not a multiple of 32.
    """
    if own_method(model.config) == "bitsandbytes":
        for module in model.modules():
            if hasattr(module, "support_avx512bf16_for_cpu"):
                module.support_avx512bf16_for_cpu = False
    kind = describe(model)
    multiply_int8(model)
    head = model.get_output_embeddings()
    packed_here = kind == "int8" or own_method(model.config) == "int4"
    is_plain = type(head) is nn.Linear and type(head.weight) is nn.Parameter and ROWS not in head.__dict__
    if packed_here and is_plain and packs_head(kind):
        int8_rows.pack(head)


def multiply_on_gpu(model: Any) -> None:
    """Make ``int8_rows`` and ``int4_rows`` multiply torchao's weights on a GPU.

    bitsandbytes multiplies nf4. Merging its projections would save three launches per layer: by calculation 0.2 of 17.5
    ms per token for an 8B model on an RTX 3060.
    """
    multiply_int8(model)
    for linear in body(model):
        if hasattr(linear.weight, "scale_and_zero"):
            int4_rows.install_tiles(linear)


def multiply_int8(model: Any) -> None:
    """Make ``int8_rows`` multiply torchao's 8-bit weights."""
    for linear in body(model) if describe(model) == "int8" else ():
        weight: Any = linear.weight
        if hasattr(weight, "qdata") and weight.scale.numel() == len(weight.qdata):
            int8_rows.install(linear, weight.qdata, weight.scale.flatten().float())


def own_section(config: Any) -> dict[str, Any]:
    """Return the ``quantization_config`` of a configuration; empty if it has none."""
    own: Any = getattr(config, "quantization_config", None) or {}
    return own if isinstance(own, dict) else dict(own.to_dict())


def _check_dtype(config: Any, dtype: torch.dtype, device: torch.device) -> None:
    only = own_dtype(config, device)
    if only not in (None, dtype):
        name, given = (str(each).removeprefix("torch.") for each in (only, dtype))
        raise UsageError(
            f"The model's weights run only in {name}.",
            f"Given: {given}. torchao packed them for that dtype.",
            f"Use --dtype {name} or auto.",
        )


def _chosen(quantize: str, dtype: torch.dtype, device: torch.device) -> Any:
    if quantize == "nf4":
        from transformers import BitsAndBytesConfig

        return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)
    if device.type == "cpu":
        from kvchat.models.quantize.packed_quantizer import PackedConfig

        return PackedConfig(quantize)
    if quantize == "int8":
        from torchao.quantization import Int8WeightOnlyConfig
        from transformers import TorchAoConfig

        return TorchAoConfig(Int8WeightOnlyConfig())
    if (capability := torch.cuda.get_device_capability(device)) < INT4_CAPABILITY:
        raise UsageError(
            "int4 weights need a GPU of compute capability 8.0 or more.",
            f"{device} has {capability[0]}.{capability[1]}, whose tensor cores have no bfloat16.",
            "Use int8 or nf4.",
        )
    if dtype != torch.bfloat16:
        raise UsageError(
            "int4 weights need bfloat16 on a GPU.",
            f"Given: {str(dtype).removeprefix('torch.')}. torchao supports int4 in no other dtype.",
            "Use --dtype bfloat16, or int8.",
        )
    from torchao.quantization import Int4WeightOnlyConfig
    from transformers import TorchAoConfig

    return TorchAoConfig(Int4WeightOnlyConfig(group_size=128, int4_packing_format="tile_packed_to_4d"))


def _tensors(model: Any) -> Iterator[Tensor]:
    yield from (tensor for _, tensor in weights(model))
    for buffer in model.buffers():
        yield from _parts(buffer)
