"""The language part of a multimodal checkpoint: which class runs it, built without towers and projectors.

Current repositories of Gemma, Qwen, Mistral and others are ``...ForConditionalGeneration``. Where transformers has a
causal language model that reads such a checkpoint's text tensors, that is taken. Else it is the full class without the
modules that text does not go through: they are dropped while the model has no memory yet, and transformers reads from
the files only what the model has.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from kvchat.engine.model.quantization import own_method

VISION_EXPERTS = "vision_moe"  # in the layers of ERNIE 4.5 VL, beside the experts of text


def find(config: Any) -> tuple[Any, Any] | None:
    """transformers' class for the text of models with this ``config``, and the configuration to build it with.

    None where transformers has none that generates text.
    """
    from transformers.models.auto import modeling_auto as auto

    text = config.get_text_config(decoder=True)
    # The files of torchao's name the weights once more where transformers maps no names: in their metadata.
    causal = {} if text is not config and own_method(config) == "torchao" else auto.MODEL_FOR_CAUSAL_LM_MAPPING
    whole = causal.get(type(config), None)
    if whole is not None and (text is config or not hasattr(whole, "get_image_features")):
        return whole, _inherited(config, text) if whole.config_class is type(text) else config
    part = causal.get(type(text), None)
    if part is not None and _reads_whole_checkpoints(text):
        return part, _inherited(config, text)
    mappings = (auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, auto.MODEL_FOR_MULTIMODAL_LM_MAPPING)
    found = whole or next(filter(None, (mapping.get(type(config), None) for mapping in mappings)), None)
    return None if found is None else (_without_towers(found), config)


def note(config: Any) -> str:
    """A note for people that only the text part of a checkpoint is used; empty where there is no other part."""
    parts = [name for name in config.sub_configs if name != "text_config" and _is_model(getattr(config, name, None))]
    kinds = " and ".join(sorted(name.removesuffix("_config") for name in parts))
    return f"Only the language part is loaded: the model reads no {kinds} input here." if kinds else ""


def _is_model(part: Any) -> bool:
    """True for the configuration of a model; DBRX has others, which name no kind of model, of its layers' halves."""
    return bool(getattr(part, "model_type", ""))


def _inherited(config: Any, text: Any) -> Any:
    """The text configuration, with what only the whole one says of the weights."""
    if text is config:
        return text
    quantized = getattr(config, "quantization_config", None)
    if quantized is not None:
        text.quantization_config = quantized
    if getattr(config, "tie_word_embeddings", False):  # then the files have no head
        text.tie_word_embeddings = True
    return text


def _reads_whole_checkpoints(text: Any) -> bool:
    """True if transformers maps the tensor names of a whole checkpoint to those of the text configuration's class."""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    changes = get_checkpoint_conversion_mapping(text.model_type) or ()
    return any(getattr(change, "prefix_to_remove", None) for change in changes)


class _LeftOut(nn.Module):
    """In the place of a module that text does not go through."""

    device = None  # Qwen2-Audio asks for that of its tower even where there is nothing to hear


def _without_towers(model_class: Any) -> Any:
    """A subclass that keeps the decoder and the head; transformers sees the same name."""

    class TextPart(model_class):  # type: ignore[misc]
        _keys_to_ignore_on_load_unexpected = (
            *(model_class._keys_to_ignore_on_load_unexpected or ()),
            rf"\.{VISION_EXPERTS}\.",
        )

        def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
            _set_towers_eager(config)
            super().__init__(config, *args, **kwargs)
            _keep_only(self, {self.get_decoder(), self.get_output_embeddings()})
            _leave_vision_experts_out(self.get_decoder())

    TextPart.__name__ = TextPart.__qualname__ = model_class.__name__
    TextPart.__module__ = model_class.__module__
    return TextPart


def _set_towers_eager(config: Any) -> None:
    """Let towers be built with transformers' own attention: a few cannot be built with another."""
    text = config.get_text_config(decoder=True)
    for part in filter(None, (getattr(config, name, None) for name in config.sub_configs)):
        if part.get_text_config(decoder=True) is not text:
            part._attn_implementation = "eager"


def _keep_only(module: nn.Module, kept: set[Any]) -> None:
    """Leave out submodules that neither are nor contain one of ``kept``."""
    for name, child in module.named_children():
        if child in kept:
            continue
        if kept.isdisjoint(child.modules()):
            setattr(module, name, _LeftOut())
        else:
            _keep_only(child, kept)


def _leave_vision_experts_out(decoder: nn.Module) -> None:
    for module in list(decoder.modules()):
        if hasattr(module, VISION_EXPERTS):
            setattr(module, VISION_EXPERTS, _without_tensors(getattr(module, VISION_EXPERTS)))


def _without_tensors(module: nn.Module) -> nn.Module:
    """The names in ``module``: transformers looks them up when it makes them and those of text of the same tensors."""
    empty = _LeftOut()
    for name in (*module._parameters, *module._buffers):
        empty.register_parameter(name, None)
    for name, child in module.named_children():
        empty.add_module(name, _without_tensors(child))
    return empty
