"""Lets transformers pack each weight while it reads a model onto a CPU, so that no more than one is unpacked.

Its own file because it imports transformers' quantizers, and they torchao, which an unpacked model does not need.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from kvchat.models.quantize import packing
from kvchat.models.quantize.packing import PACKINGS


class PackedConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """Asks for weights of 4 or 8 bits on a CPU, by the name of their method; ``of_4_bits``: they had those."""

    def __init__(self, method: str, of_4_bits: bool = False) -> None:
        super().__init__(quant_method=method)
        self.of_4_bits = of_4_bits


class PackedQuantizer(HfQuantizer):  # type: ignore[misc]
    """Packs the Linears that fit, but the head, and the stacks of experts."""

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
        self._packed = _packed(model, self.quantization_config.quant_method)

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        return param_name in self._packed

    def get_quantize_ops(self) -> ConversionOps:
        return Pack(self.quantization_config.quant_method, of_4_bits=self.quantization_config.of_4_bits)

    def is_serializable(self, safe_serialization: object = None) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return False


class Pack(ConversionOps):  # type: ignore[misc]
    """Packs what was read; weights that had ``of_4_bits`` as such."""

    def __init__(self, method: str, *, of_4_bits: bool = False) -> None:
        self._method, self._of_4_bits = method, of_4_bits

    def convert(self, input_dict: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Put what was read into its module, packed: what was made beside it of the same tensors is left to be put."""
        name = kwargs["full_layer_name"]
        value = _tensor(input_dict.pop(name)).detach()  # mxfp4 is unpacked to what has gradients
        path, _, own = name.rpartition(".")
        module = kwargs["model"].get_submodule(path)
        if value.shape != (asked := getattr(module, own).shape):  # transformers compares those of what is left to it
            raise ValueError(f"{name} is {tuple(value.shape)} in the files and {tuple(asked)} in the model")
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(value, requires_grad=False)
            PACKINGS[self._method].pack(module, of_4_bits=self._of_4_bits)
        else:
            packing.pack_stack(module, own, value, self._method, of_4_bits=self._of_4_bits)
        getattr(module, own)._is_hf_initialized = True  # else it is drawn anew, for some models with all of the layer
        kwargs["missing_keys"].discard(name)
        return input_dict


class PackUnpacked(Pack):
    """Packs the weights that ``PackedQuantizer`` packs, of a checkpoint of which all weights pass through this."""

    _packed: set[str] | None = None

    def convert(self, input_dict: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Leave what is not packed, and what becomes several weights at once."""
        if self._packed is None:
            self._packed = _packed(kwargs["model"], self._method)
        if len(input_dict) > 1 or (name := kwargs["full_layer_name"]) not in self._packed:
            return input_dict
        (value,) = map(_tensor, input_dict.values())
        if value.element_size() == 1:
            raise ValueError(f"{name} is {value.dtype} in the files, without what unpacks it")
        return super().convert(input_dict, *args, **kwargs)


def _tensor(made: Any) -> Tensor:
    """The tensor that transformers ``made`` for one weight, which it may hand on in a list."""
    tensor: Tensor = made[0] if isinstance(made, list) else made
    return tensor


def _packed(model: Any, method: str) -> set[str]:
    """The names of the weights in ``model`` that are packed."""
    chosen = set(PACKINGS[method].linears(model))
    linears = {f"{name}.weight" for name, module in model.named_modules() if module in chosen}
    return linears | {name for name, _ in packing.chosen_stacks(model, method)}


for method in PACKINGS:
    register_quantization_config(method)(PackedConfig)
    register_quantizer(method)(PackedQuantizer)
