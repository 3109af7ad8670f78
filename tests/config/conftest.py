"""GPUs of your choice, as NVML names them."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
from support.fake_nvml import FakeGpu, FakeNvml
from support.gpu_profiles import Install

from kvchat.config import profiles


@pytest.fixture(autouse=True)
def torch_with_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiles, "_torch_without_cuda", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Makes these the GPUs that NVML knows; readings in ``missing`` raise, as NVML does."""

    def install(*gpus: FakeGpu, missing: tuple[str, ...] = ()) -> None:
        numbered = (replace(gpu, uuid=f"GPU-{number}") for number, gpu in enumerate(gpus))
        monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(*numbered, missing=missing))

    install()
    return install
