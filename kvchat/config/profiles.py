"""GPU profiles: settings and measured speeds for a kind of GPU, one TOML file each.

A file has a table ``[match]``, settings as in config.toml, and ``[measured]``, which ``kvchat bench decode
--save-profile`` writes. A profile matches if every key of its ``[match]`` holds. All that match are in force, so that
one of measurements takes no settings away: the user's override the bundled ones, and among either those with more keys
the others, value by value. The measured speeds are those of one profile, the strongest that has any. Where torch uses
no GPU, profiles with ``device = "cpu"`` match. A wrong file of the user's is left out, whatever asks, and everybody
says so in the same words. The GPU is read through NVML, because importing torch takes seconds.
"""

from __future__ import annotations

import fnmatch
import os
import platform
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from kvchat import files, nvml, paths
from kvchat.config import schema
from kvchat.config.schema import Section, Texts
from kvchat.config.sources import Key, SettingsSource, check, dotted, file_source, to_toml
from kvchat.errors import UsageError

HEAD = ("match", "measured")


@dataclass(frozen=True)
class Device:
    """A GPU in the terms of ``Match``, None for a missing reading. ``memory`` in GiB.

    The PCIe figures are the highest of GPU and slot: an idle GPU runs its link slower.
    """

    name: str | None = None
    memory: float | None = None
    compute_capability: str | None = None
    pcie_generation: int | None = None
    pcie_width: int | None = None


class Match(Section):
    """The devices that a profile is for."""

    device: Literal["gpu", "cpu"] = "gpu"
    """gpu, or cpu for machines without one"""
    name: Texts | None = None
    """name of the GPU or a list of names, without NVIDIA and GeForce; * and ? stand for anything"""
    memory: tuple[float, float] | None = None
    """GiB of memory: at least the first, less than the second"""
    compute_capability: str | None = None
    """such as "8.9" """
    pcie_generation: int | None = None
    """highest PCIe generation of GPU and slot"""
    pcie_width: int | None = None
    """most PCIe lanes of GPU and slot"""
    os: Literal["linux", "windows", "darwin"] | None = None
    """operating system"""

    @field_validator("name", "memory", "compute_capability", "pcie_generation", "pcie_width")
    @classmethod
    def _can_hold(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse what holds for no device: nobody would notice that the profile is never in force."""
        if info.data.get("device") == "cpu":
            raise ValueError('machines without a GPU, device = "cpu", have no such reading')
        if info.field_name == "name" and not value:
            raise ValueError("an empty list matches no GPU")
        if info.field_name == "memory" and max(value[0], 0) >= value[1]:
            raise ValueError("no GPU has at least the first and less than the second")
        if info.field_name == "compute_capability" and not re.fullmatch(r"\d+\.\d+", value):
            raise ValueError('it must be two numbers, such as "8.9"')
        return value


# Slower than any link to faster than any memory: with 1e-300 a plan prints times of hundreds of digits.
Rate = Annotated[float | None, Field(ge=0.01, le=100_000)]


class Measured(Section):
    """Ceilings of a device, in GB/s unless said otherwise; unset is not measured."""

    read: Rate = None
    """its memory read by kernels"""
    to_device: Rate = None
    """copied from pinned host memory"""
    to_host: Rate = None
    """copied to pinned host memory"""
    gather: Rate = None
    """scattered pages of pinned host memory read by kernels, as recall does"""
    kvchat: str = ""
    """version that measured"""
    torch: str = ""
    """torch that measured"""

    @property
    def read_bytes_per_s(self) -> float | None:
        """Bytes per second at which the device's memory is read."""
        return None if self.read is None else self.read * 1e9

    @property
    def link_bytes_per_s(self) -> float | None:
        """Bytes per second from host to device as recall copies them: scattered pages, or at best one large copy."""
        rate = self.gather or self.to_device
        return None if rate is None else rate * 1e9


class Profile(schema.Settings):
    """A profile file."""

    match: Match = Match()
    """which devices it is for"""
    measured: Measured = Measured()
    """what was measured there"""


@dataclass(frozen=True)
class ProfileFile:
    """A profile, the name of its file, its settings, and the keys of its ``[match]`` if all hold here, else None."""

    name: str
    path: Path
    profile: Profile
    source: SettingsSource
    matched: tuple[str, ...] | None

    @property
    def why(self) -> str:
        """The reason why it is in force."""
        return f"matched: {', '.join(self.matched or ()) or 'any GPU'}"

    @property
    def settings(self) -> SettingsSource:
        """The settings alone, each with the reason beside its place."""
        return self._part(lambda key: key[0] not in HEAD)

    @property
    def figures(self) -> SettingsSource:
        """The measured speeds alone, as the settings."""
        return self._part(lambda key: key[0] == "measured")

    def _part(self, belongs: Callable[[Key], bool]) -> SettingsSource:
        kept = {key: value for key, value in self.source.values.items() if belongs(key)}
        origins = {key: f"{self.source.origins[key]} ({self.why})" for key in kept}
        return replace(self.source, values=kept, origins=origins)


@dataclass(frozen=True)
class Found:
    """The profiles in force, weakest first; sentences about what is wrong with the user's files."""

    in_force: tuple[ProfileFile, ...] = ()
    problems: tuple[str, ...] = ()

    @property
    def sources(self) -> tuple[SettingsSource, ...]:
        """The settings, weakest first."""
        return tuple(file.settings for file in self.in_force)

    @property
    def measured(self) -> Measured:
        """The values measured on this device, by the strongest that says so."""
        return self._measuring.profile.measured if self._measuring else Measured()

    def measured_lines(self) -> Iterator[str]:
        """The values measured on this device as lines of TOML, each with its place as a comment."""
        figures = self._measuring.figures if self._measuring else SettingsSource()
        for key, value in figures.values.items():
            yield f"{dotted(key)} = {to_toml(value)}   # {figures.origins[key]}"

    @property
    def _measuring(self) -> ProfileFile | None:
        return next((file for file in reversed(self.in_force) if file.profile.measured != Measured()), None)

    def describe(self) -> str:
        """Their names with the reason, for a person."""
        return ", ".join(f"{file.name} ({file.why})" for file in self.in_force) or "none"


def find(device: str) -> Found:
    """The profiles in force for ``device`` ("auto", "cpu", "cuda" or "cuda:N")."""
    refused: list[UsageError] = []
    matching = [file for file in all_files(device, refused.append) if file.matched is not None]
    own = [file for file in matching if file.path.parent == paths.user_profiles_dir()]
    bundled = sorted((file for file in matching if file not in own), key=_keys)
    own = sorted(own, key=_keys, reverse=True)[::-1]  # of equal ones the first by name is the strongest
    return Found((*bundled, *own), (*map(_left_out, refused), *_undecided(own)))


def _left_out(refusal: UsageError) -> str:
    said = str(refusal)
    return f"{said}\nIt is left out." if "\n" in said else f"{said} It is left out."


def all_files(device: str, problem: Callable[[UsageError], None]) -> Iterator[ProfileFile]:
    """Every profile, the bundled ones first; ``problem`` is called with the refusal of a wrong one of the user's."""
    gpu = read_gpu(device)
    for folder, refuse in ((paths.bundled_profiles_dir(), _raise), (paths.user_profiles_dir(), problem)):
        for file in sorted(folder.glob("*.toml")):
            try:
                yield read_file(file, gpu)
            except UsageError as error:
                refuse(error)


def read_file(file: Path, gpu: Device | None) -> ProfileFile:
    """A profile, and whether it matches ``gpu``.

    Raises:
        UsageError: it cannot be read, or has an unknown key or a wrong value; with its line.
    """
    name = f"profiles/{file.name}"
    source = file_source(file, name)
    profile = check(source, Profile)
    matched = _matched(profile.match, gpu)
    return ProfileFile(name, file, profile, source, None if matched is None else tuple(matched))


def is_profile(source: SettingsSource) -> bool:
    """True if a file has what only profiles have."""
    return any(key[0] in HEAD for key in source.values)


def read_gpu(device: str = "auto", environ: Mapping[str, str] = os.environ) -> Device | None:
    """The GPU that torch would use for ``device`` ("auto", "cpu", "cuda" or "cuda:N"), None for a CPU.

    Raises:
        UsageError: it is none of these.
    """
    if not re.fullmatch(schema.DEVICES, device):
        raise UsageError(f'There is no device "{device}".', hint="Give auto, cpu, cuda or cuda:N.")
    if device == "cpu" or _torch_without_cuda():
        return None
    gpu = nvml.visible_gpu(int(device.partition(":")[2] or 0), environ)
    return None if gpu is None else _device(gpu.info())


def save(measured: Measured, device: str = "auto") -> Path:
    """Write measured speeds to the user's profile for exactly this device, whose settings stay. Return its path.

    Raises:
        UsageError: the file cannot be written, or the existing one is not TOML.
    """
    import tomlkit

    gpu = read_gpu(device)
    file = paths.user_profiles_dir() / f"{_slug(gpu)}.toml"
    try:
        document = tomlkit.parse(files.decoded(files.read(file), str(file))) if file.exists() else tomlkit.document()
        document["match"] = {key: value for key, value in _match_of(gpu).items() if value is not None}
        document["measured"] = {key: value for key, value in measured.model_dump().items() if value not in (None, "")}
        files.write(file, tomlkit.dumps(document).encode())
    except OSError as error:
        raise files.unwritable(file, error, "Check the folder's permissions.") from None
    except (ValueError, RecursionError) as error:  # of TOML, UTF-8 and numbers of thousands of digits
        raise UsageError(f"The profile {file} cannot be changed.", f"{error}.", "Repair or remove it.") from None
    return file


# ---- matching --------------------------------------------------------------------------------------


def _keys(file: ProfileFile) -> int:
    return len(file.matched or ())


def _undecided(own: Sequence[ProfileFile]) -> Iterator[str]:
    """Sentences about profiles, weakest first, of which nothing but the name decides a value."""
    for weaker, stronger in combinations(own, 2):
        both = sorted(_given(weaker) & _given(stronger))
        if both and _keys(weaker) == _keys(stronger):
            yield (
                f"{stronger.name} and {weaker.name} match this device equally and both give {', '.join(both)}; "
                f"{stronger.name} is used. Give one of them another key."
            )


def _given(file: ProfileFile) -> set[str]:
    return {*map(dotted, file.settings.values), *(["[measured]"] if file.figures.values else [])}


def _matched(match: Match, gpu: Device | None) -> list[str] | None:
    """The keys of ``match``, all of which hold for the device; None if one does not."""
    if (gpu is None) != (match.device == "cpu"):
        return None
    given = match.model_dump(exclude_unset=True, exclude_none=True)
    here = {"os": platform.system().lower(), "device": match.device, **(vars(gpu) if gpu else {})}
    holds = {key: _holds(key, wanted, here.get(key)) for key, wanted in given.items()}
    return list(holds) if all(holds.values()) else None


def _holds(key: str, wanted: Any, found: Any) -> bool:
    if found is None:
        return False
    if key == "name":
        return any(fnmatch.fnmatchcase(_short(found), _short(name)) for name in wanted)
    if key == "memory":
        low, high = wanted
        return bool(low <= found < high)
    return bool(wanted == found)


def _short(name: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"\b(nvidia|geforce)\b", "", name.lower())).strip()


def _match_of(gpu: Device | None) -> dict[str, Any]:
    if gpu is None:
        return {"device": "cpu", "os": platform.system().lower()}
    memory = None if gpu.memory is None else [round(gpu.memory - 0.5, 1), round(gpu.memory + 0.5, 1)]
    return {**vars(gpu), "name": gpu.name and _short(gpu.name), "memory": memory, "os": platform.system().lower()}


def _slug(gpu: Device | None) -> str:
    if gpu is None:
        return "cpu"
    size = "" if gpu.memory is None else f"-{gpu.memory:.0f}gb"
    return re.sub(r"[^a-z0-9]+", "-", _short(gpu.name or "gpu")).strip("-") + size


def _raise(error: UsageError) -> None:
    raise error


# ---- the GPU ---------------------------------------------------------------------------------------


def _device(info: nvml.GpuInfo) -> Device:
    capability = info.compute_capability
    return Device(
        name=info.name,
        memory=None if info.memory is None else info.memory / 2**30,
        compute_capability=None if capability is None else ".".join(map(str, capability)),
        pcie_generation=info.link_max.generation,
        pcie_width=info.link_max.width,
    )


def _torch_without_cuda() -> bool:
    """Torch is missing or built for the CPU; its version says so without importing it, which takes seconds."""
    try:
        return version("torch").endswith("+cpu")
    except PackageNotFoundError:
        return True
