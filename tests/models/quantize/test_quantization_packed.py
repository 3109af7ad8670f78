"""Checkpoints in GPTQ and AWQ format, packed by this file; gptqmodel multiplies by them without unpacking."""

import importlib.util

import pytest
import safetensors.torch
import torch
from support import tiny_runner
from support.model_folders import listed_bytes, planned_bytes, set_quantization
from support.progress import silent
from support.tiny_runner import mode_of, prefill_logits, token_ids

from kvchat.engine.runner import ModelRunner
from kvchat.models.fuse.modules import sample_logits
from kvchat.models.load import load_model
from kvchat.models.probe import relative_error
from kvchat.protocol.messages import Load

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("gptqmodel", "optimum")),
    reason="gptqmodel and optimum are not installed",
)
GROUP, ZERO = 32, 8
CLOSE = 2e-3  # gptqmodel multiplies in 16 bits
WORD_ORDER = {"gptq": range(8), "awq": (0, 2, 4, 6, 1, 3, 5, 7)}  # the order of eight numbers in a word
FORMATS = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True, "desc_act": False},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
}


def words(codes, order):
    """Eight codes of the last dimension in each int32."""
    eights = codes.unflatten(-1, (-1, 8))[..., list(order)].long()
    packed = (eights << torch.arange(0, 32, 4)).sum(-1)
    return torch.where(packed >= 2**31, packed - 2**32, packed).int().contiguous()


def packed(method, weight):
    """A weight's stored tensors, and its unpacked values."""
    rows, columns = weight.shape
    groups = weight.detach().view(rows, -1, GROUP)
    scales = (groups.abs().amax(-1) / 7).half()
    codes = (groups / scales.float()[..., None]).round().clamp(-8, 7)
    rounded = (codes * scales.float()[..., None]).view(rows, columns)
    by_column = (codes.view(rows, columns) + ZERO).t()
    zeros = torch.full((columns // GROUP, rows), ZERO)
    order = WORD_ORDER[method]
    stored = {"scales": scales.t().contiguous()}
    if method == "gptq":  # its words run down the columns, and its zeros are stored minus one
        down = words(by_column.t(), order).t().contiguous()
        stored |= {"qweight": down, "qzeros": words(zeros - 1, order)}
        stored["g_idx"] = (torch.arange(columns) // GROUP).int()
    else:
        stored |= {"qweight": words(by_column, order), "qzeros": words(zeros, order)}
    return stored, rounded


@pytest.fixture(params=FORMATS)
def checkpoint(llama_folder, request):
    """The tiny Llama in one format, and the same model with the unpacked weights."""
    stored, rounded = {}, tiny_runner.load_tiny("llama")
    for name, parameter in rounded.model.named_parameters():
        if "_proj" in name:
            tensors, parameter.data = packed(request.param, parameter)
            stored |= {name.replace("weight", part): tensor for part, tensor in tensors.items()}
        else:
            stored[name] = parameter.detach().clone()
    safetensors.torch.save_file(stored, llama_folder / "model.safetensors", {"format": "pt"})
    set_quantization(llama_folder, FORMATS[request.param])
    return llama_folder, rounded, request.param


@pytest.mark.slow("gptqmodel compiles its kernel once per machine")
def test_packed_checkpoints_compute_like_their_unpacked_weights(checkpoint, capfd):
    folder, rounded, method = checkpoint
    loaded = load_model(Load(str(folder), "cpu", "float32"), silent)
    assert capfd.readouterr().out == ""
    assert loaded.weights == method
    assert planned_bytes(folder, "float32") == pytest.approx(loaded.weight_bytes, rel=0.02)
    assert listed_bytes(folder, "float32") == pytest.approx(loaded.weight_bytes, rel=0.02)
    assert relative_error(sample_logits(loaded.model), sample_logits(rounded.model)) < CLOSE
    errors = {
        row: relative_error(*(decoded(ModelRunner(model, mode_of(model, row))) for model in (loaded, rounded)))
        for row in tiny_runner.PARAMS
    }
    assert max(errors.values()) < 10 * CLOSE, errors  # a mode may read a different token of almost equal weight


def decoded(runner):
    """The logits after a prefill of 160 tokens and 20 decoded ones."""
    ids = token_ids(180)
    return torch.stack([prefill_logits(runner, ids[:160]), *map(runner.step, ids[160:])])
