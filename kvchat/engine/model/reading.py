"""Reads a model's weights by transformers, and packs those that only then can be."""

from __future__ import annotations

import contextlib
import io
from importlib.util import find_spec
from typing import Any

from kvchat.engine.memory_errors import is_out_of_memory
from kvchat.engine.model import advised, attention_hook, quantization, repacking, supported
from kvchat.engine.model.checkpoint import Checkpoint
from kvchat.engine.model.description import ModelDescription
from kvchat.engine.model.quantization import Quantization


def read(described: ModelDescription, checkpoint: Checkpoint, quantized: Quantization) -> Any:
    """Read a model to the CPU: transformers reads to a GPU only with accelerate, which kvchat needs for nothing else.

    Quantized weights are read to their device: most cannot be moved, and what cannot be needs accelerate anyway.

    Raises:
        ModelError: transformers refuses them, or a package is missing.
    """
    attention_hook.register()
    quantization.import_package(quantized)
    quantization.unpack_while_reading(described.text_config, described.device)
    placement = {"device_map": {"": described.device}} if _is_in_place(described, quantized) else {}
    packing = quantized.options.get("quantization_config")
    unpacked = repacking.is_unpacked(described)
    meanwhile = repacking.read_unpacked(described, packing) if unpacked else contextlib.nullcontext()
    if packing is not None and hasattr(packing, "of_4_bits"):
        packing.of_4_bits = repacking.in_equal_steps(described)
    chosen = {} if _is_packed_later(described, quantized) else quantized.options
    source: dict[str, Any] = {"pretrained_model_name_or_path": checkpoint.folder}
    if checkpoint.gguf:
        source = {"pretrained_model_name_or_path": None, "state_dict": described.gguf_weights}
    try:
        # What packages of quantized weights print has no switch.
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()), meanwhile:
            model, info = described.model_class.from_pretrained(
                **source,
                config=described.text_config,
                dtype=described.dtype,
                attn_implementation=attention_hook.NAME,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
                **placement,
                **chosen,
            )
    except ImportError as error:
        raise quantization.missing(checkpoint.name, quantized, error) from error
    except Exception as error:  # whatever an untried config leads to
        if is_out_of_memory(error):
            raise
        raise supported.unreadable(checkpoint.name, "its weights", error) from error
    supported.check_tensors(model, checkpoint.folder, info)
    if checkpoint.gguf:
        advised.take_from_gguf(described.gguf.values, model.generation_config)
    if checkpoint.gguf and not chosen:
        model.config.quantization_config = {"quant_method": "gguf"}  # what was unpacked, as of other checkpoints
    return model


def finished(model: Any, described: ModelDescription, quantized: Quantization) -> Any:
    """The model as it multiplies, on its device, with what is packed or unpacked only now."""
    device = described.device
    if not described.location.gguf and quantization.own_method(described.config):
        quantization.finish_loading(model, described.config, described.dtype)
    if _is_packed_later(described, quantized):
        repacking.pack(model, quantized.options["quantization_config"], described)
    if device.type == "cpu":
        quantization.multiply_on_cpu(model)
    return model.eval() if _is_in_place(described, quantized) else model.eval().to(device)


def _is_in_place(described: ModelDescription, quantized: Quantization) -> bool:
    """True if weights are read to their device at once."""
    return bool(quantized.method) and not _is_packed_later(described, quantized) and find_spec("accelerate") is not None


def _is_packed_later(described: ModelDescription, quantized: Quantization) -> bool:
    """True if weights are packed once they are unpacked."""
    if described.location.gguf and described.device.type == "cpu":
        return False  # each is packed as soon as it is unpacked
    return repacking.is_unpacked(described) and bool(quantized.options)
