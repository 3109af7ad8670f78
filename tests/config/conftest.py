"""GPUs that a test chooses, as NVML reports them."""

import sys
from dataclasses import replace

import pytest
from support.fake_nvml import FakeNvml

from kvchat.config import profiles


@pytest.fixture(autouse=True)
def torch_with_cuda(monkeypatch):
    monkeypatch.setattr(profiles, "_torch_without_cuda", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.fixture
def nvml(monkeypatch):
    """Sets the GPUs that NVML reports; readings in ``missing`` raise NVML's errors."""

    def install(*gpus, missing=()):
        numbered = (replace(gpu, uuid=f"GPU-{number}") for number, gpu in enumerate(gpus))
        monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(*numbered, missing=missing))

    install()
    return install
