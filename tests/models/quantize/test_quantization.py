"""8-bit and 4-bit weights, and quantized checkpoints; real ones if the libraries are installed."""

import importlib.util

import pytest
import torch
from support import tiny_models, tiny_multimodal
from support.model_folders import listed_bytes, planned_bytes, set_quantization
from support.progress import silent

from kvchat import libraries
from kvchat.engine.plan import memory_plan
from kvchat.errors import ModelError, UsageError
from kvchat.models import attention_hook
from kvchat.models.fuse.modules import projections, sample_logits
from kvchat.models.load import load_model
from kvchat.models.probe import relative_error, selftest
from kvchat.models.quantize import quantization
from kvchat.protocol.messages import Load

needs_bitsandbytes = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("bitsandbytes", "accelerate")),
    reason="bitsandbytes is not installed",
)
QUANTIZED = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128, "dataset": "c4"},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128},
    "compressed-tensors": {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {}},
    "bitsandbytes": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
}


# ---- choices and refusals --------------------------------------------------------------------------


def test_an_unknown_quantization_is_refused():
    with pytest.raises(UsageError, match=r'"int9".*"int8"'):
        load_model(Load("bundled", "cpu", quantize="int9"), silent)


def test_missing_bitsandbytes_names_the_install_command(nothing_installed):
    with pytest.raises(UsageError, match=r"bnb.*pip install 'bitsandbytes>"):
        load_model(Load("bundled", "cpu", quantize="nf4"), silent)


def test_quantizing_a_quantized_model_is_refused(llama_folder):
    set_quantization(llama_folder, QUANTIZED["gptq"])
    with pytest.raises(ModelError, match=r"gptq.*--quantize"):
        load_model(Load(str(llama_folder), "cpu", quantize="nf4"), silent)


@pytest.mark.parametrize(
    ("method", "package", "message"),
    [
        ("gptq", "optimum", "package.*pip install 'gptqmodel>"),
        ("awq", "gptqmodel", "package.*pip install 'gptqmodel>"),
        ("compressed-tensors", "compressed_tensors", r"package.*pip install .?compressed-tensors.*\d'?$"),
        ("bitsandbytes", "bitsandbytes", "pip install 'bitsandbytes>"),
    ],
)
def test_checkpoints_with_a_missing_package_name_the_command(llama_folder, method, package, message):
    if importlib.util.find_spec(package):
        pytest.skip(f"{package} is installed")
    set_quantization(llama_folder, QUANTIZED[method])
    with pytest.raises(ModelError, match=message):
        load_model(Load(str(llama_folder), "cpu"), silent)


def test_plain_weights_that_bitsandbytes_should_have_packed_are_refused(llama_folder):
    set_quantization(llama_folder, QUANTIZED["bitsandbytes"])
    for use in (load_model, lambda load, progress: memory_plan(load, 64, progress)):
        with pytest.raises(ModelError, match=r"not quantized.*bitsandbytes.*Remove"):
            use(Load(str(llama_folder), "cpu"), silent)


def test_unquantized_weights_have_no_description():
    assert quantization.describe(tiny_models.model("llama")) == ""


# ---- with bitsandbytes -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def nf4():
    return load_model(Load("bundled", "cpu", quantize="nf4"), silent)


@needs_bitsandbytes
def test_the_bundled_model_loads_in_nf4(nf4, model):
    assert (nf4.weights, model.weights) == ("nf4", "")
    assert (nf4.dtype, nf4.device) == (torch.float32, torch.device("cpu"))
    assert nf4.model.num_parameters() == model.model.num_parameters()
    assert selftest(nf4.model) < 0.01
    # 4 bits and a float32 scale per block of 64 for the layers, float32 for the embedding
    embedding = model.model.get_input_embeddings().weight.nbytes
    layers = sum(p.numel() for p in model.model.model.layers.parameters() if p.dim() == 2)
    assert nf4.weight_bytes == pytest.approx(embedding + layers * (0.5 + 4 / 64), rel=0.01)


@needs_bitsandbytes
def test_nf4_logits_are_near_those_of_dequantized_weights(nf4):
    """The reference has weights rounded to nf4 by bitsandbytes itself, in ordinary Linears."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    plain = load_model(Load("bundled", "cpu", fast=False), silent).model
    before = sample_logits(plain)
    for parameter in plain.model.layers.parameters():
        if parameter.dim() == 2:
            parameter.data = dequantize_4bit(*quantize_4bit(parameter.data, blocksize=64, quant_type="nf4"))
    rounded = sample_logits(plain)
    assert relative_error(sample_logits(nf4.model), rounded) < 0.02 < 0.1 < relative_error(rounded, before)


@needs_bitsandbytes
def test_nf4_accepts_row_counts_that_some_kernels_do_not(tmp_path):
    tiny_multimodal.save(tiny_models.fresh("qwen3_5", vocab_size=8192), tmp_path)
    loaded = load_model(Load(str(tmp_path), "cpu", "float32", quantize="nf4"), silent)
    assert any(module.out_features % 32 for module in loaded.model.modules() if "Linear4bit" in type(module).__name__)
    assert loaded.weights == "nf4"


@needs_bitsandbytes
def test_nf4_projections_are_not_merged(nf4):
    assert nf4.fused == "norms, rope"


@needs_bitsandbytes
def test_a_stored_nf4_checkpoint_loads_unchanged(nf4, tmp_path):
    tiny_multimodal.save(nf4.model, tmp_path)
    again = load_model(Load(str(tmp_path), "cpu"), silent)
    assert planned_bytes(tmp_path) == pytest.approx(again.weight_bytes, rel=0.02)
    assert listed_bytes(tmp_path) == pytest.approx(again.weight_bytes, rel=0.02)
    assert (again.weights, again.weight_bytes) == ("nf4", nf4.weight_bytes)
    assert relative_error(sample_logits(again.model), sample_logits(nf4.model)) < 1e-5


@needs_bitsandbytes
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_stored_8_bit_checkpoint_gets_the_requested_dtype(llama_folder, dtype, caplog):
    import transformers

    chosen = transformers.BitsAndBytesConfig(load_in_8bit=True)
    transformers.AutoModelForCausalLM.from_pretrained(
        llama_folder, dtype=torch.bfloat16, quantization_config=chosen, device_map="cpu"
    ).save_pretrained(llama_folder)
    loaded = load_model(Load(str(llama_folder), "cpu", dtype), silent)
    assert (loaded.weights, str(loaded.dtype)) == ("bitsandbytes", f"torch.{dtype}")
    assert planned_bytes(llama_folder, dtype) == pytest.approx(loaded.weight_bytes, rel=0.02)
    assert listed_bytes(llama_folder, dtype) == pytest.approx(loaded.weight_bytes, rel=0.02)
    caplog.clear()
    sample_logits(loaded.model)
    assert caplog.text == ""


@needs_bitsandbytes
@pytest.mark.cuda
def test_nf4_loads_on_a_gpu():
    loaded = load_model(Load("bundled", "cuda", quantize="nf4"), silent)
    assert (loaded.weights, loaded.device.type) == ("nf4", "cuda")
    assert {parameter.device.type for parameter in loaded.model.parameters()} == {"cuda"}


# ---- int8 and int4 by torchao ----------------------------------------------------------------------

needs_torchao = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("torchao", "accelerate")), reason="torchao is not installed"
)


@pytest.fixture(scope="module")
def int8():
    return load_model(Load("bundled", "cpu", quantize="int8"), silent)


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_missing_torchao_on_a_gpu_names_the_install_command(nothing_installed, quantize):
    with pytest.raises(UsageError, match=r"ao.*pip install 'torchao>"):
        quantization.resolve(quantize, tiny_models.config("llama"), torch.bfloat16, torch.device("cuda"))


@pytest.mark.parametrize(
    ("dtype", "capability", "refusal"),
    [(torch.float16, (9, 0), r"bfloat16.* float16"), (torch.bfloat16, (7, 5), r"8\.0.*7\.5.*int8 or nf4")],
)
def test_unsupported_int4_on_a_gpu_is_refused(monkeypatch, dtype, capability, refusal):
    monkeypatch.setattr(libraries, "absent", lambda name: [])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    cuda = torch.device("cuda")
    with pytest.raises(UsageError, match=refusal):
        quantization.resolve("int4", tiny_models.config("llama"), dtype, cuda)


@needs_torchao
def test_int8_and_int4_on_a_gpu_use_torchao(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    config, cuda = tiny_models.config("llama"), torch.device("cuda")
    for quantize in ("int8", "int4"):
        chosen = quantization.resolve(quantize, config, torch.bfloat16, cuda)
        assert chosen.method == "torchao"
        assert type(chosen.options["quantization_config"].quant_type).__name__.lower().startswith(quantize)


@needs_torchao
@pytest.mark.parametrize(("kind", "name", "dtype"), [("Int8", "int8", "float32"), ("Float8", "torchao", "bfloat16")])
def test_torchao_checkpoints_stay_packed(llama_folder, kind, name, dtype):
    import torchao.quantization
    import transformers

    chosen = transformers.TorchAoConfig(getattr(torchao.quantization, f"{kind}WeightOnlyConfig")())
    packed = transformers.AutoModelForCausalLM.from_pretrained(
        llama_folder,
        dtype=torch.bfloat16,
        quantization_config=chosen,
        device_map="cpu",
        attn_implementation=attention_hook.NAME,
    )
    packed.save_pretrained(llama_folder)
    loaded = load_model(Load(str(llama_folder), "cpu"), silent)
    assert (loaded.weights, str(loaded.dtype)) == (name, f"torch.{dtype}")
    assert planned_bytes(llama_folder) == pytest.approx(loaded.weight_bytes, rel=0.02)
    assert listed_bytes(llama_folder) == pytest.approx(loaded.weight_bytes, rel=0.03)
    assert relative_error(sample_logits(loaded.model), sample_logits(packed)) < 0.03
    if name == "torchao":
        with pytest.raises(UsageError, match=r"bfloat16.* float32.*--dtype bfloat16"):
            load_model(Load(str(llama_folder), "cpu", "float32"), silent)


# ---- int8 and int4 on a CPU ------------------------------------------------------------------------


def test_the_bundled_model_loads_in_int8(int8, model):
    assert (int8.weights, int8.dtype, int8.notes) == ("int8", torch.float32, model.notes)
    # a float16 scale per 32 weights; the head's weights are also the embeddings
    linears = [m.weight for m in model.model.modules() if isinstance(m, torch.nn.Linear)]
    expected = sum(w.numel() * 34 // 32 for w in linears)
    assert int8.weight_bytes == pytest.approx(expected, rel=0.002)
    assert selftest(int8.model) < 0.02


def test_int8_projections_are_merged_in_fused_layers(int8):
    attention = int8.model.model.layers[0].self_attn
    storages = {linear.weight.untyped_storage().data_ptr() for linear in projections(attention)}
    assert (int8.fused, int8.notes, len(storages)) == ("norms, merged projections, rope, fused layers", (), 1)


@pytest.fixture(scope="module")
def int4():
    return load_model(Load("bundled", "cpu", quantize="int4"), silent)


def test_the_bundled_model_loads_in_int4(int4, model):
    assert (int4.weights, int4.dtype, int4.notes) == ("int4", torch.float32, model.notes)
    assert int4.fused == "norms, merged projections, rope, fused layers"
    # 4 bits and a bfloat16 scale and zero per 32 weights of the layers; 8 bits of the head and the embeddings
    embedding = model.model.get_input_embeddings().weight.nbytes
    layers = sum(p.numel() for p in model.model.model.layers.parameters() if p.dim() == 2)
    assert int4.weight_bytes == pytest.approx(embedding * 34 / 128 + layers * 5 / 8, rel=0.003)
    assert memory_plan(Load("bundled", "cpu"), 64, silent).weights["int4"] == pytest.approx(
        int4.weight_bytes, rel=0.001
    )
    assert selftest(int4.model) < 0.01


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_quantizing_on_a_cpu_needs_no_package(nothing_installed, llama_folder, quantize):
    loaded = load_model(Load(str(llama_folder), "cpu", "bfloat16", quantize=quantize), silent)
    assert (loaded.weights, loaded.dtype) == (quantize, torch.bfloat16)
