"""kvchat's own files, Python and the libraries for ``kvchat doctor``: whether they can be read and imported."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from kvchat import libraries, paths
from kvchat.config import modes, profiles, sources
from kvchat.errors import UsageError
from kvchat.libraries import import_bitsandbytes
from kvchat.units import MISSING, size

LITTLE_DISK = 2**30
MAX_HEADER_BYTES = 2**24  # of a safetensors file; a broken file may claim any length
Importer = Callable[[str], Any]
OLDEST_PYTHON = (3, 11)


def checks() -> Iterator[Check]:
    """All checks of kvchat's own files."""
    checked, device = settings()
    yield checked
    yield guarded("environment", environment)
    yield guarded("profiles", lambda: profiles_in_force(device))
    yield guarded("bundled model", bundled_model)
    yield guarded("modes", kv_modes)
    yield guarded("data folder", data_folder)


def settings() -> tuple[Check, str]:
    """The settings file, and the device in the settings ("auto" if they are wrong)."""
    file = paths.config_file()
    where = f"{file}{'' if file.exists() else ' (not there; the defaults hold)'}"
    try:
        resolved = sources.load(profiles=lambda device: profiles.find(device).sources)
    except UsageError as error:
        return Check("settings", "problem", where, str(error)), "auto"
    return Check("settings", "ok", where), resolved.settings.model.device


def environment() -> Check:
    """Variables that begin like kvchat's."""
    given = sorted(name for name in os.environ if name.startswith("KVCHAT_"))
    found = ", ".join(given) or "no variable of kvchat is set"
    if unknown := sources.unknown_variables():
        return Check("environment", "warning", found, " ".join(unknown))
    return Check("environment", "ok", found)


def profiles_in_force(device: str) -> Check:
    """The profiles in force for the device in the settings, and what is wrong with the user's."""
    found = profiles.find(device)
    if found.problems:
        return Check("profiles", "warning", found.describe(), "\n".join(found.problems))
    return Check("profiles", "ok", found.describe())


def bundled_model(folder: Path | None = None) -> Check:
    """The model that comes with kvchat: its configuration and the header of its weights."""
    place = folder or paths.bundled_model_dir()
    try:
        json.loads((place / "config.json").read_text("utf-8"))
        with (place / "model.safetensors").open("rb") as file:
            header = file.read(min(int.from_bytes(file.read(8), "little"), MAX_HEADER_BYTES))
        tensors = len(json.loads(header))
    except (OSError, ValueError) as error:
        return Check("bundled model", "problem", f"{place} cannot be read: {error}", "Install kvchat again.")
    return Check("bundled model", "ok", f"{place}, {tensors} tensors")


def kv_modes() -> Check:
    """The KV modes, with those that other packages install."""
    if modes.problems():
        return Check("modes", "warning", " ".join(modes.problems()), "Repair or remove the package.")
    return Check("modes", "ok", ", ".join(modes.mode_names()))


def data_folder(folder: Path | None = None) -> Check:
    """The folder of logs, calibrations and models: free space and write access."""
    place = folder or paths.data_dir()
    there = next((parent for parent in (place, *place.parents) if parent.exists()), Path("/"))
    free = shutil.disk_usage(there).free
    found = f"{place}, {size(free)} free"
    if not (there.is_dir() and os.access(there, os.W_OK)):
        return Check("data folder", "warning", f"{found}, not writable", "Set KVCHAT_DATA_DIR to a folder of yours.")
    if free < LITTLE_DISK:
        return Check("data folder", "warning", found, "Make room: logs, calibrations and models need it.")
    return Check("data folder", "ok", found)


def library_checks(device: str, load: Importer = importlib.import_module) -> Iterator[Check]:
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
        return Check(name, "problem", reason, libraries.command(name, again=True))
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
            "Triton", "warning", "not installed", f"{libraries.command('triton')}; without it decoding is slower."
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
        advice = f"{libraries.command('numba')}; without it a CPU takes longer to choose pages."
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
    except Exception as error:  # noqa: BLE001  # whatever a library or a driver raises, the report goes on
        lines = str(error).splitlines() or [""]
        return Check(name, "warning", MISSING, f"It could not be read: {type(error).__name__}: {lines[0]}")
