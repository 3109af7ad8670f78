"""Python and the libraries for ``kvchat doctor``: whether they can be imported, and their versions.

torch is imported inside a check only, because a torch that cannot be imported is one of the findings. Every check takes
the importer, so that tests replace the libraries.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from kvchat import install
from kvchat.doctor.check import Check, guarded
from kvchat.hub_kernels import import_bitsandbytes

Importer = Callable[[str], Any]
OLDEST_PYTHON = (3, 11)


def checks(device: str, load: Importer = importlib.import_module) -> Iterator[Check]:
    """Python and every library; ``device`` is the one in the settings: only a GPU needs Triton."""
    yield guarded("Python", python)
    yield guarded("torch", partial(library, "torch", load))
    yield guarded("transformers", partial(library, "transformers", load))
    yield guarded("numba", partial(numba, load))
    yield guarded("Triton", lambda: triton(load, device != "cpu" and sees_gpu(imported("torch", load))))
    yield guarded("bitsandbytes", partial(bitsandbytes, load))


def imported(name: str, load: Importer = importlib.import_module) -> Any:
    """Import a module; None if that fails."""
    try:
        return load(name)
    except Exception:  # noqa: BLE001  # a broken installation raises anything
        return None


def sees_gpu(torch: Any) -> bool:
    """True if ``torch``, the module or None, sees a GPU."""
    try:
        return bool(torch.cuda.is_available())
    except Exception:  # noqa: BLE001  # no torch, or a driver that it does not understand
        return False


def python(version: tuple[int, ...] = sys.version_info[:3]) -> Check:
    """The interpreter."""
    found = ".".join(map(str, version))
    if version < OLDEST_PYTHON:
        return Check("Python", "problem", found, "kvchat needs Python 3.11 or newer.")
    return Check("Python", "ok", found)


def library(
    name: str,
    load: Importer = importlib.import_module,
    requires: Callable[[str], list[str] | None] = importlib.metadata.requires,
) -> Check:
    """A library that kvchat needs: whether it can be imported, in a version kvchat was tested with."""
    try:
        module = load(name)
    except Exception as error:  # noqa: BLE001  # a broken installation raises anything
        reason = f"cannot be imported: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        return Check(name, "problem", reason, install.command(name, again=True))
    build = ""
    if name == "torch":
        build = f", CUDA {module.version.cuda}" if module.version.cuda else ", without CUDA"
    wanted = _specifier(name, requires)
    # CUDA builds append a local version (2.9.0+cu128), which is no part of the comparison.
    if wanted is not None and not wanted.contains(module.__version__.partition("+")[0], prereleases=True):
        advice = f"kvchat was tested with {name}{wanted}; another may fail or be wrong."
        return Check(name, "warning", f"{module.__version__}{build}", advice)
    return Check(name, "ok", f"{module.__version__}{build}")


def triton(load: Importer, cuda: bool, find: Callable[[str], str | None] = shutil.which) -> Check:
    """The compiler of the kernels, which calls a C compiler."""
    try:
        version = load("triton").__version__
    except ImportError:
        if not cuda:
            return Check("Triton", "ok", "not installed; only a GPU needs it")
        return Check(
            "Triton", "warning", "not installed", f"{install.command('triton')}; without it decoding is slower."
        )
    if cuda and not os.environ.get("CC") and not any(map(find, ("cc", "gcc", "clang"))):
        return Check(
            "Triton", "warning", f"{version}, but no C compiler", "Install gcc or clang: kernels are built with it."
        )
    return Check("Triton", "ok", version)


def numba(load: Importer) -> Check:
    """The compiler of a CPU's loops."""
    try:
        return Check("numba", "ok", str(load("numba").__version__))
    except ImportError as error:
        advice = f"{install.command('numba')}; without it a CPU takes longer to choose pages."
        return Check("numba", "warning", f"cannot be imported: {error}", advice)


def bitsandbytes(load: Importer) -> Check:
    """Weights in 4 or 8 bits."""
    try:
        return Check("bitsandbytes", "ok", str(import_bitsandbytes(load).__version__))
    except ImportError:
        return Check("bitsandbytes", "ok", "not installed; only nf4 weights need it")


def _specifier(name: str, requires: Callable[[str], list[str] | None]) -> Any:
    """The versions of a library that kvchat's metadata requires; None if it requires none."""
    from packaging.requirements import Requirement

    try:
        wanted = [Requirement(text) for text in requires("kvchat") or ()]
    except importlib.metadata.PackageNotFoundError:
        return None
    return next((one.specifier for one in wanted if one.name == name), None)
