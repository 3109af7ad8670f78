"""``kvchat profile``: which profiles there are, which are in force, whether one is right; the settings with them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from kvchat import paths
from kvchat.cli.options import NamedDevice, complete_profile
from kvchat.cli.output import echo, note
from kvchat.config import profiles, sources
from kvchat.config.profiles import Match
from kvchat.config.sources import Resolved, SettingsSource
from kvchat.errors import UsageError, did_you_mean
from kvchat.nvml import GpuInfo
from kvchat.units import MISSING, size

app = typer.Typer(rich_markup_mode=None, help="Settings for a kind of GPU.", no_args_is_help=True)


def load_settings(flags: SettingsSource | None = None, problem: Callable[[str], None] = note) -> Resolved:
    """The settings in force, with the profiles; ``problem`` is called with what is wrong with the user's profiles."""

    def active(device: str) -> Iterable[SettingsSource]:
        found = profiles.find(device)
        for text in found.problems:
            problem(text)
        return found.sources

    return sources.load(flags, profiles=active)


@app.command("list")
def list_profiles(device: NamedDevice = "auto") -> None:
    """List all profiles; those in force are marked."""
    _read_gpu(device)
    found = profiles.find(device)
    for problem in found.problems:
        note(problem)
    for file in sorted(found.files, key=lambda file: (file.is_own, file.name)):
        whose = "own" if file.is_own else "bundled"
        echo(f"{'●' if file.matches else ' '} {file.name:<24} {whose:<8} {_wanted(file.profile.match)}")


@app.command()
def show(
    name: Annotated[
        str,
        typer.Argument(help="such as 8gb, or a file; by default the active profiles", autocompletion=complete_profile),
    ] = "",
) -> None:
    """Print a profile as it is written, without NAME those in force."""
    files = [_named(name)] if name else [file.path for file in profiles.find("auto").active]
    if not files:
        note("No profile applies; defaults are used.")
    for file in files:
        echo(f"# {file}\n{file.read_text('utf-8', 'replace').rstrip()}\n")


@app.command()
def match(device: NamedDevice = "auto") -> None:
    """Say which profiles are in force here, and why. With where each value they give comes from."""
    gpu, found = _read_gpu(device), profiles.find(device)
    echo("no GPU" if gpu is None else f"{gpu.name or MISSING}, {size(gpu.memory)}")
    echo("\n".join(f"{file.name} ({file.why})" for file in found.active) or "no profile: defaults are used")
    set_here = (line for line in load_settings(problem=note).lines() if "# profiles/" in line)
    for line in (*set_here, *found.measured_lines()):
        echo(f"  {line}")


@app.command()
def validate(files: Annotated[list[Path] | None, typer.Argument(help="instead of your own profiles")] = None) -> None:
    """Check profiles. Tells of each what is wrong; exit code 2 if one is."""
    check_files(files or own_files())


def own_files() -> list[Path]:
    """The user's own profiles."""
    return sorted(paths.user_profiles_dir().glob("*.toml"))


def check_files(files: Iterable[Path]) -> None:
    """Say which profiles are good.

    Raises:
        UsageError: what is wrong with any of the others.
    """
    sources.check_all(*(partial(_check, file) for file in files))


def _check(file: Path) -> None:
    if not file.exists():
        raise UsageError(f"There is no file {file}.", hint="Check the path.")
    profiles.read_file(file, None)
    echo(f"{file}: valid")


def _read_gpu(device: str) -> GpuInfo | None:
    """The GPU of ``device``, None for a CPU.

    Raises:
        UsageError: there is no such device.
    """
    sources.typed(sources.DEVICE, device)
    gpu = profiles.read_gpu(device)
    if gpu is None and device.startswith("cuda"):
        why = "There is no GPU with that number." if profiles.read_gpu() else "torch sees no GPU."
        raise UsageError(f'There is no device "{device}".', why, "Use auto or cpu.")
    return gpu


def _wanted(match: Match) -> str:
    """``name RTX 40* | RTX 50*, memory 7.0 GiB to 9.0 GiB``"""
    names = f"name {' | '.join(match.name)}" if match.name else ""
    memory = f"memory {' to '.join(size(gib * 2**30) for gib in match.memory)}" if match.memory else ""
    return ", ".join(filter(None, (names, memory))) or "any GPU"


def _named(name: str) -> Path:
    """The file of a profile by its name or path."""
    known = {
        file.stem: file
        for folder in (paths.bundled_profiles_dir(), paths.user_profiles_dir())
        for file in folder.glob("*.toml")
    }
    if Path(name).is_file():
        return Path(name)
    stem = Path(name).name.removesuffix(".toml")
    if stem not in known:
        raise UsageError(f'There is no profile "{name}".', did_you_mean(stem, known))
    return known[stem]
