"""GPUs of your choice, as NVML names them."""

from __future__ import annotations

import sys

import pytest
from support.fake_nvml import FakeGpu, FakeNvml, GiB
from support.gpu_profiles import Install

from kvchat.config import profiles
from kvchat.config.profiles import Device


@pytest.fixture(autouse=True)
def torch_with_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiles, "_torch_without_cuda", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Makes these the GPUs that NVML knows; readings in ``missing`` raise, as NVML does."""

    def install(*gpus: Device, missing: tuple[str, ...] = ()) -> None:
        fakes = (_fake(gpu, f"GPU-{number}") for number, gpu in enumerate(gpus))
        monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(*fakes, missing=missing))

    install()
    return install


def _fake(gpu: Device, uuid: str) -> FakeGpu:
    major, minor = map(int, gpu.compute_capability.split("."))
    link = (gpu.pcie_generation, gpu.pcie_width)
    return FakeGpu(gpu.name, gpu.memory * GiB, capability=(major, minor), link_max=link, uuid=uuid)
