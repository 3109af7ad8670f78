"""Checkpoints that are quantized and that transformers unpacks while it reads them."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch
from support import tiny_models
from support.progress import silent
from support.quantized_checkpoint import declare, listed, planned

from kvchat.engine.model import quantization
from kvchat.engine.model.fusion.swap import sample_logits
from kvchat.engine.model.load import load_model
from kvchat.engine.model.tolerances import relative_error
from kvchat.engine.plan import memory_plan
from kvchat.protocol.messages import Load
from kvchat.tui.model_choice.plan_table import plan_lines
from kvchat.units import size

INT8_GROUPS = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "int", "strategy": "channel"}}
INT_QUANTIZED = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "config_groups": {"group_0": INT8_GROUPS},
    "ignore": ["lm_head"],
}


@pytest.fixture
def compressed(llama_folder):
    """The tiny Llama as compressed-tensors stores it, and the same with the weights that are stored."""
    stored, rounded = {}, tiny_models.fresh("llama")
    for name, parameter in rounded.named_parameters():
        stored[name] = parameter.detach().clone()
        if "_proj" in name:
            scale = parameter.detach().abs().amax(1, keepdim=True) / 127
            stored[name], stored[f"{name}_scale"] = (parameter.detach() / scale).round().to(torch.int8), scale
            parameter.data = stored[name].float() * scale
    safetensors.torch.save_file(stored, llama_folder / "model.safetensors", {"format": "pt"})
    declare(llama_folder, INT_QUANTIZED)
    return llama_folder, rounded


def test_compressed_tensors_are_planned_and_listed_as_they_are_loaded(compressed):
    llama_folder, rounded = compressed
    assert planned(llama_folder, "float32") == quantization.weight_bytes(rounded)
    assert listed(llama_folder, "float32") == pytest.approx(planned(llama_folder, "float32"), rel=0.02)


def test_4_bits_that_are_unpacked_are_listed_as_they_are_planned(llama_folder):
    stored = {}
    for name, parameter in tiny_models.fresh("llama").named_parameters():
        stored[name] = parameter.detach().clone()
        if "_proj" in name:
            rows, columns = stored.pop(name).shape
            stored[f"{name}_packed"] = torch.zeros(rows, columns // 8, dtype=torch.int32)
            stored[f"{name}_scale"] = torch.ones(rows, columns // 32)
            stored[f"{name}_shape"] = torch.tensor([rows, columns])
    safetensors.torch.save_file(stored, llama_folder / "model.safetensors", {"format": "pt"})
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
    declare(llama_folder, {**INT_QUANTIZED, "format": "pack-quantized", "config_groups": {"0": {"weights": weights}}})
    assert planned(llama_folder, "bfloat16") > 1.5 * (llama_folder / "model.safetensors").stat().st_size
    assert listed(llama_folder, "bfloat16") == pytest.approx(planned(llama_folder, "bfloat16"), rel=0.02)
    made = memory_plan(Load(str(llama_folder), "cpu", "bfloat16"), 64, silent)
    (row,) = [line for line in plan_lines(made) if line.startswith("weights, ")]
    of_files, loaded = (size(nbytes, 2) for nbytes in (made.packed, made.weights["compressed-tensors"]))
    assert made.packed == sum(tensor.nbytes for tensor in stored.values())
    assert " ".join(row.split()) == f"weights, compressed-tensors, unpacked from {of_files} host {loaded}"


@pytest.mark.skipif(
    importlib.util.find_spec("compressed_tensors") is None, reason="compressed-tensors is not installed"
)
def test_compressed_tensors_are_unpacked_while_they_are_read(compressed):
    """transformers leaves that to a hook, which a forward without the head does not call."""
    llama_folder, rounded = compressed
    loaded = load_model(Load(str(llama_folder), "cpu", "float32"), silent)
    assert loaded.notes[0] == "The compressed-tensors weights were unpacked to float32."
    assert (loaded.weights, loaded.weight_bytes) == ("", planned(llama_folder, "float32"))
    assert relative_error(sample_logits(loaded.model), sample_logits(rounded)) < 1e-5


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32]}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fp8_is_unpacked_on_a_cpu_to_the_dtype_that_was_asked_for(llama_folder, dtype):
    stored, rounded = {}, tiny_models.fresh("llama")
    for name, parameter in rounded.named_parameters():
        stored[name] = parameter.detach().clone()
        if "_proj" in name:
            blocks = parameter.detach().unflatten(0, (-1, 32)).unflatten(-1, (-1, 32))
            scale = blocks.abs().amax((1, 3)) / 448
            stored[name] = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn).reshape(parameter.shape)
            stored[f"{name}_scale_inv"] = scale
            parameter.data = (stored[name].float().view(blocks.shape) * scale[:, None, :, None]).view(parameter.shape)
    safetensors.torch.save_file(stored, llama_folder / "model.safetensors", {"format": "pt"})
    declare(llama_folder, FP8)
    stages = []
    loaded = load_model(Load(str(llama_folder), "cpu", dtype), stages.append)
    files = (llama_folder / "model.safetensors").stat().st_size
    sizes = f": {size(files)} in the file, {size(loaded.weight_bytes)} unpacked"
    assert any(stage.endswith(sizes) for stage in stages)
    assert loaded.notes[0] == f"The fp8 weights were unpacked to {dtype}."
    assert {str(parameter.dtype) for parameter in loaded.model.parameters()} == {f"torch.{dtype}"}
    assert planned(llama_folder, dtype) == loaded.weight_bytes
    assert listed(llama_folder, dtype) == pytest.approx(loaded.weight_bytes, rel=0.02)
    assert relative_error(sample_logits(loaded.model), sample_logits(rounded)) < 0.15


def test_what_belongs_to_a_packed_weight_keeps_its_dtype():
    model = tiny_models.fresh("llama")
    packed, plain = model.model.layers[0].self_attn.q_proj, model.model.layers[1].self_attn.q_proj
    packed.weight.data = packed.weight.data.to(torch.float8_e4m3fn)
    packed.weight_scale_inv = torch.nn.Parameter(torch.ones(2, 2))
    quantization.finish_loading(model, SimpleNamespace(quantization_config=FP8), torch.bfloat16)
    assert (packed.weight.dtype, packed.weight_scale_inv.dtype) == (torch.float8_e4m3fn, torch.float32)
    assert (plain.weight.dtype, model.dtype) == (torch.bfloat16, torch.bfloat16)
