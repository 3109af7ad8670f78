"""Refuse models that kvchat cannot run, by configuration, class and tensors; import the class that runs a checkpoint.

Current repositories of Gemma, Qwen, Mistral and others are ``...ForConditionalGeneration``. If transformers has a
causal language model that reads such a checkpoint's text tensors, kvchat uses that. Otherwise it uses the full class
without the modules that text does not pass through: they are removed while the model is on the meta device, and
transformers reads only the remaining tensors from the files.
"""

from __future__ import annotations

import importlib
import inspect
import operator
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from kvchat.errors import KvchatError, ModelError
from kvchat.libraries import Later
from kvchat.models.gguf_file import LAYER
from kvchat.models.quantize.quantization import Quantization, missing, own_method, own_section
from kvchat.models.recurrent import (
    ATTENTION,
    BOTH,
    RECURRENT,
    RecurrentState,
    attending_layers,
    is_recurrent,
    layer_types,
)
from kvchat.models.stored_tensors import COMPRESSED, has_bitsandbytes_flag
from kvchat.models.weights import MASKS
from kvchat.units import count

IN_LAYERS = "It keeps recurrent state in its layers, not in a cache"
KNOWN_LAYERS = ATTENTION | RECURRENT | BOTH | {"mlp", "moe"}
# Tensors of compressed-tensors' checkpoints that quantize activations and K/V, not weights.
OF_ACTIVATIONS = (
    *(".input_scale", ".input_global_scale", ".input_zero_point", ".output_scale"),
    *(".q_scale", ".k_scale", ".v_scale"),
)
WEIGHT_KEYS = ("num_bits", "type", "strategy", "group_size", "symmetric")  # that distinguish schemes
DRAWING = ("normal_", "uniform_")  # torch's functions that initialize weights
VISION_EXPERTS = "vision_moe"  # in the layers of ERNIE 4.5 VL, besides the experts for text


def model_class(config: Any) -> tuple[Any, Any]:
    """Return transformers' class for the text of a checkpoint's ``config``, and the configuration to build it with.

    Raises:
        ModelError: there is none, or kvchat cannot run it.
    """
    for name in getattr(config, "architectures", None) or ():
        if "Classification" in name:  # transformers would read it as a language model of the same type
            raise ModelError(
                f"{name} is not a chat model.",
                "Its config.json names a classifier, which generates no text.",
                "Choose a chat model.",
            )
    found = find(config)
    if found is None:
        raise ModelError(
            f'"{config.model_type}" is not a chat model.',
            "It is not a causal language model.",
            "Choose a chat model.",
        )
    chosen, its_config = found
    reason = refusal(its_config, chosen)
    if reason:
        raise ModelError(f"kvchat cannot run {chosen.__name__}.", f"{reason}.", "Choose another model.")
    return chosen, its_config


def refusal(config: Any, model_class: Any) -> str | None:
    """Return why kvchat refuses a model of transformers' ``config`` and ``model_class``; None if it does not."""
    text = config.get_text_config(decoder=True)
    if config.is_encoder_decoder:
        return "It is an encoder-decoder; kvchat runs only decoders"
    if not model_class._can_set_attn_implementation():
        return "transformers does not let its attention be replaced"
    if needed := _needed_besides_text(model_class):
        return f"transformers' code for it cannot read text alone: it needs {' and '.join(needed)}"
    if not hasattr(text, "num_hidden_layers"):  # in blt and pi0 each part has its own layers
        return "Its configuration does not say how many layers it has"
    if model_class._is_stateful and not is_recurrent(config):
        return "It keeps a recurrent state of its own kind, which cannot be rolled back to an earlier token"
    if hasattr(model_class, "_setup_cache"):  # allocates the state in the layers
        return IN_LAYERS
    if others := sorted(set(layer_types(config)) - KNOWN_LAYERS):
        return f"It has layers of the kind {', '.join(others)}; kvchat knows full, sliding and linear attention"
    if not attending_layers(config):
        return "None of its layers attends, so there are no K/V to store"
    if not getattr(text, "max_position_embeddings", None):
        return "Its configuration does not say how many tokens it can read"
    return None


def _needed_besides_text(model_class: Any) -> list[str]:
    """Return the inputs other than tokens that a forward of the class requires, such as BLIP-2's images."""
    inputs = list(inspect.signature(model_class.forward).parameters.values())[1:]
    needed = (each for each in inputs if each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD)
    return [each.name for each in needed if each.name != "input_ids"]


def check_quantization(config: Any, name: str) -> None:
    """Refuse a checkpoint that transformers would read as unquantized or as quantized differently.

    Raises:
        ModelError: its configuration names no method, an unknown one, or several schemes.
    """
    from transformers.utils.quantization_config import QuantizationMethod

    of_mlx = getattr(config, "quantization", None)  # the section's name in older models of MLX
    section, method = own_section(config) or (of_mlx if isinstance(of_mlx, dict) else {}), own_method(config)
    if method == COMPRESSED and _has_several_schemes(section):
        raise ModelError(
            f"{name} is quantized in several ways at once.",
            "transformers would unpack all of its layers in one of them.",
            "Use a GGUF file of it, or the unquantized model with --quantize int4 or int8.",
        )
    known = {str(one.value) for one in QuantizationMethod}
    if not section or has_bitsandbytes_flag(section) or method in known:
        return
    raise ModelError(
        f"{name} is quantized in a way that transformers cannot read.",
        f"Its config.json names the method {method}." if method else "Its config.json names no method, as MLX does.",
        "Use a GGUF file of it, or the unquantized model with --quantize int4 or int8.",
    )


def _has_several_schemes(section: dict[str, Any]) -> bool:
    """Return True if layers or experts have several schemes: transformers applies one to all layers, one to experts."""
    schemes: dict[bool, set[str]] = {True: set(), False: set()}
    with suppress(AttributeError, KeyError, TypeError):
        for group in section["config_groups"].values():
            of_experts = any(target.startswith("re:") and "experts" in target for target in group["targets"])
            weights = group["weights"]
            schemes[of_experts].add(str([group.get("format"), *(weights.get(key) for key in WEIGHT_KEYS)]))
    return any(len(found) > 1 for found in schemes.values())


def check_tensors(model: Any, source: Path, loading_info: dict[str, Any]) -> None:
    """Refuse a model whose tensors do not match its folder or GGUF file; transformers would load it anyway.

    transformers fills tensors that are missing or have another shape in the files with random numbers, and ignores
    tensors that the model lacks.

    Raises:
        ModelError: tensors are missing from the files or have other shapes, or decoder tensors are ignored.
    """
    name = type(model).__name__
    wrong, hint = (
        "do not belong to its config.json",
        "Download the model again; config.json must belong to these weights.",
    )
    if missing := sorted(loading_info["missing_keys"]):
        wrong, hint = "are incomplete", "Download the model again."
        head = model.get_output_embeddings()
        if missing == [f"{part}.weight" for part, module in model.named_modules() if module is head]:
            hint = 'If its head shares the weights of the embeddings, set "tie_word_embeddings": true in config.json.'
        detail = f"They lack {count(len(missing), 'tensor')} that the model needs, such as {missing[0]}."
    elif unlike := sorted(loading_info.get("mismatched_keys", ())):
        key, *shapes = unlike[0]
        stored, expected = ("x".join(map(str, shape)) for shape in shapes)
        detail = f"{key} is {stored} in the files, and {expected} in {name}."
    elif ignored := sorted(_ignored(model, loading_info["unexpected_keys"])):
        detail = f"{name} has no place for {count(len(ignored), 'tensor')}, such as {ignored[0]}."
    else:
        return
    if source.is_file():  # a GGUF file; its table of tensors was complete
        hint = "Use the model's safetensors, or a newer transformers."
        raise ModelError(f"transformers cannot read {source} as {name}.", detail, hint)
    raise ModelError(f"The weights in {source} {wrong}.", detail, hint)


@contextmanager
def keeping_state(model: Any, state: RecurrentState) -> Iterator[None]:
    """Check that a forward of ``model`` in the block leaves its recurrent state in ``state``, where it can be copied.

    Raises:
        ModelError: it does not, or transformers refuses.
    """
    try:
        yield
    except ValueError as error:
        raise cannot_run(model, f"transformers says: {error}") from error
    if not state.is_kept:
        raise cannot_run(model, f"{IN_LAYERS}.")


def cannot_run(model: Any, reason: str) -> ModelError:
    """Return the error for a model whose forward kvchat cannot use."""
    return ModelError(f"kvchat cannot run {type(model).__name__}.", reason, "Choose another model.")


@contextmanager
def refuse_unreadable(name: str, what: str) -> Iterator[None]:
    """Refuse the model ``name`` for whatever transformers raises while it reads ``what`` in this block."""
    try:
        yield
    except KvchatError:
        raise
    except Exception as error:
        raise unreadable(name, what, error) from error


def unreadable(name: str, what: str, error: Exception) -> ModelError:
    """Return the error for a model after transformers raised ``error`` while reading ``what``."""
    if "trust_remote_code" in str(error):
        return ModelError(
            f"{name} cannot be loaded.",
            f"According to {what} it needs its own Python code, and kvchat never runs code that comes with a model.",
            "Choose a model of an architecture that transformers includes.",
        )
    if isinstance(error, ImportError):
        return missing(name, Quantization(), error)
    first = re.sub(r":\s*\n\s*", ": ", str(error).strip()).split("\n", 1)[0][:300] or type(error).__name__
    return ModelError(
        f"{name} cannot be loaded.",
        f"transformers refuses {what}: {first}",
        "Choose another model, or a newer transformers.",
    )


def damaged(name: str) -> ModelError:
    """Return the error for weights with which a model computes no finite logits."""
    return ModelError(
        f"The weights of {name} are damaged.",
        "With them the model's logits are NaN or infinite.",
        "Download the model again.",
    )


def _ignored(model: Any, unexpected: Iterable[str]) -> Iterator[str]:
    """Yield the ``unexpected`` tensors that the decoder would have used.

    Encoders and other heads may be ignored, and so may layers that draft further tokens (they merge hidden state and
    embedding with an ``eh_proj``) and causal masks, which older transformers stored. Quantizers store their own tensors
    in the decoder's layers; transformers does not record that weights it unpacked were quantized.
    """
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    prefix = _layer_prefix(model, layers)
    layer_of = {key: _layer_of(key, prefix) for key in unexpected}
    drafting = {layer for key, layer in layer_of.items() if key.endswith(".eh_proj.weight")}
    owners = {name for name, module in model.named_modules() if [*module.parameters(recurse=False)]}
    known = dict(model.named_buffers())
    quantized = bool(own_method(model.config))
    for key, layer in layer_of.items():
        if layer is not None and layer >= layers:
            lacking = layer not in drafting
        else:
            own = quantized or key in known or key.endswith(OF_ACTIVATIONS) or MASKS.search(key)
            lacking = not own and (layer is not None or key.rpartition(".")[0] in owners)
        if lacking:
            yield key


def _layer_prefix(model: Any, layers: int) -> str:
    """Return the prefix of the decoder's layers, such as "model.layers."."""
    decoder = model.get_decoder()
    stacks = (module for module in decoder.modules() if isinstance(module, nn.ModuleList) and len(module) == layers)
    stack = next(stacks, None)
    return next((f"{name}." for name, module in model.named_modules() if module is stack), "")


def _layer_of(key: str, prefix: str) -> int | None:
    """Return the layer of a tensor; None if it belongs to none.

    Files of a model without a head omit the first part of the prefix. Tensors of a GGUF file for which transformers has
    no name keep the file's names.
    """
    for start in (prefix, prefix.partition(".")[2], LAYER):
        number = key.removeprefix(start).partition(".")[0]
        if start and key.startswith(start) and number.isdigit():
            return int(number)
    return None


def find(config: Any) -> tuple[Any, Any] | None:
    """Return transformers' class for the text of models with this ``config``, and the configuration to build it with.

    None if transformers has no class that generates text.
    """
    from transformers.models.auto import modeling_auto as auto

    text = config.get_text_config(decoder=True)
    # torchao's files repeat tensor names in their metadata, which transformers does not map.
    causal = {} if text is not config and own_method(config) == "torchao" else auto.MODEL_FOR_CAUSAL_LM_MAPPING
    whole = causal.get(type(config), None)
    if whole is not None and (text is config or not hasattr(whole, "get_image_features")):
        return whole, _inherited(config, text) if whole.config_class is type(text) else config
    part = causal.get(type(text), None)
    if part is not None and _reads_whole_checkpoints(text):
        return part, _inherited(config, text)
    mappings = (auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, auto.MODEL_FOR_MULTIMODAL_LM_MAPPING)
    found = whole or next(filter(None, (mapping.get(type(config), None) for mapping in mappings)), None)
    return None if found is None else (_without_encoders(found), config)


def note(config: Any) -> str:
    """Return a note for the user that only the text part of a checkpoint is used; "" if it has no other part."""
    # DBRX also has sections for parts of its layers, without a model type.
    types = {name: getattr(getattr(config, name, None), "model_type", "") for name in config.sub_configs}
    parts = [name.removesuffix("_config") for name, kind in types.items() if kind and name != "text_config"]
    kinds = " and ".join(sorted(parts))
    return f"Only the language part is loaded: the model reads no {kinds} input here." if kinds else ""


def _inherited(config: Any, text: Any) -> Any:
    """Return the text configuration, completed by what only the whole one says about the weights."""
    if text is config:
        return text
    quantized = getattr(config, "quantization_config", None)
    if quantized is not None:
        text.quantization_config = quantized
    if getattr(config, "tie_word_embeddings", False):  # then the files have no head
        text.tie_word_embeddings = True
    return text


def _reads_whole_checkpoints(text: Any) -> bool:
    """Return True if transformers maps a whole checkpoint's tensor names to those of the text configuration's class."""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    changes = get_checkpoint_conversion_mapping(text.model_type) or ()
    return any(getattr(change, "prefix_to_remove", None) for change in changes)


class _Stub(nn.Module):
    """Replaces a module that text does not pass through."""

    device = None  # Qwen2-Audio reads its encoder's device even without audio


def _without_encoders(model_class: Any) -> Any:
    """Return a subclass with only the decoder and the head, which has the same name for transformers."""

    class TextPart(model_class):  # type: ignore[misc]
        _keys_to_ignore_on_load_unexpected = (
            *(model_class._keys_to_ignore_on_load_unexpected or ()),
            rf"\.{VISION_EXPERTS}\.",
        )

        def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
            _set_encoders_eager(config)
            super().__init__(config, *args, **kwargs)
            _keep_only(self, {self.get_decoder(), self.get_output_embeddings()})
            for module in list(self.get_decoder().modules()):
                if hasattr(module, VISION_EXPERTS):
                    setattr(module, VISION_EXPERTS, _without_tensors(getattr(module, VISION_EXPERTS)))

    TextPart.__name__ = TextPart.__qualname__ = model_class.__name__
    TextPart.__module__ = model_class.__module__
    return TextPart


def _set_encoders_eager(config: Any) -> None:
    """Build encoders with transformers' own attention: some cannot be built with another."""
    text = config.get_text_config(decoder=True)
    for part in filter(None, (getattr(config, name, None) for name in config.sub_configs)):
        if part.get_text_config(decoder=True) is not text:
            part._attn_implementation = "eager"


def _keep_only(module: nn.Module, kept: set[Any]) -> None:
    """Replace submodules that neither are nor contain one of ``kept``."""
    for name, child in module.named_children():
        if child in kept:
            continue
        if kept.isdisjoint(child.modules()):
            setattr(module, name, _Stub())
        else:
            _keep_only(child, kept)


def _without_tensors(module: nn.Module) -> nn.Module:
    """Return ``module`` without tensors but with its names, by which transformers splits text and vision experts."""
    empty = _Stub()
    for name in (*module._parameters, *module._buffers):
        empty.register_parameter(name, None)
    for name, child in module.named_children():
        empty.add_module(name, _without_tensors(child))
    return empty


# ---- imports, and models on the meta device


def import_transformers() -> None:
    """Import transformers' model classes without optional dependencies, whose import takes longer than theirs.

    These are torch's compiler, whose decorators mark functions; torchao, of which transformers' quantizer needs one
    function, to write files; and distributed tensors. The compiler and torchao are imported when something else of them
    is used; functions that were not marked stay unmarked.
    """
    from transformers import utils
    from transformers.utils.import_utils import is_torch_distributed_available, is_torchao_available

    utils.direct_transformers_import = lambda path: sys.modules["transformers"]  # instead of a second import
    if not sys.modules.keys().isdisjoint((*COMPILER, "torchao")):
        return
    own, torch.distributed.is_available = torch.distributed.is_available, lambda: False
    is_torch_distributed_available.cache_clear()
    is_torch_distributed_available()  # caches the result
    torch.distributed.is_available = own
    sys.modules.update({name: Later(name, known, COMPILER) for name, known in COMPILER.items()})
    sys.modules["torchao"] = None  # type: ignore[assignment]  # makes its import fail
    is_torchao_available.cache_clear()
    try:
        importlib.import_module("transformers.modeling_layers")
        torchaos = importlib.import_module("transformers.quantizers.quantizer_torchao")
        vars(torchaos).setdefault("flatten_tensor_state_dict", _flattened)
    finally:
        del sys.modules["torchao"]
        is_torchao_available.cache_clear()


def _unmarked(function: Any = None, *_: Any, **__: Any) -> Any:
    return _unmarked if function is None else function


def _flattened(*args: Any) -> Any:
    from torchao.prototype.safetensors import safetensors_support

    return safetensors_support.flatten_tensor_state_dict(*args)


def _index_by_tensors() -> Any:
    from torch._dynamo import _trace_wrapped_higher_order_op

    return _trace_wrapped_higher_order_op.TransformGetItemToIndex()


# The parts of torch's compiler that transformers uses even if nothing is compiled.
COMPILER: dict[str, dict[str, Any]] = {
    "torch._dynamo": {"disable": _unmarked, "allow_in_graph": _unmarked, "assume_constant_result": _unmarked},
    "torch._dynamo._trace_wrapped_higher_order_op": {"TransformGetItemToIndex": _index_by_tensors},
    "torch.fx.experimental.symbolic_shapes": {"guard_or_false": bool, "sym_eq": operator.eq},  # of sizes as numbers
}


class WithoutMemory(TorchFunctionMode):
    """In this block, models on the meta device do not initialize weights, and ``torch.arange`` runs on the CPU.

    torch's own functions for both on the meta device are in Python and import its compiler. A function of tensors on
    both devices returns one on the meta device.
    """

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        if function is torch.arange:
            device = torch.device(options.get("device") or torch.get_default_device())
            return function(*args, **options | {"device": "cpu" if device.type == "meta" else device})
        values = (*args, *options.values())
        flat = (each for value in values for each in (value if isinstance(value, list | tuple) else [value]))
        on_meta = [each for each in flat if isinstance(each, Tensor) and each.is_meta]
        if on_meta and function.__name__ in DRAWING:
            return on_meta[0]
        try:
            return function(*args, **options)
        except RuntimeError:  # torch refuses tensors on two devices
            if not on_meta:
                raise
            return function(*map(_to_meta, args), **{name: _to_meta(value) for name, value in options.items()})


def _to_meta(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_to_meta(each) for each in value]
    return value.to("meta") if isinstance(value, Tensor) else value
