"""Optional libraries: the commands that install them, and protection against running code from a hub.

Commands install into kvchat's own environment, with pip, pipx or uv. They name the packages of an extra, because no
package index has kvchat. If the package ``kernels`` is installed, other packages download and run compiled code.
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

# Packages of the extras that kvchat suggests at run time, as in pyproject.toml.
EXTRAS = {
    "ao": ("torchao>=0.16", "accelerate>=1.1"),
    "baselines": ("xllamacpp>=2026.1",),
    "bnb": ("bitsandbytes>=0.46.1", "accelerate>=1.1"),
    "gptq": ("gptqmodel>=5.0", "optimum>=1.24", "accelerate>=1.1"),
    "grammar": ("llguidance>=1.0",),
    "remote": ("openai>=3.57", "httpx2>=2.12", "prometheus-client>=0.20"),
    "serve": ("starlette>=1.0", "uvicorn>=0.35", "prometheus-client>=0.21"),
}
# The extra that a quantization needs on a GPU; nf4 needs it on a CPU too.
EXTRA_OF = {"int8": "ao", "int4": "ao", "nf4": "bnb"}
TRANSFORMERS = "USE_HUB_KERNELS"  # read when transformers is imported
BITSANDBYTES_LOG = "bitsandbytes.backends.cpu.ops"


def command(*packages: str, again: bool = False) -> str:
    """Return the shell command that installs or reinstalls ``packages`` (requirements) in kvchat's environment."""
    names, prefix = shlex.join(packages), Path(sys.prefix)
    if (prefix / "pipx_metadata.json").is_file() and shutil.which("pipx"):
        return f"pipx inject {'--force ' * again}{shlex.quote(prefix.name)} {names}"
    python, options = shlex.quote(sys.executable), f"{'--force-reinstall ' * again}{_system_option()}"
    if find_spec("pip") is not None:
        return f"{python} -m pip install {options}{names}"
    if shutil.which("uv"):  # environments that uv makes have no pip
        return f"uv pip install {'--reinstall ' * again}--python {python} {names}"
    return f"{python} -m ensurepip && {python} -m pip install {options}{names}"


def extra(name: str) -> str:
    """Return the command that installs the packages of one of kvchat's ``EXTRAS``."""
    return command(*EXTRAS[name])


def absent(name: str) -> list[str]:
    """Return the packages of an extra that are not installed."""
    packages = (requirement.partition(">")[0] for requirement in EXTRAS[name])
    return [package for package in packages if find_spec(package.replace("-", "_")) is None]


def require(name: str, what: str) -> None:
    """Check that the packages of an extra are installed; ``what`` needs them.

    Raises:
        UsageError: a package is not installed; the hint has the command that installs the extra.
    """
    if packages := absent(name):
        verb = "is" if len(packages) == 1 else "are"
        detail = f"{' and '.join(packages)} {verb} not installed."
        raise UsageError(f"{what} needs more packages.", detail, f"Run: {extra(name)}")


def lacking(quantize: str, device: str) -> list[str]:
    """Return the missing packages that a quantization needs on a device; the device "auto" may be a CPU."""
    is_needed = quantize == "nf4" or (quantize in EXTRA_OF and device.startswith("cuda"))
    return absent(EXTRA_OF[quantize]) if is_needed else []


def check(quantize: str, device: str) -> None:
    """Check a quantization before torch is imported.

    Raises:
        UsageError: a package that it needs is not installed.
    """
    if lacking(quantize, device):
        require(EXTRA_OF[quantize], f"quantize={quantize}")


def _system_option() -> str:
    """Return the option that lets pip install into a system's own Python; empty elsewhere."""
    in_environment = sys.prefix != sys.base_prefix
    managed = Path(sysconfig.get_path("stdlib"), "EXTERNALLY-MANAGED").is_file()
    return "" if in_environment or not managed else "--break-system-packages "


def prepare_transformers() -> None:
    """Keep transformers from loading kernels from a hub, unless the environment allows it, and from listing its models.

    The list, made by reading 1,700 files three times, is postponed until an attribute needs it.
    """
    os.environ.setdefault(TRANSFORMERS, "NO")
    if _unlisted not in sys.meta_path:
        sys.meta_path.insert(0, _unlisted)


class _Unlisted(Loader):
    """Imports the packages that list transformers' models as ``Later`` first, and normally the next time."""

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
        """Run none of the module's code."""


_unlisted = _Unlisted()


class Later(ModuleType):
    """Replaces a module until an attribute that is not ``known`` is needed, then imports its ``family``."""

    def __init__(self, name: str, known: dict[str, Any], family: Collection[str] = ()) -> None:
        super().__init__(name)
        self._family = family or [name]
        vars(self).update(known)

    def __getattr__(self, name: str) -> Any:
        of_package = name == "__path__" and any(other.startswith(f"{self.__name__}.") for other in self._family)
        if name.startswith("__") and not of_package:  # an import looks for these in any module
            raise AttributeError(name)
        if "__path__" in vars(self) and find_spec(f"{self.__name__}.{name}"):
            return importlib.import_module(f"{self.__name__}.{name}")
        for later in self._family:
            if isinstance(sys.modules.get(later), Later):
                del sys.modules[later]
        return getattr(importlib.import_module(self.__name__), name)


def import_bitsandbytes(load: Callable[[str], Any] = importlib.import_module) -> Any:
    """Import bitsandbytes without letting it load a kernel from a hub, or warn, on a CPU that multiplies bfloat16.

    Raises:
        ImportError: it is not installed.
    """
    log = logging.getLogger(BITSANDBYTES_LOG)
    level, before = log.level, {name: sys.modules[name] for name in ("kernels",) if name in sys.modules}
    sys.modules["kernels"] = None  # type: ignore[assignment]  # makes importing it fail
    log.setLevel(logging.ERROR)
    try:
        return load("bitsandbytes")
    finally:
        log.setLevel(level)
        del sys.modules["kernels"]
        sys.modules.update(before)
