"""A pynvml with chosen GPUs: ``monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(...))``."""

from __future__ import annotations

import os
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

GiB = 2**30


class NvmlError(Exception):
    """Raised by a reading that the driver does not support."""


@dataclass(frozen=True)
class FakeGpu:
    """One GPU or MIG instance as NVML describes it; ``processes`` are pairs of process id and bytes or None."""

    name: str = "NVIDIA GeForce RTX 4090"
    memory: float = 24 * GiB
    used: float = GiB
    capability: tuple[int, int] = (8, 9)
    link: tuple[int, int] = (1, 16)
    link_max: tuple[int, int] = (4, 16)
    uuid: str = "GPU-4090"
    bus_id: str = "00000000:65:00.0"
    processes: tuple[tuple[int, int | None], ...] = ((1, 4 * GiB), (os.getpid(), 3 * GiB))


class FakeNvml:
    """Imitates the module pynvml. Functions in ``missing`` raise, and without a ``driver`` all of them do."""

    NVML_TEMPERATURE_GPU = 0
    NVML_PCIE_UTIL_TX_BYTES, NVML_PCIE_UTIL_RX_BYTES = 0, 1

    def __init__(self, *gpus: FakeGpu, missing: tuple[str, ...] = (), driver: str | None = "570.1") -> None:
        self._driver = driver
        self._missing = set(missing)
        self._readings: dict[str, Any] = {
            "nvmlInit": lambda: None,
            "nvmlSystemGetDriverVersion": lambda: driver,
            "nvmlDeviceGetCount": lambda: len(gpus),
            "nvmlDeviceGetHandleByIndex": lambda index: gpus[index],
            "nvmlDeviceGetHandleByUUID": lambda uuid: {gpu.uuid: gpu for gpu in gpus}[uuid],
            "nvmlDeviceGetName": lambda gpu: gpu.name,
            "nvmlDeviceGetMemoryInfo": lambda gpu: SimpleNamespace(total=int(gpu.memory), used=int(gpu.used)),
            "nvmlDeviceGetCudaComputeCapability": lambda gpu: gpu.capability,
            "nvmlDeviceGetCurrPcieLinkGeneration": lambda gpu: gpu.link[0],
            "nvmlDeviceGetCurrPcieLinkWidth": lambda gpu: gpu.link[1],
            "nvmlDeviceGetMaxPcieLinkGeneration": lambda gpu: gpu.link_max[0],
            "nvmlDeviceGetMaxPcieLinkWidth": lambda gpu: gpu.link_max[1],
            "nvmlDeviceGetPciInfo": lambda gpu: SimpleNamespace(busId=gpu.bus_id),
            "nvmlDeviceGetUtilizationRates": lambda gpu: SimpleNamespace(gpu=45),
            "nvmlDeviceGetTemperature": lambda gpu, sensor: {self.NVML_TEMPERATURE_GPU: 61}[sensor],
            "nvmlDeviceGetPowerUsage": lambda gpu: 123_400,
            "nvmlDeviceGetPcieThroughput": lambda gpu, counter: {
                self.NVML_PCIE_UTIL_RX_BYTES: 11_200_000,
                self.NVML_PCIE_UTIL_TX_BYTES: 300_000,
            }[counter],
            "nvmlDeviceGetComputeRunningProcesses": lambda gpu: [
                SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in gpu.processes
            ],
        }

    def __getattr__(self, name: str) -> Any:
        if name not in self._readings:
            raise AttributeError(name)

        def call(*arguments: object) -> Any:
            if self._driver is None or name in self._missing:
                raise NvmlError("Not Supported")
            return self._readings[name](*arguments)

        return call
