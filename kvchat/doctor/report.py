"""``kvchat doctor``: what kvchat finds on this machine, what is wrong, and what to do about it."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from kvchat import paths
from kvchat.config import modes, profiles, sources
from kvchat.doctor import libraries as engine
from kvchat.doctor.machine import MISSING, Check, gib, guarded
from kvchat.errors import UsageError

GLYPHS = {"ok": "✓", "warning": "!", "problem": "✗"}
LITTLE_DISK = 2**30
LONGEST_HEADER = 2**24  # anything may stand where a safetensors file has its length
SMALLEST = (40, 12)


def doctor(as_json: bool) -> int:
    """Check everything and print it, each line when it is known; 1 if a problem keeps kvchat from running."""
    found = []
    for check in checks():
        found.append(check)
        if not as_json:
            sys.stdout.write(_line(check))
            sys.stdout.flush()
    usable = all(check.state != "problem" for check in found)
    if as_json:
        sys.stdout.write(json.dumps({"usable": usable, "checks": [dataclasses.asdict(c) for c in found]}) + "\n")
    else:
        sys.stdout.write(_verdict(found))
    return 0 if usable else 1


def checks() -> Iterator[Check]:
    """Everything, the engine's part with the device in the settings."""
    config, device = configuration()
    yield from engine.checks(device)
    yield guarded("bundled model", bundled_model)
    yield config
    yield guarded("modes", kv_modes)
    yield guarded("data folder", data_folder)
    yield guarded("terminal", terminal)


def configuration() -> tuple[Check, str]:
    """The settings, and the device they name."""
    file = paths.config_file()
    where = f"{file}{'' if file.exists() else ' (not there; the defaults hold)'}"
    try:
        resolved = sources.load(profiles=profiles.sources)
    except UsageError as error:
        return Check("settings", "problem", where, str(error)), "auto"
    return Check("settings", "ok", where), resolved.settings.model.device


def kv_modes() -> Check:
    """The KV modes, with those that other packages install."""
    if modes.problems():
        return Check("modes", "warning", " ".join(modes.problems()), "Repair or remove the package.")
    return Check("modes", "ok", ", ".join(modes.mode_names()))


def bundled_model(folder: Path | None = None) -> Check:
    """The model that comes with kvchat."""
    place = folder or paths.bundled_model_dir()
    try:
        json.loads((place / "config.json").read_text("utf-8"))
        with (place / "model.safetensors").open("rb") as file:
            header = file.read(min(int.from_bytes(file.read(8), "little"), LONGEST_HEADER))
        tensors = len(json.loads(header))
    except (OSError, ValueError) as error:
        return Check("bundled model", "problem", f"{place} cannot be read: {error}", "Install kvchat again.")
    return Check("bundled model", "ok", f"{place}, {tensors} tensors")


def data_folder(folder: Path | None = None) -> Check:
    """Room for what a person makes with kvchat."""
    place = folder or paths.data_dir()
    there = next((parent for parent in (place, *place.parents) if parent.exists()), Path("/"))
    free = shutil.disk_usage(there).free
    found = f"{place}, {gib(free)} free"
    if not os.access(there, os.W_OK):
        return Check("data folder", "warning", f"{found}, not writable", "Set KVCHAT_DATA_DIR to a folder of yours.")
    if free < LITTLE_DISK:
        return Check("data folder", "warning", found, "Make room: logs, calibrations and models need it.")
    return Check("data folder", "ok", found)


def terminal(
    environ: Mapping[str, str] = os.environ, is_terminal: bool | None = None, size: tuple[int, int] | None = None
) -> Check:
    """Colors, size and characters of the terminal."""
    if not (sys.stdout.isatty() if is_terminal is None else is_terminal):
        return Check("terminal", "ok", f"{MISSING}: the output is no terminal")
    columns, lines = size or shutil.get_terminal_size()
    term, colors = environ.get("TERM", ""), environ.get("COLORTERM", "")
    found = f"TERM={term or MISSING} COLORTERM={colors or MISSING}, {columns}x{lines}"
    if term in ("", "dumb"):
        return Check("terminal", "warning", found, "The chat needs a terminal that can move its cursor; ask works.")
    if columns < SMALLEST[0] or lines < SMALLEST[1]:
        return Check("terminal", "warning", found, "The chat needs {}x{}: enlarge the window.".format(*SMALLEST))
    if colors not in ("truecolor", "24bit") and "direct" not in term:
        return Check("terminal", "ok", f"{found}; colors are approximated")
    return Check("terminal", "ok", found)


def _line(check: Check) -> str:
    advice = f"\n{'':<25}→ {check.advice}" if check.advice else ""
    return f"{GLYPHS[check.state]} {check.state:<8} {check.name:<13} {check.found}{advice}\n"


def _verdict(found: list[Check]) -> str:
    count = {state: sum(check.state == state for check in found) for state in GLYPHS}
    if count["problem"]:
        return f"\nkvchat cannot run: {count['problem']} to solve first.\n"
    more = f"; {count['warning']} to look at" if count["warning"] else ""
    return f"\nkvchat can run{more}.\n"
