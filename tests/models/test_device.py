"""The settings "device" and "dtype"."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import Gemma3TextConfig

from kvchat.errors import UsageError
from kvchat.models.description import resolve_device, resolve_dtype


@pytest.mark.parametrize(("device", "message"), [("gpu", '"gpu"'), ("meta", '"meta"'), ("cuda:x", '"cuda:x"')])
def test_a_device_that_is_not(device, message):
    with pytest.raises(UsageError, match=message):
        resolve_device(device)


def test_cuda_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert resolve_device("auto") == torch.device("cpu")
    with pytest.raises(UsageError, match='no device "cuda"'):
        resolve_device("cuda")


def test_a_gpu_that_is_not(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve_device("auto") == resolve_device("cuda") == torch.device("cuda:0")
    assert resolve_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(UsageError, match="2 GPU"):
        resolve_device("cuda:2")


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
def test_auto_dtype(monkeypatch, device, capability, own, expected):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    config = SimpleNamespace(dtype=own, model_type="llama")
    config.get_text_config = lambda decoder: config
    assert resolve_dtype("auto", config, torch.device(device)) == expected


def test_gemma_3_is_refused_in_float16_before_its_weights_are_read():
    config = Gemma3TextConfig()
    with pytest.raises(UsageError, match=r"float16.*65,504"):
        resolve_dtype("float16", config, torch.device("cpu"))
    config.dtype = torch.float16
    assert resolve_dtype("auto", config, torch.device("cuda")) == torch.float32
