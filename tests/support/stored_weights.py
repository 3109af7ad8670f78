"""Weights as quantized checkpoints store them: the tensors of the files; the model is rounded to them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from support.model_folders import set_quantization
from torch import Tensor

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32]}
MXFP4 = {"quant_method": "mxfp4"}
PACKED_4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32},
        }
    },
    "ignore": ["lm_head"],
}
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])  # and their negatives
GROUP = 32
STACKS = ("experts.gate_up_proj", "experts.down_proj")


def write(folder: Path, stored: dict[str, Tensor], section: dict[str, Any]) -> None:
    """Replace a checkpoint's weights by ``stored``, with ``section`` as its ``quantization_config``."""
    safetensors.torch.save_file(stored, folder / "model.safetensors", {"format": "pt"})
    set_quantization(folder, section)


def fp8(model: Any, block: int = 32) -> dict[str, Tensor]:
    """Projections in float8, a scale per square of ``block`` rows, experts one by one; rounds ``model`` to them."""
    stored = {}
    for name, parameter in model.named_parameters():
        for place, matrix in _matrices(name, parameter.data):
            stored[place] = matrix.clone()
            if "proj" in place and matrix.dim() == 2:
                rows, columns = matrix.shape
                filled = torch.nn.functional.pad(matrix, (0, -columns % block, 0, -rows % block))
                blocks = filled.unflatten(0, (-1, block)).unflatten(-1, (-1, block))
                scale = blocks.abs().amax((1, 3)) / 448
                found = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
                stored[place] = found.view(filled.shape)[:rows, :columns].contiguous()
                stored[f"{place}_scale_inv"] = scale
                matrix.copy_((found.float() * scale[:, None, :, None]).view(filled.shape)[:rows, :columns])
    return stored


def packed_4(model: Any) -> dict[str, Tensor]:
    """Projections in integers of 4 bits, eight per int32; rounds ``model`` to them."""
    stored = {}
    for name, parameter in model.named_parameters():
        stored[name] = parameter.detach().clone()
        if "_proj" in name:
            rows, columns = stored.pop(name).shape
            groups = parameter.data.view(rows, -1, GROUP)
            scale = (groups.abs().amax(-1, keepdim=True) / 7).bfloat16().float()
            levels = (groups / scale).round().clamp(-8, 7)
            parameter.data = (levels * scale).view(rows, columns)
            nibbles = (levels + 8).to(torch.int64).view(rows, -1, 8) << (4 * torch.arange(8))
            stored[f"{name}_packed"] = nibbles.sum(-1).to(torch.int32)
            stored[f"{name}_scale"] = scale.squeeze(-1).bfloat16()
            stored[f"{name}_shape"] = torch.tensor([rows, columns])
    return stored


def mxfp4(model: Any) -> dict[str, Tensor]:
    """The experts of a gpt-oss in 4-bit floats with a power of two per 32; rounds ``model`` to them."""
    stored = {}
    for name, parameter in model.named_parameters():
        stored[name] = parameter.detach().clone()
        if name.endswith(STACKS):
            groups = stored.pop(name).transpose(1, 2).unflatten(-1, (-1, GROUP))
            power = groups.abs().amax(-1).log2().floor() - 2
            found = groups / power.exp2().unsqueeze(-1)
            index = (found.abs().unsqueeze(-1) - E2M1).abs().argmin(-1)
            parameter.data = (E2M1[index] * found.sign() * power.exp2().unsqueeze(-1)).flatten(2).transpose(1, 2)
            nibbles = (index + 8 * (found < 0)).to(torch.uint8).unflatten(-1, (-1, 2))
            stored[f"{name}_blocks"] = nibbles[..., 0] | nibbles[..., 1] << 4
            stored[f"{name}_scales"] = (power + 127).to(torch.uint8)
    return {name: tensor.contiguous() for name, tensor in stored.items()}


def _matrices(name: str, weight: Tensor) -> list[tuple[str, Tensor]]:
    """Names and views of ``weight`` as the files hold it: the experts of a mixture have tensors of their own."""
    if not name.endswith(STACKS):
        return [(name, weight)]
    where, own = name.rsplit(".", 1)
    halves = ["gate_proj", "up_proj"] if own == "gate_up_proj" else ["down_proj"]
    return [
        (f"{where}.{expert}.{half}.weight", part)
        for expert, matrix in enumerate(weight)
        for half, part in zip(halves, matrix.chunk(len(halves)), strict=True)
    ]
