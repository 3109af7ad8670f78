"""The only reader of NVML, NVIDIA's management library. A missing reading is None, never 0.

NVML numbers the GPUs of the machine and ignores ``CUDA_VISIBLE_DEVICES``. Importing this module loads neither torch nor
pynvml: pynvml is imported by the first reading.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeVar

from kvchat.protocol.figures import Gpu

T = TypeVar("T")


@dataclass(frozen=True)
class PcieLink:
    """A PCIe link's generation and its width in lanes."""

    generation: int | None = None
    width: int | None = None


@dataclass(frozen=True)
class GpuInfo:
    """A GPU: memory in bytes, PCI address, and its PCIe link. An idle GPU runs its link below ``link_max``."""

    name: str | None = None
    memory: int | None = None
    memory_used: int | None = None
    compute_capability: tuple[int, int] | None = None
    bus_id: str | None = None
    link: PcieLink = PcieLink()
    link_max: PcieLink = PcieLink()


@dataclass(frozen=True)
class PcieTraffic:
    """Traffic over the PCIe link, in bytes per second."""

    to_device: int | None = None
    to_host: int | None = None


class GpuReader:
    """Readings of one GPU; all are None if NVML does not find it.

    ``device`` is NVML's number of the GPU ("0"), or the UUID of a GPU or MIG instance, with or without the prefix
    "GPU-" or "MIG-" (torch has it without).
    """

    def __init__(self, device: str) -> None:
        self._nvml = _library()
        handles = map(self._find, _names(device))
        self._handle = next((handle for handle in handles if handle is not None), None)

    @property
    def found(self) -> bool:
        """True if NVML found this GPU."""
        return self._handle is not None

    def info(self) -> GpuInfo:
        """Read the GPU's properties."""
        return GpuInfo(
            name=self._read("nvmlDeviceGetName", str),
            memory=self._read("nvmlDeviceGetMemoryInfo", lambda info: int(info.total)),
            memory_used=self._read("nvmlDeviceGetMemoryInfo", lambda info: int(info.used)),
            compute_capability=self._read(
                "nvmlDeviceGetCudaComputeCapability", lambda pair: (int(pair[0]), int(pair[1]))
            ),
            bus_id=self._read("nvmlDeviceGetPciInfo", lambda info: str(info.busId)),
            link=self._link("Curr"),
            link_max=self._link("Max"),
        )

    def usage(self, name: str) -> Gpu:
        """Read the load of the GPU, shown as ``name``."""
        memory = self._read("nvmlDeviceGetMemoryInfo", lambda info: (int(info.used), int(info.total)))
        used, total = memory or (None, None)
        return Gpu(
            name,
            used=used,
            total=total,
            process=self._read("nvmlDeviceGetComputeRunningProcesses", _own_bytes),
            utilization=self._read("nvmlDeviceGetUtilizationRates", lambda rates: int(rates.gpu)),
            temperature=self._read("nvmlDeviceGetTemperature", int, "NVML_TEMPERATURE_GPU"),
            power=self._read("nvmlDeviceGetPowerUsage", lambda milliwatts: milliwatts / 1000),
        )

    def pcie(self) -> PcieTraffic:
        """Measure the traffic on the PCIe link, which takes NVML 20 ms in each direction."""
        counters = ("NVML_PCIE_UTIL_RX_BYTES", "NVML_PCIE_UTIL_TX_BYTES")
        return PcieTraffic(
            *(self._read("nvmlDeviceGetPcieThroughput", lambda kilobytes: 1000 * int(kilobytes), c) for c in counters)
        )

    def _find(self, name: str) -> Any:
        if name.isdigit():
            return _or_none(lambda: self._nvml.nvmlDeviceGetHandleByIndex(int(name)))
        return _or_none(lambda: self._nvml.nvmlDeviceGetHandleByUUID(name))

    def _link(self, when: str) -> PcieLink:
        names = (f"nvmlDeviceGet{when}PcieLink{what}" for what in ("Generation", "Width"))
        return PcieLink(*(self._read(name, int) for name in names))

    def _read(self, function: str, convert: Callable[[Any], T], *constants: str) -> T | None:
        """Call NVML's ``function`` for this GPU and convert the result; ``constants`` name further arguments."""
        if self._handle is None:
            return None
        nvml = self._nvml
        return _or_none(lambda: convert(getattr(nvml, function)(self._handle, *(getattr(nvml, c) for c in constants))))


def visible_gpu(number: int = 0, environ: Mapping[str, str] = os.environ) -> GpuReader | None:
    """Return the GPU with CUDA's ``number``; None if NVML does not find it or ``CUDA_VISIBLE_DEVICES`` hides it.

    Without ``CUDA_VISIBLE_DEVICES``, NVML's order is used, which may differ from CUDA's (fastest first).
    """
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(number)] if visible is None else [name.strip() for name in visible.split(",")][number : number + 1]
    return next((reader for reader in map(GpuReader, names) if reader.found), None)


def all_gpus() -> tuple[GpuReader, ...]:
    """Return every GPU of the machine in NVML's order, including those that ``CUDA_VISIBLE_DEVICES`` hides."""
    nvml = _library()
    count = _or_none(lambda: int(nvml.nvmlDeviceGetCount())) or 0
    return tuple(reader for number in range(count) if (reader := GpuReader(str(number))).found)


def driver_version() -> str | None:
    """Return the version of the NVIDIA driver; None without one."""
    nvml = _library()
    return _or_none(lambda: str(nvml.nvmlSystemGetDriverVersion()))


def _library() -> Any:
    """Return pynvml, initialized, or None without a driver."""

    def initialized() -> ModuleType:
        import pynvml

        pynvml.nvmlInit()
        return pynvml  # type: ignore[no-any-return]  # it has no types

    return _or_none(initialized)


def _names(device: str) -> tuple[str, ...]:
    """Return the names under which NVML may know ``device``."""
    if device.isdigit() or device.startswith(("GPU-", "MIG-")):
        return (device,)
    return (f"GPU-{device}", f"MIG-{device}")


def _own_bytes(processes: Any) -> int | None:
    # In a container, NVML lists the host's process ids, which may not include this process's.
    return next((process.usedGpuMemory for process in processes if process.pid == os.getpid()), None)


def _or_none(reading: Callable[[], T]) -> T | None:
    try:
        return reading()
    except Exception:  # noqa: BLE001  # no library, no driver, or NVML's own error class
        return None
