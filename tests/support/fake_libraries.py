"""Stand-ins for torch and for imports, for the checks of ``kvchat doctor``."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any


def torch_like(cuda: str | None = "12.8", there: bool = True, version: str = "2.9.1+cu128") -> Any:
    return SimpleNamespace(
        __version__=version,
        version=SimpleNamespace(cuda=cuda),
        cuda=SimpleNamespace(is_available=lambda: there, device_count=lambda: 1, current_device=lambda: 0),
        device=lambda kind, index: f"{kind}:{index}",
        get_num_threads=lambda: 8,
    )


def importing(**modules: Any) -> Callable[[str], Any]:
    def load(name: str) -> Any:
        if name not in modules:
            raise ModuleNotFoundError(f"No module named {name!r}")
        if isinstance(modules[name], Exception):
            raise modules[name]
        return modules[name]

    return load
