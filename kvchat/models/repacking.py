"""Pack weights again that transformers unpacks while reading, to about their original size: GGUF files, fp8, mxfp4.

kvchat cannot multiply them as they are stored. 4-bit weights become int4, or int8 if int4 cannot be multiplied; weights
of up to 8 bits become int8. For a CPU, each weight is packed as soon as it is unpacked. For a GPU, all are unpacked in
RAM and packed one Linear at a time, so that the GPU never holds the unpacked weights.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kvchat import libraries
from kvchat.errors import ModelError
from kvchat.models import stored_tensors
from kvchat.models.description import ModelDescription
from kvchat.models.quantize import packing as packings
from kvchat.models.quantize import quantization
from kvchat.models.quantize.packing import PACKINGS
from kvchat.models.quantize.rows import body
from kvchat.models.weights import AT_MOST, OF_UNPACKED

READING = "Loading weights"  # transformers' name of its progress bar


class Choice(NamedTuple):
    """The quantization to use, and a note for the user about it, or ""."""

    quantize: str
    note: str = ""


def is_unpacked(described: ModelDescription) -> bool:
    """Return True if transformers unpacks the weights while reading them."""
    return bool(described.location.gguf) or quantization.is_unpacked(described.config, described.device)


def needs_full_dequantization(described: ModelDescription, quantize: str) -> bool:
    """Return True if RAM must hold all weights unpacked before they go to the device."""
    if described.device.type == "cpu":
        return False
    return bool(described.location.gguf) or (is_unpacked(described) and quantize != "none")


def choose(quantize: str, described: ModelDescription) -> Choice:
    """Return the quantization for the setting ``quantize``.

    "auto" keeps about the size of the files if loading unpacks the weights and the packages for it are installed;
    else it is "none".

    Raises:
        ModelError: a file is damaged, or its weights cannot be packed that way.
    """
    if described.location.gguf and quantize in {*quantization.CHOICES} - {"auto", *OF_UNPACKED}:
        raise ModelError(
            f"{described.location.name} is a GGUF file.",
            f"Its weights cannot be quantized to {quantize}.",
            f"Use --quantize {', '.join(OF_UNPACKED[:-1])} or {OF_UNPACKED[-1]}, or omit it.",
        )
    if quantize != "auto":
        return Choice(quantize, _against(quantize, described))
    small = by_default(described)
    if small == "none":
        return Choice("none")
    if absent := libraries.lacking(small, described.device.type):
        packages = " and ".join(absent)
        return Choice(
            "none",
            f"With {packages} its weights would stay small, in {small}: {libraries.extra(libraries.EXTRA_OF[small])}",
        )
    method = quantization.own_method(described.config)
    note = f"The {method} weights are kept in {small}; --quantize none unpacks them."
    return Choice(small, "" if described.location.gguf else note)


def _against(quantize: str, described: ModelDescription) -> str:
    """Describe how the user's quantization compares with the default if that is closer to the files; else return ""."""
    small = by_default(described) if quantize in AT_MOST else "none"
    if small in ("none", quantize):
        return ""
    of_files = f"the files have {described.weights.layer_bits:.1f} bits per weight. --quantize auto uses {small}."
    if quantize == "int8":
        return f"int8 takes more memory than {small} but is no more accurate: {of_files}"
    return f"{quantize} is less accurate than the files and changes answers: {of_files}"


def by_default(described: ModelDescription) -> str:
    """Return the quantization that keeps weights about as small as their files if loading unpacks them; else "none".

    Raises:
        ModelError: a file is damaged.
    """
    if not is_unpacked(described):  # saves reading headers on the hub
        return "none"
    return described.weights.by_default(described.dtype_name, described.place)


@contextmanager
def read_unpacked(described: ModelDescription, config: Any) -> Iterator[None]:
    """Prepare transformers for the block, which reads weights and unpacks them.

    On a CPU each weight is packed by ``config``, unless that is None, as soon as it is unpacked. transformers accepts
    only the files' own quantizer, so packing is appended to the operations that make each weight.
    """
    with contextlib.ExitStack() as entered:
        if config is not None and described.device.type == "cpu" and not described.location.gguf:
            entered.enter_context(intercepted(_packing(described, config)))
        if quantization.own_method(described.config) == "fp8":
            entered.enter_context(partial_blocks())
        yield


def pack(
    model: Any, config: Any, described: ModelDescription, devices: Mapping[nn.Module, torch.device] | None = None
) -> None:
    """Quantize the Linears of ``model``, except its head, by transformers' ``config``.

    On a GPU each is first moved to its device, from ``devices`` or else the model's. On a CPU experts are packed too,
    and weights that are already packed stay.
    """
    mark(model, config)
    method, of_4_bits = config.quant_method, in_equal_steps(described)
    if method in PACKINGS:
        for linear in PACKINGS[method].linears(model):
            if linear.weight.is_floating_point():
                PACKINGS[method].pack(linear, of_4_bits=of_4_bits)
        for _, stack in packings.chosen_stacks(model, method):
            if stack.weight.is_floating_point():
                packings.pack_stack(stack.module, stack.name, stack.weight.detach(), method, of_4_bits=of_4_bits)
        return
    from torchao.quantization import quantize_

    for linear in body(model):
        device = (devices or {}).get(linear, described.device)
        quantize_(linear.to(device), config.quant_type, filter_fn=lambda module, name: True)


def mark(model: Any, config: Any) -> None:
    """Record in ``model`` that its weights are packed by ``config``, as transformers does after packing."""
    model.config.quantization_config = config
    model.config._is_quantized = True  # keeps Jamba's layers from using their Linears' weights directly


def _packing(described: ModelDescription, config: Any) -> Callable[[list[Any]], list[Any]]:
    """Return a change for ``intercepted`` that packs each weight by ``config`` as the last operation that makes it."""
    from kvchat.models.quantize.packed_quantizer import PackUnpacked

    packing = PackUnpacked(config.quant_method, of_4_bits=in_equal_steps(described))

    def packed(items: list[Any]) -> list[Any]:
        for _, made in items:
            made.quantization_operation = packing
        return items

    return packed


def in_equal_steps(described: ModelDescription) -> bool:
    """Return True if 32 4-bit weights may have values in equal steps, which int4 can recover in twice the time."""
    return bool(described.location.gguf) or quantization.own_method(described.config) == stored_tensors.COMPRESSED


@contextmanager
def partial_blocks() -> Iterator[None]:
    """Make transformers unpack fp8 weights in this block whose last blocks are smaller than the configured size."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    def dequantize(self: Any, stored: Tensor, scales: Tensor, output_dtype: torch.dtype | None = None) -> Any:
        sizes, blocks = stored.shape[-2:], self.hf_quantizer.quantization_config.weight_block_size or (1, 1)
        counts = [-(-size // block) for size, block in zip(sizes, blocks, strict=True)]
        whole = [count * block for count, block in zip(counts, blocks, strict=True)]
        if list(scales.shape[-2:]) != counts or list(sizes) == whole:
            return genuine(self, stored, scales, output_dtype)  # no partial blocks, or another layout
        filled = stored.new_zeros((*stored.shape[:-2], *whole))
        filled[..., : sizes[0], : sizes[1]] = stored
        return genuine(self, filled, scales, output_dtype)[..., : sizes[0], : sizes[1]].contiguous()

    genuine = Fp8Dequantize._dequantize_one
    Fp8Dequantize._dequantize_one = dequantize
    try:
        yield
    finally:
        Fp8Dequantize._dequantize_one = genuine


@contextmanager
def intercepted(change: Callable[[list[Any]], Iterable[Any]]) -> Iterator[None]:
    """Pass the weights that transformers' progress bar iterates over in this block through ``change``.

    A nested block changes them first.
    """
    from transformers.utils import logging

    def bar(factory: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if options.get("desc") == READING:
            items = change(list(args[0]))
            return outer(factory, (items, *args[1:]), options) if outer else items
        return outer(factory, args, options) if outer else factory(*args, **options)

    outer = logging.set_tqdm_hook(bar)
    try:
        yield
    finally:
        logging.set_tqdm_hook(outer)
