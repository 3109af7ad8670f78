"""NVML readings of the GPU in use. A reading that is not to be had is None, never 0."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from kvchat.protocol.messages import Gpu

T = TypeVar("T")


class GpuReader:
    """Reads one CUDA device, found by its UUID, because NVML does not know of ``CUDA_VISIBLE_DEVICES``."""

    def __init__(self, device: torch.device) -> None:
        self._handle: Any = None
        self._name = ""
        if device.type != "cuda":
            return
        properties = torch.cuda.get_device_properties(device)
        self._name = properties.name
        self._handle = _or_none(lambda: _find(str(properties.uuid)))

    def read(self) -> Gpu | None:
        """A reading, None where there is no GPU."""
        if not self._name:
            return None
        if self._handle is None:
            return Gpu(self._name)
        import pynvml

        memory = _or_none(lambda: pynvml.nvmlDeviceGetMemoryInfo(self._handle))
        power = _or_none(lambda: pynvml.nvmlDeviceGetPowerUsage(self._handle))
        return Gpu(
            name=self._name,
            used=memory.used if memory else None,
            total=memory.total if memory else None,
            process=_or_none(self._process_bytes),
            utilization=_or_none(lambda: int(pynvml.nvmlDeviceGetUtilizationRates(self._handle).gpu)),
            temperature=_or_none(
                lambda: int(pynvml.nvmlDeviceGetTemperature(self._handle, pynvml.NVML_TEMPERATURE_GPU))
            ),
            power=None if power is None else power / 1000,
        )

    def _process_bytes(self) -> int | None:
        import pynvml

        processes = pynvml.nvmlDeviceGetComputeRunningProcesses(self._handle)
        # In a container NVML lists process numbers of the host, so ours may not be among them.
        return next((p.usedGpuMemory for p in processes if p.pid == os.getpid()), None)


def _find(uuid: str) -> Any:
    import pynvml

    pynvml.nvmlInit()
    return pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}")


def _or_none(reading: Callable[[], T]) -> T | None:
    """A reading, or None where the driver or the library does not give it."""
    try:
        return reading()
    except Exception:  # noqa: BLE001  # NVML raises a class per error code; all mean: not to be had
        return None
