"""Libraries that may be missing or do too much: how they are installed, and that none runs code from a hub unasked.

A package is installed where this kvchat is: into a virtual environment, by pipx or by uv. No package index has kvchat,
so the packages of its extras are named themselves. Where ``kernels`` is
installed, other packages download and run compiled code.
"""

from __future__ import annotations

import importlib
import logging
import os
import shlex
import shutil
import sys
import sysconfig
from collections.abc import Callable, Collection, Sequence
from importlib import metadata
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from kvchat.errors import UsageError

# The packages of kvchat's extras that are asked for while it runs, as pyproject.toml has them.
EXTRAS = {
    "ao": ("torchao>=0.16", "accelerate>=1.1"),
    "baselines": ("xllamacpp>=2026.1",),
    "bnb": ("bitsandbytes>=0.46.1", "accelerate>=1.1"),
    "gptq": ("gptqmodel>=5.0", "optimum>=1.24", "accelerate>=1.1"),
    "grammar": ("llguidance>=1.0",),
    "remote": ("openai>=3.57", "httpx2>=2.12", "prometheus-client>=0.20"),
    "serve": ("starlette>=1.0", "uvicorn>=0.35", "prometheus-client>=0.21"),
}
# The extra that a quantization needs on a GPU, and nf4 on a CPU too.
EXTRA_OF = {"int8": "ao", "int4": "ao", "nf4": "bnb"}
TRANSFORMERS = "USE_HUB_KERNELS"  # transformers reads it when it is imported
BITSANDBYTES_LOG = "bitsandbytes.backends.cpu.ops"


def command(*packages: str, again: bool = False) -> str:
    """The command, for a shell, that installs ``packages`` (as requirements) beside this kvchat, or installs them
    ``again``."""
    named, here = shlex.join(packages), Path(sys.prefix)
    if (here / "pipx_metadata.json").is_file() and shutil.which("pipx"):
        return f"pipx inject {'--force ' * again}{shlex.quote(here.name)} {named}"
    python, options = shlex.quote(sys.executable), f"{'--force-reinstall ' * again}{_outside()}"
    if find_spec("pip") is not None:
        return f"{python} -m pip install {options}{named}"
    if shutil.which("uv"):  # its own environments have no pip
        return f"uv pip install {'--reinstall ' * again}--python {python} {named}"
    return f"{python} -m ensurepip && {python} -m pip install {options}{named}"


def extra(name: str) -> str:
    """The command that installs the packages of one of kvchat's ``EXTRAS``."""
    return command(*EXTRAS[name])


def absent(name: str) -> list[str]:
    """The packages of an extra that are not installed."""
    packages = (one.partition(">")[0] for one in EXTRAS[name])
    return [package for package in packages if find_spec(package.replace("-", "_")) is None]


def require(name: str, what: str) -> None:
    """Refuse ``what`` where a package of one of kvchat's ``EXTRAS`` is not installed.

    Raises:
        UsageError: one is not; with the command that installs them.
    """
    if packages := absent(name):
        verb = "is" if len(packages) == 1 else "are"
        detail = f"{' and '.join(packages)} {verb} not installed."
        raise UsageError(f"{what} needs more packages.", detail, f"Run: {extra(name)}")


def lacking(quantize: str, device: str) -> list[str]:
    """The packages that weights quantized so need on a device, and that are not installed; "auto" may be a CPU."""
    is_needed = quantize == "nf4" or (quantize in EXTRA_OF and device.startswith("cuda"))
    return absent(EXTRA_OF[quantize]) if is_needed else []


def check(quantize: str, device: str) -> None:
    """Refuse a quantization that lacks a package, before torch is imported.

    Raises:
        UsageError: a package is not installed.
    """
    if lacking(quantize, device):
        require(EXTRA_OF[quantize], f"quantize={quantize}")


def _outside() -> str:
    """The option without which pip refuses to install into a system's own Python."""
    in_environment = sys.prefix != sys.base_prefix
    managed = Path(sysconfig.get_path("stdlib"), "EXTERNALLY-MANAGED").is_file()
    return "" if in_environment or not managed else "--break-system-packages "


def prepare_transformers() -> None:
    """Let transformers take no kernels, as for mixtures of experts, from a hub, unless the environment says so.

    It lists its models only for who asks for more than a module: for that it would read 1,700 files, three times.
    """
    os.environ.setdefault(TRANSFORMERS, "NO")
    if _unlisted not in sys.meta_path:
        sys.meta_path.insert(0, _unlisted)


class _Unlisted(Loader):
    """Imports the packages that list transformers' models as ``Later``, the first time; then they are found as ever."""

    def __init__(self) -> None:
        self._left = {"transformers", "transformers.models"}

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name in self._left else None
        if spec:
            spec.loader = self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        self._left.remove(spec.name)
        return Later(spec.name, {"__version__": metadata.version("transformers")})

    def exec_module(self, module: ModuleType) -> None:
        """Nothing of it is run."""


_unlisted = _Unlisted()


class Later(ModuleType):
    """In place of a module until more of it is asked for than is ``known``; then all its ``family`` are imported."""

    def __init__(self, name: str, known: dict[str, Any], family: Collection[str] = ()) -> None:
        super().__init__(name)
        self._family = family or [name]
        vars(self).update(known)

    def __getattr__(self, name: str) -> Any:
        of_package = name == "__path__" and any(other.startswith(f"{self.__name__}.") for other in self._family)
        if name.startswith("__") and not of_package:  # what an import looks for in any module
            raise AttributeError(name)
        if "__path__" in vars(self) and find_spec(f"{self.__name__}.{name}"):
            return importlib.import_module(f"{self.__name__}.{name}")
        for later in self._family:
            if isinstance(sys.modules.get(later), Later):
                del sys.modules[later]
        return getattr(importlib.import_module(self.__name__), name)


def import_bitsandbytes(load: Callable[[str], Any] = importlib.import_module) -> Any:
    """Import bitsandbytes, which on a CPU that multiplies bfloat16 takes a kernel from a hub meanwhile, or warns.

    Raises:
        ImportError: it is not installed.
    """
    log = logging.getLogger(BITSANDBYTES_LOG)
    level, before = log.level, {name: sys.modules[name] for name in ("kernels",) if name in sys.modules}
    sys.modules["kernels"] = None  # type: ignore[assignment]  # an import of it fails
    log.setLevel(logging.ERROR)
    try:
        return load("bitsandbytes")
    finally:
        log.setLevel(level)
        del sys.modules["kernels"]
        sys.modules.update(before)
