"""GPU profiles: settings and measured speeds for a kind of GPU, one TOML file each.

A file has a table ``[match]`` with names of GPUs, a range of memory or both; settings as in config.toml; and
``[measured]``, which ``kvchat bench decode --save-profile`` writes. A machine without a GPU is named cpu.

All matching profiles apply, so that one with measurements hides no settings of another. For each value, the user's
profiles override bundled ones. Within each group, a match by name and memory overrides one by name, which overrides one
by memory; among equals the first file name wins. Measured speeds come from the strongest profile that has any. A faulty
file is ignored, with the same message everywhere. The GPU is queried through NVML: importing torch takes seconds.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, field_validator

from kvchat import files, nvml, paths
from kvchat.config import schema
from kvchat.config.schema import Section, Texts
from kvchat.config.sources import SettingsSource, check, dotted, file_source, to_toml
from kvchat.errors import UsageError
from kvchat.nvml import GpuInfo

HEAD = ("match", "measured")  # tables that only profiles have
CPU = "cpu"  # the name of a machine without a GPU


class Match(Section):
    """The devices that a profile is for; without a name, any GPU with that much memory."""

    name: Texts | None = None
    """name of the GPU or a list of names, without NVIDIA and GeForce; * and ? stand for anything; cpu without a GPU"""
    memory: tuple[float, float] | None = None
    """GiB of memory: at least the first, less than the second"""

    @field_validator("memory")
    @classmethod
    def _in_order(cls, value: tuple[float, float] | None) -> tuple[float, float] | None:
        if value and value[0] >= value[1]:
            raise ValueError("no GPU has at least the first and less than the second")
        return value

    def holds(self, gpu: GpuInfo | None) -> bool:
        """Return whether the profile is for ``gpu``; None is a machine without a GPU."""
        if gpu is None:
            return CPU in map(_short, self.name or ())
        found, names = _short(gpu.name or ""), self.name or ("*",)
        if not any(fnmatchcase(found, _short(name)) for name in names):
            return False
        if self.memory is None:
            return True
        low, high = self.memory
        return gpu.memory is not None and low <= gpu.memory / 2**30 < high


Rate = Annotated[float | None, Field(gt=0)]


class Measured(Section):
    """Measured peak rates of a device in GB/s (unset: not measured), and the versions of the software that measured."""

    read: Rate = None
    """GPU memory read by kernels"""
    to_device: Rate = None
    """copied from pinned host memory"""
    to_host: Rate = None
    """copied to pinned host memory"""
    gather: Rate = None
    """scattered pages of pinned host memory read by kernels, as recall does"""
    kvchat: str = ""
    """version of kvchat that measured"""
    torch: str = ""
    """version of torch that measured"""

    @property
    def read_bytes_per_s(self) -> float | None:
        """Bytes per second at which the device's memory is read."""
        return None if self.read is None else self.read * 1e9

    @property
    def link_bytes_per_s(self) -> float | None:
        """Bytes per second from host to device, for scattered pages as in recall, or else for one large copy."""
        rate = self.gather or self.to_device
        return None if rate is None else rate * 1e9


class Profile(schema.Settings):
    match: Match = Match()
    """the devices that it is for"""
    measured: Measured = Measured()
    """the rates measured there"""


@dataclass(frozen=True)
class ProfileFile:
    """A profile with its file, the origin of each value, why it applies, and whether it matches this device."""

    name: str
    path: Path
    profile: Profile
    source: SettingsSource
    why: str
    matches: bool

    @property
    def is_own(self) -> bool:
        """True for the user's profiles, False for bundled ones."""
        return self.path.parent == paths.user_profiles_dir()

    @property
    def strength(self) -> tuple[bool, bool, bool]:
        """A sort key: the stronger of two profiles has the larger one."""
        match = self.profile.match
        return self.is_own, match.name is not None, match.memory is not None

    @property
    def settings(self) -> SettingsSource:
        """The settings alone."""
        values = {key: value for key, value in self.source.values.items() if key[0] not in HEAD}
        return replace(self.source, values=values)


@dataclass(frozen=True)
class Found:
    """All profiles, weakest first, and a sentence for each file that is ignored."""

    files: tuple[ProfileFile, ...]
    problems: tuple[str, ...]

    @property
    def active(self) -> tuple[ProfileFile, ...]:
        """The profiles that match this device, weakest first."""
        return tuple(file for file in self.files if file.matches)

    @property
    def sources(self) -> tuple[SettingsSource, ...]:
        return tuple(file.settings for file in self.active)

    @property
    def measured(self) -> Measured:
        """The speeds measured on this device, from the strongest profile that has any."""
        return self._measuring.profile.measured if self._measuring else Measured()

    def measured_lines(self) -> Iterator[str]:
        """Yield ``measured`` as lines of TOML, each with its origin as a comment."""
        if (file := self._measuring) is not None:
            for key, value in file.source.values.items():
                if key[0] == "measured":
                    yield f"{dotted(key)} = {to_toml(value)}   # {file.source.origins[key]}"

    @property
    def _measuring(self) -> ProfileFile | None:
        return next((file for file in reversed(self.active) if file.profile.measured != Measured()), None)

    def describe(self) -> str:
        """Return the active profiles' names, and why each applies."""
        return ", ".join(f"{file.name} ({file.why})" for file in self.active) or "none"


def find(device: str) -> Found:
    """Return all profiles, and which of them match ``device`` ("auto", "cpu", "cuda" or "cuda:N")."""
    gpu = read_gpu(device)
    found, problems = [], []
    for folder in (paths.bundled_profiles_dir(), paths.user_profiles_dir()):
        for path in sorted(folder.glob("*.toml"), reverse=True):
            try:
                found.append(read_file(path, gpu))
            except UsageError as refusal:
                end = "\n" if "\n" in str(refusal) else " "
                problems.append(f"{refusal}{end}This profile is ignored.")
    return Found(tuple(sorted(found, key=lambda file: file.strength)), tuple(reversed(problems)))


def read_file(file: Path, gpu: GpuInfo | None) -> ProfileFile:
    """Read a profile and match it with ``gpu``.

    Raises:
        UsageError: it cannot be read, or has an unknown key or a wrong value; the message has the line.
    """
    name = f"profiles/{file.name}"
    source = file_source(file, name)
    profile = check(source, Profile)
    why = f"matched: {', '.join(profile.match.model_dump(exclude_none=True)) or 'any GPU'}"
    placed = replace(source, origins={key: f"{origin} ({why})" for key, origin in source.origins.items()})
    return ProfileFile(name, file, profile, placed, why, profile.match.holds(gpu))


def read_gpu(device: str = "auto") -> GpuInfo | None:
    """Return the GPU that torch would use for ``device`` ("auto", "cpu", "cuda" or "cuda:N"), None for a CPU."""
    if device == "cpu" or _torch_without_cuda():
        return None
    gpu = nvml.visible_gpu(int(device.partition(":")[2] or 0))
    return None if gpu is None else gpu.info()


def save(measured: Measured, device: str = "auto") -> Path:
    """Write measured speeds to the user's profile for exactly this device, keep its settings, and return its path.

    Raises:
        UsageError: the file cannot be written, or the existing one is not TOML.
    """
    import tomlkit

    gpu = read_gpu(device)
    match = _match_of(gpu)
    memory = f"-{gpu.memory / 2**30:.0f}gb" if gpu and gpu.memory else ""
    slug = re.sub(r"[^a-z0-9]+", "-", str(match.get("name", "gpu"))).strip("-")
    file = paths.user_profiles_dir() / f"{slug}{memory}.toml"
    try:
        document = tomlkit.parse(files.decoded(files.read(file), str(file))) if file.exists() else tomlkit.document()
        document["match"] = match
        document["measured"] = {key: value for key, value in measured.model_dump().items() if value not in (None, "")}
        files.write(file, tomlkit.dumps(document).encode())
    except OSError as error:
        raise files.unwritable(file, error, "Check the folder's permissions.") from None
    except ValueError as error:
        raise UsageError(f"The profile {file} cannot be changed.", f"{error}.", "Repair or remove it.") from None
    return file


def _match_of(gpu: GpuInfo | None) -> dict[str, Any]:
    """Return the ``[match]`` of exactly this device."""
    if gpu is None:
        return {"name": CPU}
    match: dict[str, Any] = {"name": _short(gpu.name)} if gpu.name else {}
    if gpu.memory is not None:
        gib = gpu.memory / 2**30
        match["memory"] = [round(gib - 0.5, 1), round(gib + 0.5, 1)]
    return match


def _short(name: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"\b(nvidia|geforce)\b", "", name.lower())).strip()


def _torch_without_cuda() -> bool:
    """Return whether torch is missing or built for the CPU, by its version, because importing it takes seconds."""
    try:
        return version("torch").endswith("+cpu")
    except PackageNotFoundError:
        return True
