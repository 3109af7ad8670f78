"""``kvchat profile list``, and loading the settings together with the GPU profiles."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import typer

from kvchat.cli.options import NamedDevice
from kvchat.cli.output import echo, note
from kvchat.config import profiles, sources
from kvchat.config.profiles import Match
from kvchat.config.sources import Resolved, SettingsSource
from kvchat.errors import UsageError
from kvchat.units import size

app = typer.Typer(rich_markup_mode=None, help="List profiles: settings for kinds of GPUs.", no_args_is_help=True)


def load_settings(flags: SettingsSource | None = None, problem: Callable[[str], None] = note) -> Resolved:
    """Return the settings, including profiles; call ``problem`` for each variable without effect and faulty profile."""
    for text in sources.unknown_variables():
        problem(text)

    def active(device: str) -> Iterable[SettingsSource]:
        found = profiles.find(device)
        for text in found.problems:
            problem(text)
        return found.sources

    return sources.load(flags, profiles=active)


@app.command("list")
def list_profiles(device: NamedDevice = "auto") -> None:
    """List all profiles; the active ones are marked."""
    sources.typed(sources.DEVICE, device)
    if device.startswith("cuda") and profiles.read_gpu(device) is None:
        why = "There is no GPU with that number." if profiles.read_gpu() else "torch sees no GPU."
        raise UsageError(f'There is no device "{device}".', why, "Use auto or cpu.")
    found = profiles.find(device)
    for problem in found.problems:
        note(problem)
    for file in sorted(found.files, key=lambda file: (file.is_own, file.name)):
        whose = "own" if file.is_own else "bundled"
        echo(f"{'●' if file.matches else ' '} {file.name:<24} {whose:<8} {_wanted(file.profile.match)}")


def _wanted(match: Match) -> str:
    """Return a match in words, such as ``name RTX 40* | RTX 50*, memory 7.0 GiB to 9.0 GiB``."""
    names = f"name {' | '.join(match.name)}" if match.name else ""
    memory = f"memory {' to '.join(size(gib * 2**30) for gib in match.memory)}" if match.memory else ""
    return ", ".join(filter(None, (names, memory))) or "any GPU"
