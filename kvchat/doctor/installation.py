"""Checks of ``kvchat doctor``: whether kvchat's own files can be read and Python's libraries imported."""

from __future__ import annotations

import json
import os
import platform
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module, metadata
from pathlib import Path
from typing import Any, Literal

from kvchat import libraries, paths
from kvchat.config import modes, profiles, sources
from kvchat.errors import UsageError
from kvchat.libraries import import_bitsandbytes
from kvchat.units import MISSING, size

LITTLE_DISK = 2**30
MAX_HEADER_BYTES = 2**24  # a Git LFS pointer in place of the weights would claim exabytes


def checks(device: str) -> Iterator[Check]:
    """Run all checks of kvchat's own files except the settings; ``device`` is the one in the settings."""
    yield guarded("environment", environment)
    yield guarded("profiles", lambda: active_profiles(device))
    yield guarded("bundled model", bundled_model)
    yield guarded("modes", kv_modes)
    yield guarded("data folder", data_folder)


def settings() -> tuple[Check, str]:
    """Check the settings file; also return the device in the settings ("auto" if they are wrong)."""
    file = paths.config_file()
    where = f"{file}{'' if file.exists() else ' (does not exist; defaults apply)'}"
    try:
        resolved = sources.load(profiles=lambda device: profiles.find(device).sources)
    except UsageError as error:
        return Check("settings", "problem", where, str(error)), "auto"
    return Check("settings", "ok", where), resolved.settings.model.device


def environment() -> Check:
    given = sorted(name for name in os.environ if name.startswith("KVCHAT_"))
    found = ", ".join(given) or "no KVCHAT_ variable is set"
    if unknown := sources.unknown_variables():
        return Check("environment", "warning", found, " ".join(unknown))
    return Check("environment", "ok", found)


def active_profiles(device: str) -> Check:
    """List the profiles that match the device in the settings, and problems of the user's profiles."""
    found = profiles.find(device)
    if found.problems:
        return Check("profiles", "warning", found.describe(), "\n".join(found.problems))
    return Check("profiles", "ok", found.describe())


def bundled_model() -> Check:
    """Check the bundled model's configuration and the header of its weights."""
    folder = paths.bundled_model_dir()
    try:
        json.loads((folder / "config.json").read_text("utf-8"))
        with (folder / "model.safetensors").open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            tensors = len(json.loads(file.read(min(length, MAX_HEADER_BYTES))))
    except (OSError, ValueError) as error:
        return Check("bundled model", "problem", f"{folder} cannot be read: {error}", "Install kvchat again.")
    return Check("bundled model", "ok", f"{folder}, {tensors} tensors")


def kv_modes() -> Check:
    """Check the KV modes, including those of other packages."""
    if modes.problems():
        return Check("modes", "warning", " ".join(modes.problems()), "Repair or remove the package.")
    return Check("modes", "ok", ", ".join(modes.mode_names()))


def data_folder() -> Check:
    """Check free space and write access in the folder of logs, calibrations and models."""
    folder = paths.data_dir()
    existing = next((parent for parent in (folder, *folder.parents) if parent.exists()), Path("/"))
    free = shutil.disk_usage(existing).free
    found = f"{folder}, {size(free)} free"
    if not (existing.is_dir() and os.access(existing, os.W_OK)):
        return Check("data folder", "warning", f"{found}, not writable", "Set KVCHAT_DATA_DIR to a writable folder.")
    if free < LITTLE_DISK:
        return Check("data folder", "warning", found, "Free some space for logs, calibrations and models.")
    return Check("data folder", "ok", found)


def library_checks(device: str) -> Iterator[Check]:
    """Check Python and every library; ``device`` is the one in the settings, because only a GPU needs Triton."""
    yield guarded("kvchat", lambda: Check("kvchat", "ok", paths.with_commit(metadata.version("kvchat"))))
    yield Check("Python", "ok", platform.python_version())
    yield guarded("torch", partial(library, "torch"))
    yield guarded("transformers", partial(library, "transformers"))
    yield guarded("numba", numba)
    yield guarded("Triton", lambda: triton(device != "cpu" and sees_gpu(imported("torch"))))
    yield guarded("bitsandbytes", bitsandbytes)


def imported(name: str) -> Any:
    """Import a module; None if that fails."""
    try:
        return import_module(name)
    except Exception:  # noqa: BLE001  # a broken installation raises anything
        return None


def sees_gpu(torch: Any) -> bool:
    """True if ``torch``, the module or None, sees a GPU."""
    try:
        return bool(torch.cuda.is_available())
    except Exception:  # noqa: BLE001  # no torch, or a driver that it does not support
        return False


def library(name: str) -> Check:
    """Check that a library can be imported, in a version that kvchat was tested with."""
    try:
        module = import_module(name)
    except Exception as error:  # noqa: BLE001  # a broken installation raises anything
        reason = f"cannot be imported: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        return Check(name, "problem", reason, libraries.command(name, again=True))
    build = ""
    if name == "torch":
        build = f", CUDA {module.version.cuda}" if module.version.cuda else ", without CUDA"
    wanted = _specifier(name)
    # The local version that CUDA builds append (2.9.0+cu128) must not count.
    if wanted is not None and not wanted.contains(module.__version__.partition("+")[0], prereleases=True):
        advice = f"kvchat was tested with {name}{wanted}; other versions may fail or give wrong results."
        return Check(name, "warning", f"{module.__version__}{build}", advice)
    return Check(name, "ok", f"{module.__version__}{build}")


def triton(cuda: bool) -> Check:
    """Check Triton, the compiler of the kernels, and the C compiler that it calls."""
    try:
        version = import_module("triton").__version__
    except ImportError:
        if not cuda:
            return Check("Triton", "ok", "not installed; only a GPU needs it")
        advice = f"{libraries.command('triton')}; without it, decoding is slower."
        return Check("Triton", "warning", "not installed", advice)
    if cuda and not os.environ.get("CC") and not any(map(shutil.which, ("cc", "gcc", "clang"))):
        advice = "Install gcc or clang, which build the kernels."
        return Check("Triton", "warning", f"{version}, but no C compiler", advice)
    return Check("Triton", "ok", version)


def numba() -> Check:
    try:
        return Check("numba", "ok", str(import_module("numba").__version__))
    except ImportError as error:
        advice = f"{libraries.command('numba')}; without it, choosing pages on a CPU is slower."
        return Check("numba", "warning", f"cannot be imported: {error}", advice)


def bitsandbytes() -> Check:
    try:
        return Check("bitsandbytes", "ok", str(import_bitsandbytes(import_module).__version__))
    except ImportError:
        return Check("bitsandbytes", "ok", "not installed; only nf4 weights need it")


def _specifier(name: str) -> Any:
    """Return the versions of a library that kvchat's metadata requires, or None."""
    from packaging.requirements import Requirement

    try:
        wanted = [Requirement(text) for text in metadata.requires("kvchat") or ()]
    except metadata.PackageNotFoundError:
        return None
    return next((each.specifier for each in wanted if each.name == name), None)


@dataclass(frozen=True)
class Check:
    """A finding, its state, and advice unless it is ok; a ``problem`` keeps kvchat from running."""

    name: str
    state: Literal["ok", "warning", "problem"]
    found: str
    advice: str = ""


def guarded(name: str, read: Callable[[], Check]) -> Check:
    """Return the check, or a warning if it raises."""
    try:
        return read()
    except Exception as error:  # noqa: BLE001  # the report must continue whatever a library or driver raises
        lines = str(error).splitlines() or [""]
        return Check(name, "warning", MISSING, f"This check failed: {type(error).__name__}: {lines[0]}")
