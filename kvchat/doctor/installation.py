"""kvchat's own files for ``kvchat doctor``: settings, bundled model, data folder."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from kvchat import paths
from kvchat.config import modes, profiles, sources
from kvchat.doctor.check import Check, guarded
from kvchat.errors import UsageError
from kvchat.units import size

LITTLE_DISK = 2**30
MAX_HEADER_BYTES = 2**24  # of a safetensors file; a broken file may claim any length


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
