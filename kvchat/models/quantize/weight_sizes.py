"""Bytes of a model's weights by quantization, told by the shapes of its tensors before a weight is read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from kvchat.models import attention_hook, stored_tensors
from kvchat.models.checkpoint import Checkpoint
from kvchat.models.quantize import int4_rows, int8_rows, packing
from kvchat.models.quantize.packing import PACKINGS
from kvchat.models.quantize.rows import is_tied, packs_head
from kvchat.models.stored_tensors import Packed

# Bytes beside a weight's own bits on a GPU: torchao's scale and zero point of a row, bitsandbytes' scale of 64 weights.
ROW_BYTES = 5
NF4_BYTES = 0.5 + 4 / 64
# torchao's int4 on a GPU: bytes a weight, of how many share a scale, and the rows and columns it is padded to.
INT4_BYTES, INT4_GROUP, INT4_PADDED = 0.5 + 4 / 128, 128, (8, 1024)

# A configuration's names for their number.
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def without_memory(model_class: Any, config: Any, dtype: torch.dtype) -> Any:
    """The model on torch's meta device, where tensors have shapes and no memory."""
    attention_hook.register()
    own = deepcopy(config)  # transformers writes into it how the experts are run, and reads that when it loads
    with torch.device("meta"):
        # Of transformers' ways to run experts this one asks no tensor for its values, which have none.
        return model_class._from_config(
            own, dtype=dtype, attn_implementation=attention_hook.NAME, experts_implementation="batched_mm"
        ).eval()


def weight_bytes(model: Any, quantize: str, device: torch.device) -> int:
    """Bytes of the weights and buffers; only Linears are quantized, the head and experts on a CPU alone."""
    total: int = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    if quantize == "none":
        return total
    head = model.get_output_embeddings()
    for linear in linears(model):
        if linear is not head:
            total += _packed_bytes(linear.weight, quantize, device) - linear.weight.nbytes
        elif device.type == "cpu" and packs_head(quantize):
            total += _packed_bytes(linear.weight, "int8", device) - (0 if is_tied(model) else linear.weight.nbytes)
    stacks = _stacks(model, quantize, device)
    return total + sum(_packed_bytes(matrices, quantize, device) - matrices.nbytes for matrices in stacks)


def packed_bytes(model: Any, packed: Mapping[str, Packed]) -> int:
    """Bytes of the weights of a checkpoint that stays packed; ``packed`` has its packed weights by their names.

    A packed weight takes what it takes in the files, with its constants; all else what the model's dtype says.
    """
    weights = dict(model.named_parameters())
    name_of = _renaming(model, weights)
    held: defaultdict[str, int] = defaultdict(int)  # one weight may be several in the files: experts are fused
    for name, one in packed.items():
        of_model = (name_of(f"{name}.weight"), name_of(name))
        held.update({own: held[own] + one.nbytes for own in of_model if own in weights})
    saved = sum(int(weights[name].nbytes) - nbytes for name, nbytes in held.items())
    return weight_bytes(model, "none", torch.device("cpu")) - saved


def _renaming(model: Any, weights: Mapping[str, Tensor]) -> Callable[[str], str]:
    """The function by which transformers names a tensor of the files in the model, which has ``weights``."""
    from transformers import conversion_mapping
    from transformers import core_model_loading as loading

    changes = conversion_mapping.get_model_conversion_mapping(model)
    renamings, converters = (
        [change for change in changes if isinstance(change, kind)]
        for kind in (loading.WeightRenaming, loading.WeightConverter)
    )
    return lambda name: str(loading.rename_source_key(name, renamings, converters, model.base_model_prefix, weights)[0])


def stored_sizes(checkpoint: Checkpoint) -> dict[str, int]:
    """The bytes of a checkpoint's tensors in safetensors by their names; its headers were checked before."""
    return {tensor.name: tensor.nbytes for file in checkpoint.weights for tensor in stored_tensors.tensors(file)}


def read_bytes(model: Any, nbytes: int) -> int | None:
    """Bytes of the weights that one token reads, of ``nbytes`` in all; None for mixtures of experts, which read some.

    Of the embeddings one row is read; tied to the head, all of them.
    """
    if has_experts(model):
        return None
    return nbytes - (0 if is_tied(model) else int(model.get_input_embeddings().weight.nbytes))


def has_experts(model: Any) -> bool:
    """True for a mixture of experts, of which a token goes through some."""
    config = model.config.get_text_config(decoder=True)
    sections = (config, *(getattr(config, name, None) for name in config.sub_configs))  # DBRX's of its MLP has them
    return any(getattr(section, name, None) for section in sections for name in EXPERTS)


def unpackable_share(model: Any, quantize: str, device: torch.device) -> float:
    """The share of the layers' weights that stays as it is where the others are packed: experts and convolutions."""
    decoder = model.get_decoder()
    tables = {id(module.weight) for module in decoder.modules() if isinstance(module, nn.Embedding)}
    matrices = (weight for weight in decoder.parameters() if weight.dim() > 1 and id(weight) not in tables)
    all_of_them: int = sum(weight.numel() for weight in matrices)
    fitting = [linear.weight for linear in linears(decoder) if _fits(linear.weight, quantize, device)]
    packed: int = sum(weight.numel() for weight in (*fitting, *_stacks(decoder, quantize, device)))
    return 1 - packed / max(1, all_of_them)


def _packed_bytes(weight: Tensor, quantize: str, device: torch.device) -> int:
    """Bytes of a matrix ``weight [N, K]`` once it is packed; those of one that does not fit stay."""
    rows, columns = weight.shape
    if quantize != "int4":
        if quantize == "int8":
            return int8_rows.packed_bytes(rows, columns) if device.type == "cpu" else rows * (columns + ROW_BYTES)
        return int(rows * columns * NF4_BYTES)
    if not _fits(weight, quantize, device):
        return weight.nbytes
    if device.type == "cpu":
        return int(rows * columns * int4_rows.WEIGHT_BYTES)
    padded = [-(-size // to) * to for size, to in zip((rows, columns), INT4_PADDED, strict=True)]
    return int(padded[0] * padded[1] * INT4_BYTES)


def _fits(weight: Tensor, quantize: str, device: torch.device) -> bool:
    """True if a matrix ``[N, K]`` can be packed."""
    if quantize != "int4":
        return True
    return int4_rows.fits(*weight.shape) if device.type == "cpu" else weight.shape[1] % INT4_GROUP == 0


def _stacks(model: Any, quantize: str, device: torch.device) -> Iterator[Tensor]:
    """The stacks of experts that can be packed, each as one matrix ``[E * N, K]``."""
    if device.type != "cpu" or quantize not in PACKINGS:
        return
    for _, stack in packing.chosen_stacks(model, quantize):
        yield stack.weight.view(-1, stack.shape[-1])


def linears(model: Any) -> Iterator[nn.Linear]:
    """The modules that can be quantized."""
    return (module for module in model.modules() if type(module) is nn.Linear)
