"""Make transformers pack each weight while it reads a model to a CPU, so that only one at a time is unpacked.

A separate file, because it imports transformers' quantizers, and with them torchao, which other models do not need.
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
    """Requests the packing ``method`` on a CPU; ``of_4_bits`` says that the weights already had 4 bits."""

    def __init__(self, method: str, of_4_bits: bool = False) -> None:
        super().__init__(quant_method=method)
        self.of_4_bits = of_4_bits


class PackedQuantizer(HfQuantizer):  # type: ignore[misc]
    """Packs the Linears that fit, except the head, and the stacks of experts."""

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
    """Packs each weight after it is read; ``of_4_bits`` as in ``PackedConfig``."""

    def __init__(self, method: str, *, of_4_bits: bool = False) -> None:
        self._method, self._of_4_bits = method, of_4_bits

    def convert(self, input_dict: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Pack the weight into its module, and return the other weights made from the same tensors."""
        name = kwargs["full_layer_name"]
        value = _tensor(input_dict.pop(name)).detach()  # unpacked mxfp4 requires gradients
        path, _, own = name.rpartition(".")
        module = kwargs["model"].get_submodule(path)
        if value.shape != (expected := getattr(module, own).shape):  # transformers checks only weights that it sets
            raise ValueError(f"{name} is {tuple(value.shape)} in the files and {tuple(expected)} in the model")
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(value, requires_grad=False)
            PACKINGS[self._method].pack(module, of_4_bits=self._of_4_bits)
        else:
            packing.pack_stack(module, own, value, self._method, of_4_bits=self._of_4_bits)
        getattr(module, own)._is_hf_initialized = True  # else transformers initializes it or its whole layer
        kwargs["missing_keys"].discard(name)
        return input_dict


class PackUnpacked(Pack):
    """Packs the weights that ``PackedQuantizer`` would pack, for a checkpoint whose weights all pass through this."""

    _packed: set[str] | None = None

    def convert(self, input_dict: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Pack the weight, unless it must not be packed or several weights were made at once."""
        if self._packed is None:
            self._packed = _packed(kwargs["model"], self._method)
        if len(input_dict) > 1 or (name := kwargs["full_layer_name"]) not in self._packed:
            return input_dict
        (value,) = map(_tensor, input_dict.values())
        if value.element_size() == 1:
            raise ValueError(f"{name} is {value.dtype} in the files, without what unpacks it")
        return super().convert(input_dict, *args, **kwargs)


def _tensor(made: Any) -> Tensor:
    """Return the tensor that transformers ``made`` for one weight, which may be in a list."""
    tensor: Tensor = made[0] if isinstance(made, list) else made
    return tensor


def _packed(model: Any, method: str) -> set[str]:
    """Return the names of the weights in ``model`` to pack."""
    chosen = set(PACKINGS[method].linears(model))
    linears = {f"{name}.weight" for name, module in model.named_modules() if module in chosen}
    return linears | {name for name, _ in packing.chosen_stacks(model, method)}


for method in PACKINGS:
    register_quantization_config(method)(PackedConfig)
    register_quantizer(method)(PackedQuantizer)
