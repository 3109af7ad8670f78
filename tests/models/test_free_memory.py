from __future__ import annotations

import pytest
import torch
from support import tiny_models, tiny_multimodal
from support.progress import silent

from kvchat.errors import DoesNotFitError
from kvchat.kv.memory import available
from kvchat.models import description, reading
from kvchat.models.load import load_model
from kvchat.protocol.messages import Load

CASES = {
    "experts": (lambda: tiny_models.fresh("mixtral", torch.bfloat16), "bfloat16", "int4"),
    "experts with biases": (lambda: tiny_models.fresh("gpt_oss"), "float32", "int8"),
    "no vision encoder is loaded": (lambda: tiny_multimodal.fresh("llava").bfloat16(), "bfloat16", "none"),
    "half of what is stored": (lambda: tiny_models.fresh("llama"), "bfloat16", "none"),
    "twice what is stored": (lambda: tiny_models.fresh("llama", torch.bfloat16), "float32", "none"),
    "packed": (lambda: tiny_models.fresh("llama"), "float32", "int8"),
}


@pytest.mark.parametrize("case", CASES)
def test_weights_are_refused_where_they_have_no_room(case, tmp_path, monkeypatch):
    build, dtype, quantize = CASES[case]
    tiny_multimodal.save(build(), tmp_path)
    asked = Load(str(tmp_path), "cpu", dtype, quantize=quantize)
    needed = load_model(asked, silent).weight_bytes
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
def test_a_quantization_is_named_that_fits(folder, monkeypatch, quantize, free, hint):
    monkeypatch.setattr(available, "host_free", lambda: free)
    described = description.describe(str(folder), "cpu", "float32", silent)
    with pytest.raises(DoesNotFitError, match=hint):
        raise reading.does_not_fit(described, quantize)


def test_what_is_larger_than_the_free_memory_of_the_machine_is_loaded_by_force_only(folder, monkeypatch):
    monkeypatch.setattr(available, "host_free", lambda: 1000)
    with pytest.raises(DoesNotFitError, match=r"memory.* 582 KiB.* 1000 B.*--force"):
        load_model(Load(str(folder), "cpu", "float32"), silent)
    assert load_model(Load(str(folder), "cpu", "float32", force=True), silent).layers


@pytest.mark.parametrize(("quantize", "taken"), [("none", "33.01"), ("int8", "19.66")])
def test_weights_larger_than_the_free_memory_of_a_gpu_are_refused_unread(small_gpu, quantize, taken):
    described = description.describe("bundled", "cuda", "auto", silent)
    with pytest.raises(DoesNotFitError, match=rf"bundled.*GPU X.* {taken}.* 1.91 MiB of 22.35"):
        reading.check(described, quantize)
