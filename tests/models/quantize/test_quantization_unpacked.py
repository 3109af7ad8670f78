"""Quantized checkpoints that transformers unpacks on loading are quantized again."""

import contextlib
import importlib.util
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch
from support import stored_weights, tiny_models, tiny_multimodal
from support.message import lacks
from support.model_folders import listed_bytes
from support.progress import silent
from support.stored_weights import FP8, MXFP4, PACKED_4

from kvchat.engine import plan
from kvchat.engine.plan import memory_plan
from kvchat.errors import ModelError
from kvchat.kv.memory import available
from kvchat.models import description, repacking
from kvchat.models.description import describe
from kvchat.models.fuse.modules import sample_logits
from kvchat.models.load import load_model
from kvchat.models.probe import relative_error
from kvchat.models.quantize import packing, quantization
from kvchat.models.quantize.packing import PACKINGS
from kvchat.protocol.messages import Load
from kvchat.tui.models import plan_lines
from kvchat.units import size

# Checkpoints by name: architecture, what makes the tensors, config section, and the quantization that keeps them small.
MADE = {
    "fp8": ("llama", stored_weights.fp8, FP8, "int8"),
    "fp8 mixture": ("qwen3_moe", stored_weights.fp8, FP8, "int8"),
    "fp8 hybrid": ("jamba", stored_weights.fp8, FP8, "int8"),
    "mxfp4": ("gpt_oss", stored_weights.mxfp4, MXFP4, "int4"),
    "compressed": ("llama", stored_weights.packed_4, PACKED_4, "int4"),
}
needs_compressed = pytest.mark.skipif(
    importlib.util.find_spec("compressed_tensors") is None, reason="compressed-tensors is not installed"
)
UNPACKED = ["fp8", "fp8 mixture", "fp8 hybrid", "mxfp4", pytest.param("compressed", marks=needs_compressed)]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Gives the two folders for a name: the checkpoint, and the same model unquantized."""

    def get(name):
        if name not in created:
            architecture, store, section, _ = MADE[name]
            folders = [tmp_path_factory.mktemp(kind) for kind in ("stored", "plain")]
            rounded = tiny_models.fresh(architecture, vocab_size=tiny_multimodal.VOCAB)
            tiny_multimodal.save(rounded, folders[0])
            stored_weights.write(folders[0], store(rounded), section)
            tiny_multimodal.save(rounded, folders[1])
            created[name] = tuple(map(str, folders))
        return created[name]

    created = {}
    return get


def load(folder, quantize="auto", dtype="float32", progress=silent):
    return load_model(Load(folder, "cpu", dtype, quantize=quantize), progress)


loaded = cache(load)


@pytest.mark.parametrize("name", UNPACKED)
def test_checkpoints_are_requantized_by_default(checkpoints, name):
    (folder, plain), kind, stages = checkpoints(name), MADE[name][3], []
    small = load(folder, progress=stages.append)
    unpacked = loaded(plain).weight_bytes
    assert small.weights == kind
    files = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))
    sizes = f": {size(files)} in the file, {size(unpacked)} unpacked, {size(small.weight_bytes)} in {kind}"
    assert any(stage.endswith(sizes) for stage in stages)
    method = MADE[name][2]["quant_method"]
    assert not lacks(small.notes[-1], method, kind, "--quantize none")
    planned = memory_plan(Load(folder, "cpu", "float32"), 64, silent)
    measured = {choice: loaded(folder, choice).weight_bytes for choice in ("none", "int8", "int4")}
    assert (planned.by_default, planned.weights) == (kind, pytest.approx(measured, rel=0.005))
    assert listed_bytes(folder, "float32") == planned.weights[kind]


@pytest.mark.parametrize("name", UNPACKED)
@pytest.mark.parametrize("quantize", ["none", "int8", "int4"])
def test_requantized_checkpoints_match_the_unquantized_model(checkpoints, name, quantize):
    stored, plain = (loaded(folder, quantize) for folder in checkpoints(name))
    assert stored.weights == plain.weights
    # 4-bit checkpoints keep their values; where values differ, a mixture sends tokens to other experts.
    tolerance = 0.5 if quantize == "int4" else 1e-4 if name != "compressed" else 0.05  # unpacked to bfloat16
    assert relative_error(sample_logits(stored.model), sample_logits(plain.model)) < tolerance


@needs_compressed
def test_4_bit_checkpoints_keep_their_values(checkpoints):
    folder, plain = checkpoints("compressed")
    assert relative_error(sample_logits(loaded(folder).model), sample_logits(loaded(plain).model)) < 0.02


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fp8_is_unpacked_to_the_requested_dtype(checkpoints, dtype):
    folder, plain = checkpoints("fp8")
    stages = []
    unpacked = load(folder, "none", dtype, stages.append)
    files = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))
    sizes = f": {size(files)} in the file, {size(unpacked.weight_bytes)} unpacked"
    assert any(stage.endswith(sizes) for stage in stages)
    assert not lacks(unpacked.notes[0], "fp8", dtype)
    assert {str(parameter.dtype) for parameter in unpacked.model.parameters()} == {f"torch.{dtype}"}
    assert relative_error(sample_logits(unpacked.model), sample_logits(loaded(plain).model)) < 0.15


def test_the_plan_lists_stored_and_unpacked_sizes(checkpoints):
    folder, _ = checkpoints("compressed")
    planned = memory_plan(Load(folder, "cpu", "bfloat16"), 64, silent)
    rows = [line for line in plan_lines(planned) if line.startswith("weights, ")]
    stored, none, int8, int4 = (size(nbytes, 2) for nbytes in (planned.packed, *planned.weights.values()))
    expected = (("not quantized", stored, none), ("int8", int8), ("int4", "default", int4))
    assert not [row for row, facts in zip(rows, expected, strict=True) if lacks(row, *facts)]
    assert not lacks(planned.proposal.gave_up[0], "weights", "4.5 bits", "to 4")
    assert planned.unpacked == 0  # each is packed as soon as it is unpacked


def test_a_plan_reads_the_headers_once(checkpoints, monkeypatch):
    """For a model that is not downloaded, each reading sends a request per file to the hub."""
    read, genuine = [], description.read_headers
    monkeypatch.setattr(description, "read_headers", lambda location: read.append(location) or genuine(location))
    memory_plan(Load(checkpoints("fp8")[0], "cpu"), 64, silent)
    assert len(read) == 1


def test_a_gpu_dequantizes_fully_and_keeps_experts_unpacked(checkpoints, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    dense, mixture = (
        replace(describe(checkpoints(name)[0], "cpu", "bfloat16", silent), device=torch.device("cuda"))
        for name in ("fp8", "mxfp4")
    )
    assert repacking.by_default(dense) == "int8"
    assert repacking.needs_full_dequantization(dense, "int8")
    assert not repacking.needs_full_dequantization(dense, "none")
    assert repacking.by_default(mixture) == "none"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    assert repacking.by_default(replace(dense, dtype=torch.bfloat16)) == "none"


def test_a_gpu_uses_int8_where_int4_packs_little(checkpoints, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    described = describe(checkpoints("compressed")[0], "cpu", "bfloat16", silent)
    assert repacking.by_default(described) == "int4"
    # The matrices have 64 columns; int4 on a GPU needs a multiple of 128.
    assert repacking.by_default(replace(described, device=torch.device("cuda"))) == "int8"


@pytest.mark.parametrize(("quantize", "expected"), [("auto", True), ("int4", True), ("none", False)])
def test_a_gpu_plan_counts_unpacked_weights_if_they_are_repacked(checkpoints, monkeypatch, quantize, expected):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    monkeypatch.setattr(available, "free_bytes", lambda device: 2**30)
    on_gpu = replace(describe(checkpoints("fp8")[0], "cpu", "bfloat16", silent), device=torch.device("cuda"))
    monkeypatch.setattr(plan, "describe", lambda *_: on_gpu)
    planned = memory_plan(Load(checkpoints("fp8")[0], quantize=quantize), 64, silent)
    assert planned.unpacked == (planned.weights["none"] if expected else 0)


@pytest.mark.parametrize("quantize", ["auto", "none"])
def test_fp8_loads_on_a_cpu_despite_an_fp8_gpu(checkpoints, monkeypatch, quantize):
    """transformers checks which devices the machine has, not which one the model runs on."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    folder, plain = checkpoints("fp8")
    model = load(folder, quantize)
    assert (
        relative_error(sample_logits(model.model), sample_logits(loaded(plain, model.weights or "none").model)) < 1e-4
    )


@needs_compressed
@pytest.mark.parametrize(
    ("name", "is_ignored"),
    [
        ("mlp.up_proj.input_scale", True),
        ("mlp.up_proj.input_global_scale", True),
        ("self_attn.k_scale", True),
        ("mlp.up_proj.weight_g_idx", False),  # columns are in another order
    ],
)
def test_activation_and_kv_scales_are_ignored(checkpoints, tmp_path, name, is_ignored):
    folder = shutil.copytree(checkpoints("compressed")[0], tmp_path, dirs_exist_ok=True)
    stored = safetensors.torch.load_file(folder / "model.safetensors")
    stored_weights.write(folder, stored | {f"model.layers.1.{name}": torch.ones(1)}, PACKED_4)
    refused = pytest.raises(ModelError, match=f" 1 tensor, .*layers.1.{name}")
    with contextlib.nullcontext() if is_ignored else refused:
        assert load(str(folder)).fingerprint == loaded(checkpoints("compressed")[0]).fingerprint


def test_fp8_cannot_be_loaded_as_nf4(checkpoints):
    folder, _ = checkpoints("fp8")
    with pytest.raises(ModelError, match="fp8"):
        load(folder, "nf4")


@pytest.mark.parametrize("name", ["fp8", "fp8 mixture", "mxfp4"])
def test_each_weight_is_packed_as_soon_as_it_is_unpacked(checkpoints, monkeypatch, name):
    """Nothing is left to pack after reading."""
    left, genuine = [], repacking.pack

    def pack(model, config, described, devices):
        chosen = [linear.weight for linear in PACKINGS[config.quant_method].linears(model)]
        stacks = [stack.weight for _, stack in packing.chosen_stacks(model, config.quant_method)]
        left.append([weight for weight in (*chosen, *stacks) if weight.is_floating_point()])
        genuine(model, config, described, devices)

    monkeypatch.setattr(repacking, "pack", pack)
    load(checkpoints(name)[0])
    assert left == [[]]


def test_scales_of_packed_weights_keep_their_dtype():
    model = tiny_models.fresh("llama")
    packed, plain = model.model.layers[0].self_attn.q_proj, model.model.layers[1].self_attn.q_proj
    packed.weight.data = packed.weight.data.to(torch.float8_e4m3fn)
    packed.weight_scale_inv = torch.nn.Parameter(torch.ones(2, 2))
    quantization.finish_loading(model, SimpleNamespace(quantization_config=FP8), torch.bfloat16)
    assert (packed.weight.dtype, packed.weight_scale_inv.dtype) == (torch.float8_e4m3fn, torch.float32)
    assert (plain.weight.dtype, model.dtype) == (torch.bfloat16, torch.bfloat16)
