"""The environment of a measurement: hardware and versions, kept beside every number."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

import kvchat
from kvchat import nvml


def fingerprint(device: torch.device) -> dict[str, Any]:
    """Return processor, GPU, threads and versions."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "driver": nvml.driver_version() if device.type == "cuda" else None,
        "cuda": torch.version.cuda,
        "triton": _version("triton"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "kvchat": kvchat.__version__,
        "system": platform.system(),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
