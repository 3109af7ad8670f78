from types import SimpleNamespace

import pytest
import torch
from support import tiny_models, tiny_multimodal
from support.message import lacks
from support.progress import silent
from transformers import Gemma3TextConfig

from kvchat.errors import DoesNotFitError, UsageError
from kvchat.kv.memory import available
from kvchat.models import description, reading
from kvchat.models.description import resolve_device, resolve_dtype, resolve_others
from kvchat.models.load import load_model
from kvchat.protocol.messages import Load

CASES = {
    "experts": (lambda: tiny_models.fresh("mixtral", torch.bfloat16), "bfloat16", "int4"),
    "experts with biases": (lambda: tiny_models.fresh("gpt_oss"), "float32", "int8"),
    "no vision encoder is loaded": (lambda: tiny_multimodal.fresh("llava").bfloat16(), "bfloat16", "none"),
    "half the stored size": (lambda: tiny_models.fresh("llama"), "bfloat16", "none"),
    "twice the stored size": (lambda: tiny_models.fresh("llama", torch.bfloat16), "float32", "none"),
    "quantized": (lambda: tiny_models.fresh("llama"), "float32", "int8"),
}


@pytest.mark.parametrize("case", CASES)
def test_weights_that_do_not_fit_are_refused(case, tmp_path, monkeypatch):
    build, dtype, quantize = CASES[case]
    tiny_multimodal.save(build(), tmp_path)
    request = Load(str(tmp_path), "cpu", dtype, quantize=quantize)
    needed = load_model(request, silent).weight_bytes
    monkeypatch.setattr(available, "host_free", lambda: int(0.99 * needed))
    described = description.describe(str(tmp_path), "cpu", dtype, silent)
    with pytest.raises(DoesNotFitError, match=r"this machine's memory.* take"):
        reading.check(described, quantize)
    monkeypatch.setattr(available, "host_free", lambda: int(1.01 * needed))
    reading.check(described, quantize)


@pytest.mark.parametrize(
    ("quantize", "free", "hint"),
    [
        ("none", 300_000, r"smaller model or --quantize int8 \(193 KiB\), or free"),
        ("int8", 200_000, r"smaller model or --quantize int4 \(140 KiB\), or free"),
        ("none", 1000, "smaller model, or free"),
        ("int4", 100_000, "smaller model, or free"),
    ],
)
def test_the_error_names_a_quantization_that_fits(folder, monkeypatch, quantize, free, hint):
    monkeypatch.setattr(available, "host_free", lambda: free)
    described = description.describe(str(folder), "cpu", "float32", silent)
    with pytest.raises(DoesNotFitError, match=hint):
        raise reading.does_not_fit(described, quantize)


def test_weights_larger_than_free_memory_need_force(folder, monkeypatch):
    monkeypatch.setattr(available, "host_free", lambda: 1000)
    with pytest.raises(DoesNotFitError, match=r"memory.* 582 KiB.* 1000 B.*--force"):
        load_model(Load(str(folder), "cpu", "float32"), silent)
    assert load_model(Load(str(folder), "cpu", "float32", force=True), silent).layers


@pytest.mark.parametrize(("quantize", "taken"), [("none", "33.01"), ("int8", "19.63")])
def test_weights_larger_than_free_gpu_memory_are_refused(small_gpu, quantize, taken):
    described = description.describe("bundled", "cuda", "auto", silent)
    with pytest.raises(DoesNotFitError, match=rf"bundled.*GPU X.* {taken}.* 1.91 MiB of 22.35"):
        reading.check(described, quantize)


# ---- The settings "device" and "dtype"


@pytest.mark.parametrize(("device", "message"), [("gpu", '"gpu"'), ("meta", '"meta"'), ("cuda:x", '"cuda:x"')])
def test_an_unknown_device_is_refused(device, message):
    with pytest.raises(UsageError, match=message):
        resolve_device(device)


def test_cuda_without_a_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert resolve_device("auto") == torch.device("cpu")
    with pytest.raises(UsageError, match='no device "cuda"'):
        resolve_device("cuda")


def test_a_missing_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve_device("auto") == resolve_device("cuda") == torch.device("cuda:0")
    assert resolve_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(UsageError, match="2 GPU"):
        resolve_device("cuda:2")


def test_layers_go_to_the_other_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    second = torch.device("cuda:1")
    assert resolve_others(second, 1) == ()
    assert resolve_others(second, 3) == (torch.device("cuda:0"), torch.device("cuda:2"))
    with pytest.raises(UsageError, match="sees 3"):
        resolve_others(second, 4)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match="sees 0 GPUs"):
        resolve_others(torch.device("cpu"), 2)


@pytest.mark.parametrize(
    ("device", "capability", "own", "expected"),
    [
        ("cuda", (8, 0), torch.bfloat16, torch.bfloat16),
        ("cuda", (7, 5), torch.bfloat16, torch.float16),
        ("cuda", (7, 5), torch.float32, torch.float32),
        ("cuda", (8, 0), None, torch.float32),
        ("cpu", None, torch.bfloat16, torch.float32),
    ],
)
def test_auto_dtype_depends_on_device_and_model(monkeypatch, device, capability, own, expected):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    config = SimpleNamespace(dtype=own, model_type="llama")
    config.get_text_config = lambda decoder: config
    assert resolve_dtype("auto", config, torch.device(device)) == expected


def test_gemma_3_is_refused_in_float16():
    config = Gemma3TextConfig()
    with pytest.raises(UsageError, match=r"float16.*65,504"):
        resolve_dtype("float16", config, torch.device("cpu"))
    config.dtype = torch.float16
    assert resolve_dtype("auto", config, torch.device("cuda")) == torch.float32


# ---- The dtype of "auto" on a CPU: measured for large models, with a note, and float32 for small ones


CPU = torch.device("cpu")


def config(rows: int, columns: int, own: torch.dtype | None = torch.bfloat16) -> SimpleNamespace:
    result = SimpleNamespace(dtype=own, intermediate_size=rows, hidden_size=columns)
    result.get_text_config = lambda decoder: result
    return result


@pytest.mark.parametrize(
    ("exact", "half", "chosen"),
    [(20.0, 10.0, torch.bfloat16), (20.0, 19.0, torch.float32), (10.0, 20.0, torch.float32)],
)
def test_auto_dtype_takes_bfloat16_if_clearly_faster(monkeypatch, exact, half, chosen):
    monkeypatch.setattr(description, "milliseconds", lambda rows, columns: (exact, half))
    large = config(14336, 4096)
    assert resolve_dtype("auto", large, CPU) == chosen
    note = description.note("auto", chosen, large)
    assert bool(note) == (chosen == torch.bfloat16)
    assert not note or not lacks(note, "10.0 ms", "20.0 ms", "model.dtype = float32")
    assert resolve_dtype("bfloat16", large, CPU) == torch.bfloat16
    assert description.note("bfloat16", torch.bfloat16, large) == ""


@pytest.mark.parametrize(
    "small", [config(1024, 384), config(0, 4096), config(14336, 4096, torch.float32), config(14336, 4096, None)]
)
def test_small_and_other_models_are_not_measured(monkeypatch, small):
    monkeypatch.setattr(description, "milliseconds", None)
    assert resolve_dtype("auto", small, CPU) == torch.float32


def test_both_dtypes_are_measured_once(monkeypatch):
    description.milliseconds.cache_clear()
    called, linear = [], description.one_product
    monkeypatch.setattr(description, "one_product", lambda *args: called.append(args) or linear(*args))
    first = description.milliseconds(64, 32)
    assert description.milliseconds(64, 32) == first
    assert len(called) == description.ROUNDS
    assert all(0 < time < float("inf") for time in first)
